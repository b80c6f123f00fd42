"""Renewed certificates reach what reads them at its start only: restarts, one by one.

When the host's folder of keys changes, each worker's Triton that was started with other
certificates is drained and started again, while all other workers of this host serve. Hosts take
turns, because folders may be copied to all at once: so a role with two workers always has one.
Requests under way end where they are; new ones go elsewhere. A turn is an election of its own in
etcd, or, where one directory serves without an election, a block that only one may write.

etcd's member reads its certificate at each handshake, but the authorities only when it starts, so
it is started again when those change, before the workers, and in the same turn: so etcd keeps its
quorum. Where etcd lets nobody in any more, as after two steps of a renewal at once, no turn can be
had; then it is started again without.

A worker that cannot be called any more, because two steps came too fast and nobody believes its
certificate, is started again without a turn: there is nothing to lose, and it would never be whole.

Everything else reads renewed keys by itself: ZeroMQ, KV over TCP, and the frontends' channels.

Not here: keys (mooncake_store/keys), draining and starting (triton_process.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import Leader, Leadership, campaign, parse_address
from mooncake_store.directory.etcd import EtcdFailed
from mooncake_store.errors import EpochPassed, StoreError
from mooncake_store.keys.folder import Keys, LiveFiles
from mooncake_store.keys.tls import TlsContexts
from mooncake_store.records.blocks import Slot
from mooncake_store.wire.addresses import ELECTED

SETTLED_S = 3.0  # a folder that is being copied changes file by file
SILENT_S = 5.0  # a worker is not called to be lost for one answer that is late
WHOLE_S = 2.0  # all workers serve for so long before the next one is restarted
TTL_S = 5
KEPT_OUT_S = 10.0  # etcd has let nobody in for so long: no turn is to be had
ETCD = "etcd's member"  # among the workers
# Of a turn where nothing is elected: whose block, its size, and how it is asked for.
TURN_KEY = hashlib.blake2b(b"renewal", digest_size=KEY_BYTES).digest()
TURN_BYTES = 4096
CLOSE_S_MAX = 0.5
LEASE_S, ASK_AGAIN_S, ASK_S_MAX = 15.0, 1.0, 1.0

log = logging.getLogger(__name__)


class HostTurn:
    """Whether it is this host's turn. It is asked for at the first question, and given back."""

    def __init__(self, directory_address: str, host: str) -> None:
        self._address, self._host = directory_address, host
        self._held: Leadership | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._failing_from_s: float | None = None

    def is_held(self) -> bool:
        if self._held is not None and not self._held.may_serve():
            self.give_back()
        if self._held is None and self._thread is None:
            self._is_over.clear()
            self._thread = threading.Thread(target=self._ask, name="renewal-turn", daemon=True)
            self._thread.start()
        return self._held is not None

    def _ask(self) -> None:
        try:
            etcd, prefix = parse_address(self._address)
            turn = prefix.removesuffix("/directory") + "/renewal"
            held = campaign(
                etcd, turn, Leader(self._host, "", ""), self._is_over.is_set, ttl_s=TTL_S
            )
            if held is not None:
                self._held = held
        except StoreError as error:
            log.warning("no turn to restart workers: %s", error)
            self._is_over.wait(TTL_S)
            self._thread = None

    def is_kept_out(self, now_s: float) -> bool:
        """Has etcd not answered this host for a while? Asks it."""
        try:
            etcd, prefix = parse_address(self._address)
            etcd.get(prefix)
            self._failing_from_s = None
        except EtcdFailed:
            if self._failing_from_s is None:
                self._failing_from_s = now_s
        return self._failing_from_s is not None and now_s - self._failing_from_s >= KEPT_OUT_S

    def give_back(self, wait_s: float | None = None) -> None:
        """`wait_s`: for an answer of etcd, when this process ends and the turn with it."""
        self._failing_from_s = None
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(wait_s)
        if self._held is not None:
            self._held.close()
        self._thread = self._held = None


class DirectoryTurn(HostTurn):
    """The same where nothing is elected. Of a directory only one owner has the slot of a block that
    is being written, which ends with its lease, so the host that has that of TURN_KEY restarts."""

    def __init__(self, directory_address: str, host: str) -> None:
        super().__init__(directory_address, host)
        self._owner = f"renewal of {host}"
        self._client: DirectoryClient | None = None
        self._slot: Slot | None = None
        self._is_sure = False
        self.asked_s = float("-inf")

    def is_held(self) -> bool:
        now_s = time.monotonic()
        if now_s - self.asked_s >= ASK_AGAIN_S:
            self.asked_s = now_s
            try:
                self._is_sure = self._ask_directory()
            except StoreError as error:
                log.warning("no turn to restart workers: %s", error)
                self._is_sure = False
        return self._is_sure

    def _ask_directory(self) -> bool:
        if self._client is None:
            self._client = DirectoryClient(self._address, ASK_S_MAX)
        client, slot = self._client, self._slot
        nodes = [
            each.node_id
            for each in client.stats().nodes
            if each.tier == "dram" and each.is_open and not each.is_draining
        ]
        node = min(nodes, default="")  # where all hosts ask: one may come, or drain, meanwhile
        if slot is not None:
            try:
                if slot.node_id == node and client.renew(self._owner, LEASE_S, slot.epoch):
                    return True
                client.abandon([slot], self._owner)
            except EpochPassed:
                log.warning("the directory has begun anew: the turn to restart workers is over")
            self._slot = None
        if node:
            client.attach(node, "renewal", TURN_BYTES)
            given = client.allocate(
                node, [TURN_KEY], self._owner, LEASE_S, ephemeral=True, size_bytes=TURN_BYTES
            )
            self._slot = given.slots[0]
        return self._slot is not None

    def is_kept_out(self, now_s: float) -> bool:
        return False  # there is no member of etcd

    def give_back(self, wait_s: float | None = None) -> None:
        if self._client is not None:
            with contextlib.suppress(StoreError):  # then it ends with its lease
                self._client.abandon([self._slot] if self._slot else [], self._owner)
            self._client.close()
        self._client = self._slot = None
        self._is_sure, self.asked_s = False, float("-inf")


def turn_at(directory_address: str, host: str) -> HostTurn:
    is_elected = directory_address.startswith(ELECTED)
    return (HostTurn if is_elected else DirectoryTurn)(directory_address, host)


class CertificateRenewal:
    """Which worker is to be restarted now. Asked by the launcher again and again."""

    def __init__(self, keys: Keys | None, turn: HostTurn) -> None:
        self._turn = turn
        self._digests: LiveFiles[FileDigests] | None = None
        if keys is not None:
            paths = [keys.certificate, keys.private_key, keys.authorities]
            self._digests = LiveFiles(paths, lambda: _digests_of(keys))
        self._started_with: dict[str, str] = {}
        self._seen: FileDigests | None = None
        self._changed_s = float("-inf")
        self._is_under_way = False  # a turn was asked for, and not given back
        self._whole_from_s: float | None = None
        self._silent_from_s: dict[str, float] = {}  # stale workers that cannot be called

    def started(self, worker: str) -> None:
        """Its process is being started, with the certificates of now. `worker`: or ETCD."""
        if self._digests is not None:
            self._started_with[worker] = self._digests.get().read_by(worker)

    def due(
        self,
        workers: Collection[str],
        is_whole: Callable[[], bool],
        serves: Callable[[str], bool],
        now_s: float | None = None,
    ) -> str:
        """The worker to be drained and started again, or ETCD; "" for none now.

        `is_whole`: does all of it serve on this host? `serves`: does this worker? Asked only while
        one is to be restarted.
        """
        if self._digests is None:
            return ""
        now_s = time.monotonic() if now_s is None else now_s
        stale = self._stale(workers, self._digests.get(), now_s)
        if not stale and not self._is_under_way:
            return ""
        if now_s - self._changed_s < SETTLED_S:
            return ""
        if silent := self._silent(stale, serves, now_s):
            log.info("certificates have changed, and %s cannot be called any more", silent)
            return silent
        self._is_under_way = True
        if not self._turn.is_held():
            if not stale:  # they began anew by themselves
                self._end_turn()
            elif stale[0] == ETCD and self._turn.is_kept_out(now_s):
                return ETCD
            return ""
        if not is_whole():
            self._whole_from_s = now_s
            return ""
        if self._whole_from_s is None:
            self._whole_from_s = now_s
        if now_s - self._whole_from_s < WHOLE_S:
            return ""
        if stale:
            self._whole_from_s = now_s
            log.info("certificates have changed: %s is started again", stale[0])
            return stale[0]
        self._end_turn()
        return ""

    def _silent(self, stale: Collection[str], serves: Callable[[str], bool], now_s: float) -> str:
        """A stale worker that has not served for SILENT_S: with what it was started, nobody
        believes it."""
        silent = [each for each in stale if each != ETCD and not serves(each)]
        self._silent_from_s = {each: self._silent_from_s.get(each, now_s) for each in silent}
        over = (each for each, from_s in self._silent_from_s.items() if now_s - from_s >= SILENT_S)
        return next(over, "")

    def _stale(self, workers: Collection[str], now: FileDigests, now_s: float) -> list[str]:
        """Which were started with other files, in the order of their restarts."""
        if now != self._seen:
            self._seen, self._changed_s = now, now_s
        found = [
            each
            for each in workers
            if now.read_by(each) != self._started_with.get(each, now.read_by(each))
        ]
        return sorted(found, key=lambda each: (each != ETCD, each))

    def _end_turn(self) -> None:
        self._is_under_way, self._whole_from_s = False, None
        self._turn.give_back()

    def close(self) -> None:
        self._turn.give_back(CLOSE_S_MAX)


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Of a folder of keys, as far as processes read it at their start."""

    all_files: str
    authorities: str

    def read_by(self, worker: str) -> str:
        return self.authorities if worker == ETCD else self.all_files


def _digests_of(keys: Keys) -> FileDigests:
    """KeysInvalid for files that do not belong together: a folder that is being copied."""
    _ = TlsContexts(keys).server
    authorities = keys.authorities.read_bytes()
    found = hashlib.sha256(keys.certificate.read_bytes() + keys.private_key.read_bytes())
    found.update(authorities)
    return FileDigests(found.hexdigest(), hashlib.sha256(authorities).hexdigest())
