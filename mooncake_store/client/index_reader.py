"""Where blocks are, as far as this host's replica of the index says: in microseconds, unleased.

The replica may be behind by the time an event takes, by four seconds at the very most: then
its writer has stopped stamping it, or has heard no directory for so long, and it is not used. So
what it says is a place to look at, and what is read there is judged by its checksum or header. What
it does not say is asked of the directory. Keys that this client removed, or had a bad copy of, are
asked there too, for longer than a replica can be behind: who removed a block finds it no more.

The directory orders its evictions by use. What was read without asking it is told to it afterwards,
ten times a second at most, without waiting for an answer.

Not here: the table (memory/index_table.py), who writes it (node/index_writer.py), reading blocks
(getter.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from mooncake_store.block_keys import KEY_BYTES, check_keys
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.memory.index_table import IndexView, is_wanted
from mooncake_store.memory.segment_file import SegmentRefused
from mooncake_store.records.blocks import Copy
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.wire.directory_protocol import KEYS_MAX

log = logging.getLogger("mooncake_store.client")
LOOK_AGAIN_S = 0.5  # for a table, after there was none that is current
REMOVED_S = 5.0  # longer than a table that is in use can be behind
REMOVED_MAX = 65_536
TELL_S = 0.1
IDLE_TELLS = 20  # then the thread that tells sleeps until something is used


class IndexReader:
    """Thread-safe."""

    def __init__(self, directory: DirectoryClient, nodes: KnownNodes) -> None:
        self._directory, self._nodes = directory, nodes
        self._view: IndexView | None = None
        self._is_wanted = is_wanted()
        self._look_s = 0.0  # when to look for a table again
        self._lock = threading.Lock()
        self._removed: dict[bytes, float] = {}  # until when the directory is asked, oldest first
        self._used: list[bytes] = []  # joined keys of one read each, not told yet
        self._used_bytes = 0
        self._is_sleeping, self._is_closed = True, False
        self._wake = threading.Event()
        self._teller: threading.Thread | None = None

    # ---- what it says

    def find(self, keys: Sequence[bytes]) -> list[tuple[Copy, ...]]:
        """The copies of each key, as far as they are known here; none: ask the directory."""
        view = self._current()
        if view is None or not keys:
            return [()] * len(keys)
        found = view.find(b"".join(keys))
        if self._removed:
            gone = self._removed_lately(keys)
            return [() if key in gone else each for key, each in zip(keys, found, strict=True)]
        return found

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Is each of these keys anywhere? The directory is asked for those not known here."""
        check_keys(keys)
        view = self._current()
        if view is None:
            return self._directory.exist(keys)
        answer = view.exist(b"".join(keys))
        if 0 not in answer and not self._removed:
            return [True] * len(keys)
        gone = self._removed_lately(keys) if self._removed else set()
        is_here = [bool(each) and key not in gone for key, each in zip(keys, answer, strict=True)]
        unknown = [index for index, is_known in enumerate(is_here) if not is_known]
        if unknown:
            asked = self._directory.exist([keys[index] for index in unknown])
            for index, is_there in zip(unknown, asked, strict=True):
                is_here[index] = is_there
        return is_here

    def _current(self) -> IndexView | None:
        """The table, if it can be believed now."""
        now_s = boot_s()
        view = self._view
        if view is not None and view.is_current(now_s):
            return view
        if not self._is_wanted or now_s < self._look_s:
            return None
        self._look_s = now_s + LOOK_AGAIN_S
        for path in self._paths():
            try:
                view = IndexView(path)
            except (SegmentRefused, OSError) as error:
                log.debug("%s", error)
                continue
            if view.is_current(now_s):
                self._view = view
                return view
        return None

    def _paths(self) -> list[str]:
        infos = [info for info in self._nodes.all() if self._nodes.is_same_host(info)]
        return list(dict.fromkeys(info.index_path for info in infos if info.index_path))

    # ---- what this client did

    def removed(self, keys: Sequence[bytes]) -> None:
        """Call it before the directory is asked to."""
        if not self._is_wanted:
            return
        until_s = time.monotonic() + REMOVED_S
        with self._lock:
            for key in keys:
                self._removed.pop(key, None)  # the newest ones are last
                self._removed[key] = until_s
            if len(self._removed) > REMOVED_MAX:  # it would forget: no table until it may
                self._removed.clear()
                self._view, self._look_s = None, boot_s() + REMOVED_S

    def _removed_lately(self, keys: Sequence[bytes]) -> set[bytes]:
        now_s = time.monotonic()
        with self._lock:
            while self._removed:
                key, until_s = next(iter(self._removed.items()))
                if until_s > now_s:
                    break
                del self._removed[key]
            return self._removed.keys() & set(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """These were read without asking, in the order of a chain."""
        joined = b"".join(reversed(keys))  # the end of a chain is colder, so it is told first
        with self._lock:
            self._used.append(joined)
            self._used_bytes += len(joined)
            while self._used_bytes > KEYS_MAX * KEY_BYTES and len(self._used) > 1:
                self._used_bytes -= len(self._used.pop(0))
            if self._teller is None and not self._is_closed:
                self._teller = threading.Thread(target=self._tell, name="index-uses", daemon=True)
                self._teller.start()
        if self._is_sleeping:
            self._wake.set()

    def _tell(self) -> None:
        """The directory of what was used, until `close`."""
        idle = 0
        while not self._is_closed:
            self._is_sleeping = idle >= IDLE_TELLS
            self._wake.wait(None if self._is_sleeping and not self._used else TELL_S)
            self._wake.clear()
            idle = 0 if self._tell_once() else idle + 1

    def _tell_once(self) -> bool:
        with self._lock:
            used, self._used, self._used_bytes = self._used, [], 0
        if used:
            try:
                self._directory.used(b"".join(used)[-KEYS_MAX * KEY_BYTES :])
            except StoreError as error:
                log.debug("uses are not told: %s", error)
        return bool(used)

    def close(self) -> None:
        """Before the directory's client is closed."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        if self._teller is not None:
            self._teller.join()
            self._tell_once()
        self._view = None
