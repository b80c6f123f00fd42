"""Rolling restarts of the processes that read certificates only at their start.

When the host's folder of keys changes, the launcher drains and restarts the outdated workers, one
at a time, while all other workers of the host serve. A draining worker finishes its requests, and
new requests are routed to other workers.

Hosts take turns, because an operator may copy new keys to all hosts at once. If a role has at least
two workers, one of them therefore always serves. The host that wins an election in
etcd has the turn. Without etcd, the host that owns a certain block in the directory has the turn.

The etcd member reads its certificate at each handshake, but the trusted authorities (CA file) only
at its start. When the authorities change, the member is restarted in the turn of its host, before
the workers. Only one member restarts at a time, so etcd keeps its quorum.

If the steps of a change of authority (keys/authority.py) follow too fast, other hosts may not trust
the processes of this host any more. A host that etcd rejects cannot get a turn, and a worker that
is not trusted never becomes ready. Such processes are therefore restarted without a turn: the etcd
member after KEPT_OUT_S, a worker after SILENT_S.

ZeroMQ, KV over TCP and the channels of frontends read renewed keys without a restart.
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

SETTLED_S = 3.0  # seconds without a change before restarts, because keys are copied file by file
SILENT_S = 5.0  # seconds without readiness after which an outdated worker needs no turn
WHOLE_S = 2.0  # seconds for which all workers must be ready before the next restart
TTL_S = 5  # lease in seconds of the turn in etcd, and pause after a failed campaign
KEPT_OUT_S = 10.0  # seconds of failing calls to etcd after which the etcd member needs no turn
ETCD = "etcd's member"  # name of the etcd member in collections of worker names
CLOSE_S_MAX = 0.5  # limit in seconds of the wait for etcd when the launcher stops
# Key and size of the block whose owner has the turn if there is no etcd.
TURN_KEY = hashlib.blake2b(b"renewal", digest_size=KEY_BYTES).digest()
TURN_BYTES = 4096
# Seconds: lease of this block, period of the calls to the directory, and their timeout.
LEASE_S, ASK_AGAIN_S, ASK_S_MAX = 15.0, 1.0, 1.0

log = logging.getLogger(__name__)


class HostTurn:
    """This host's turn to restart processes, by an election in etcd. The first call of `is_held`
    starts a campaign for the turn in a thread. `give_back` ends the turn."""

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
            me = Leader(self._host, "", "")
            self._held = campaign(etcd, turn, me, self._is_over.is_set, ttl_s=TTL_S)
        except StoreError as error:
            log.warning("no turn to restart workers: %s", error)
            self._is_over.wait(TTL_S)
            self._thread = None

    def is_kept_out(self, now_s: float) -> bool:
        """Call etcd once. True if all calls of this method have failed for KEPT_OUT_S."""
        try:
            etcd, prefix = parse_address(self._address)
            etcd.get(prefix)
            self._failing_from_s = None
        except EtcdFailed:
            if self._failing_from_s is None:
                self._failing_from_s = now_s
        return self._failing_from_s is not None and now_s - self._failing_from_s >= KEPT_OUT_S

    def give_back(self, wait_s: float | None = None) -> None:
        """End the turn or the campaign. `wait_s`: limit of the wait for the thread, if not None."""
        self._failing_from_s = None
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(wait_s)
        if self._held is not None:
            self._held.close()
        self._thread = self._held = None


class DirectoryTurn(HostTurn):
    """The turn if there is no etcd: the owner of the uncommitted block TURN_KEY has the turn. The
    directory grants an uncommitted block to only one owner, until the owner's lease expires."""

    def __init__(self, directory_address: str, host: str) -> None:
        super().__init__(directory_address, host)
        self._owner = f"renewal of {host}"
        self._client: DirectoryClient | None = None
        self._slot: Slot | None = None
        self._is_confirmed = False  # True if the directory confirmed the turn at the last call
        self.asked_s = float("-inf")  # monotonic time of the last call to the directory

    def is_held(self) -> bool:
        now_s = time.monotonic()
        if now_s - self.asked_s >= ASK_AGAIN_S:
            self.asked_s = now_s
            try:
                self._is_confirmed = self._ask_directory()
            except StoreError as error:
                log.warning("no turn to restart workers: %s", error)
                self._is_confirmed = False
        return self._is_confirmed

    def _ask_directory(self) -> bool:
        if self._client is None:
            self._client = DirectoryClient(self._address, ASK_S_MAX)
        client, slot = self._client, self._slot
        nodes = [
            each.node_id
            for each in client.stats().nodes
            if each.tier == "dram" and each.is_open and not each.is_draining
        ]
        node = min(nodes, default="")  # all hosts find the same node, until nodes join or drain
        if slot is not None:
            try:
                if slot.node_id == node and client.renew(self._owner, LEASE_S, slot.epoch):
                    return True
                client.abandon([slot], self._owner)
            except EpochPassed:
                log.warning("the directory has restarted: the turn to restart workers is over")
            self._slot = None
        if node:
            client.attach(node, "renewal", TURN_BYTES)
            given = client.allocate(
                node, [TURN_KEY], self._owner, LEASE_S, ephemeral=True, size_bytes=TURN_BYTES
            )
            self._slot = given.slots[0]
        return self._slot is not None

    def is_kept_out(self, now_s: float) -> bool:
        return False  # there is no etcd member to restart

    def give_back(self, wait_s: float | None = None) -> None:
        if self._client is not None:
            with contextlib.suppress(StoreError):  # if the call fails, the turn ends with the lease
                self._client.abandon([self._slot] if self._slot else [], self._owner)
            self._client.close()
        self._client = self._slot = None
        self._is_confirmed, self.asked_s = False, float("-inf")


def turn_at(directory_address: str, host: str) -> HostTurn:
    is_elected = directory_address.startswith(ELECTED)
    return (HostTurn if is_elected else DirectoryTurn)(directory_address, host)


class CertificateRenewal:
    """Decides whether to restart a worker or the etcd member. The launcher calls `due` often."""

    def __init__(self, keys: Keys | None, turn: HostTurn) -> None:
        self._turn = turn
        self._digests: LiveFiles[FileDigests] | None = None
        if keys is not None:
            paths = [keys.certificate, keys.private_key, keys.authorities]
            self._digests = LiveFiles(paths, lambda: _digests_of(keys))
        self._started_with: dict[str, str] = {}  # process -> digest of the files that it read
        self._seen: FileDigests | None = None
        self._changed_s = float("-inf")  # monotonic time of the last change of the files
        self._is_under_way = False  # True from the request for a turn until the turn's end
        self._whole_from_s: float | None = None  # time since which all processes serve, if known
        self._silent_from_s: dict[str, float] = {}  # outdated worker -> time since it is not ready

    def started(self, worker: str) -> None:
        """To be called when `worker`, or ETCD, starts and reads the current files of keys."""
        if self._digests is not None:
            self._started_with[worker] = self._digests.get().read_by(worker)

    def due(
        self,
        workers: Collection[str],
        is_whole: Callable[[], bool],
        serves: Callable[[str], bool],
        now_s: float | None = None,
    ) -> str:
        """The worker to drain and restart now, or ETCD; "" for none. `workers` may contain ETCD.

        `is_whole()` is True if all workers and the etcd member serve. `serves(worker)` is True if
        this worker serves. Both calls are costly, so they are made only while restarts are due.
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
            log.info("certificates have changed and %s is not ready: restarting it", silent)
            return silent
        self._is_under_way = True
        if not self._turn.is_held():
            if not stale:  # the outdated processes were restarted for other reasons
                self._end_turn()
            elif stale[0] == ETCD and self._turn.is_kept_out(now_s):
                return ETCD
            return ""
        if not is_whole() or self._whole_from_s is None:
            self._whole_from_s = now_s
        if now_s - self._whole_from_s < WHOLE_S:
            return ""
        if stale:
            self._whole_from_s = now_s
            log.info("certificates have changed: restarting %s", stale[0])
            return stale[0]
        self._end_turn()
        return ""

    def _silent(self, stale: Collection[str], serves: Callable[[str], bool], now_s: float) -> str:
        """An outdated worker that was not ready for SILENT_S; "" if there is none."""
        silent = [each for each in stale if each != ETCD and not serves(each)]
        self._silent_from_s = {each: self._silent_from_s.get(each, now_s) for each in silent}
        over = (each for each, from_s in self._silent_from_s.items() if now_s - from_s >= SILENT_S)
        return next(over, "")

    def _stale(self, workers: Collection[str], now: FileDigests, now_s: float) -> list[str]:
        """The processes that read older files, in the order in which they must restart."""
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
    """Digests of the files that processes read at their start."""

    all_files: str
    authorities: str

    def read_by(self, worker: str) -> str:
        return self.authorities if worker == ETCD else self.all_files


def _digests_of(keys: Keys) -> FileDigests:
    """Raises KeysInvalid while the files do not match, for example while they are copied."""
    _ = TlsContexts(keys).server
    authorities = keys.authorities.read_bytes()
    found = hashlib.sha256(keys.certificate.read_bytes() + keys.private_key.read_bytes())
    found.update(authorities)
    return FileDigests(found.hexdigest(), hashlib.sha256(authorities).hexdigest())
