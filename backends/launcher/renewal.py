"""Renewed certificates reach Tritons, which read them at their start only: restarts, one by one.

When the host's folder of keys changes, each worker's Triton that was started with other
certificates is drained and started again, while all other workers of this host serve. Hosts take
turns, by an election in etcd of their own, because folders may be copied to all at once: so a role
with two workers always has one. Requests under way end where they are; new ones go elsewhere.

Everything else reads renewed keys by itself: ZeroMQ, KV over TCP, and the frontends' channels.

Not here: keys (mooncake_store/keys), draining and starting (triton_process.py).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection

from mooncake_store.directory.election import Leader, Leadership, campaign, parse_address
from mooncake_store.errors import StoreError
from mooncake_store.keys.folder import Keys, LiveFiles
from mooncake_store.keys.tls import TlsContexts
from mooncake_store.wire.addresses import ELECTED

SETTLED_S = 3.0  # a folder that is being copied changes file by file
WHOLE_S = 2.0  # all workers serve for so long before the next one is restarted
TTL_S = 5

log = logging.getLogger(__name__)


class HostTurn:
    """Whether it is this host's turn. It is asked for at the first question, and given back."""

    def __init__(self, directory_address: str, host: str) -> None:
        """`directory_address`: without an election there is one host only."""
        self._address, self._host = directory_address, host
        self._held: Leadership | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def is_held(self) -> bool:
        if not self._address.startswith(ELECTED):
            return True
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
            held = campaign(etcd, turn, Leader(self._host, "", ""), self._is_over.is_set,
                            ttl_s=TTL_S)  # fmt: skip
            if held is not None:
                self._held = held
        except StoreError as error:
            log.warning("no turn to restart workers: %s", error)
            self._is_over.wait(TTL_S)
            self._thread = None

    def give_back(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._held is not None:
            self._held.close()
        self._thread = self._held = None


class CertificateRenewal:
    """Which worker is to be restarted now. Asked by the launcher again and again."""

    def __init__(self, keys: Keys | None, turn: HostTurn) -> None:
        self._turn = turn
        self._digest: LiveFiles[str] | None = None
        if keys is not None:
            paths = [keys.certificate, keys.private_key, keys.authorities]
            self._digest = LiveFiles(paths, lambda: _digest_of(keys))
        self._started_with: dict[str, str] = {}
        self._seen, self._changed_s = "", float("-inf")
        self._whole_from_s: float | None = None

    def started(self, worker: str) -> None:
        """Its Triton is being started, with the certificates of now."""
        if self._digest is not None:
            self._started_with[worker] = self._digest.get()

    def due(
        self, workers: Collection[str], is_whole: Callable[[], bool], now_s: float | None = None
    ) -> str:
        """The worker to be drained and started again; "" for none now.

        `is_whole`: do all workers of this host serve? Asked only while one is to be restarted.
        """
        if self._digest is None:
            return ""
        now_s = time.monotonic() if now_s is None else now_s
        digest = self._digest.get()
        if digest != self._seen:
            self._seen, self._changed_s = digest, now_s
        stale = sorted(each for each in workers if self._started_with.get(each, digest) != digest)
        if not stale and self._whole_from_s is None:
            return ""
        if now_s - self._changed_s < SETTLED_S or not self._turn.is_held():
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
            log.info("certificates have changed: %s is drained and started again", stale[0])
            return stale[0]
        self._whole_from_s = None
        self._turn.give_back()
        return ""

    def close(self) -> None:
        self._turn.give_back()


def _digest_of(keys: Keys) -> str:
    """KeysInvalid for files that do not belong together: a folder that is being copied."""
    _ = TlsContexts(keys).server
    found = hashlib.sha256()
    for path in (keys.certificate, keys.private_key, keys.authorities):
        found.update(path.read_bytes())
    return found.hexdigest()
