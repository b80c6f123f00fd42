"""Finds blocks in this host's replica of the directory's index, within microseconds.

The replica is a table in shared memory. A storage node of this host updates it from the directory's
events and stamps it ten times a second, unless the directory has been silent for 2.5 s. A table
whose stamp is older than 1 s is not used. So the replica is at most 3.5 s out of date.

A hit gives no lease, so the block is verified by its checksum or header after the read. A miss goes
to the directory. After this client removed a block or found a bad copy of it, lookups of that block
go to the directory for REMOVED_S. So a client never finds a block that it has removed.

The directory chooses evictions by past uses. So reads without the directory are reported to it
afterwards, at most ten times a second, without waiting for a reply.

Not here: the table (memory/index_table.py), its writer (node/index_writer.py), reading blocks
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
LOOK_AGAIN_S = 0.5  # seconds between two searches for a current table
REMOVED_S = 5.0  # longer than a table in use can lag (3.5 s)
REMOVED_MAX = 65_536  # remembered block keys
REPORT_S = 0.1  # seconds between two reports of uses
IDLE_ROUNDS_MAX = 20  # rounds without a use after which the reporting thread sleeps until a use


class IndexReader:
    """Thread-safe."""

    def __init__(self, directory: DirectoryClient, nodes: KnownNodes) -> None:
        self._directory, self._nodes = directory, nodes
        self._view: IndexView | None = None
        self._is_wanted = is_wanted()
        self._look_s = 0.0  # CLOCK_BOOTTIME of the next search for a table
        self._lock = threading.Lock()
        # block key -> time.monotonic() until which lookups go to the directory; oldest first
        self._removed: dict[bytes, float] = {}
        self._used: list[bytes] = []  # per read that is not reported yet: its joined block keys
        self._used_bytes = 0
        self._is_sleeping, self._is_closed = True, False
        self._wake = threading.Event()
        self._reporter: threading.Thread | None = None

    def find(self, keys: Sequence[bytes]) -> list[tuple[Copy, ...]]:
        """The copies of each block key in the replica; (): ask the directory."""
        view = self._current()
        if view is None or not keys:
            return [()] * len(keys)
        found = view.find(b"".join(keys))
        if self._removed:
            gone = self._removed_lately(keys)
            return [() if key in gone else each for key, each in zip(keys, found, strict=True)]
        return found

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """True for block keys with a copy anywhere. Block keys not in the replica go to the
        directory."""
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

    def removed(self, keys: Sequence[bytes]) -> None:
        """Note removed or bad blocks. Call it before the directory is asked to remove them."""
        if not self._is_wanted:
            return
        until_s = time.monotonic() + REMOVED_S
        with self._lock:
            for key in keys:
                self._removed.pop(key, None)  # newest last
                self._removed[key] = until_s
            # These are too many to remember, so use no table until all entries would have expired.
            if len(self._removed) > REMOVED_MAX:
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
        """Note blocks that were read without the directory, in the order of their prefix chain."""
        joined = b"".join(reversed(keys))  # the end of a prefix first, so that it is evicted first
        with self._lock:
            self._used.append(joined)
            self._used_bytes += len(joined)
            while self._used_bytes > KEYS_MAX * KEY_BYTES and len(self._used) > 1:
                self._used_bytes -= len(self._used.pop(0))
            if self._reporter is None and not self._is_closed:
                self._reporter = threading.Thread(
                    target=self._report, name="index-uses", daemon=True
                )
                self._reporter.start()
        if self._is_sleeping:
            self._wake.set()

    def _report(self) -> None:
        idle = 0
        while not self._is_closed:
            self._is_sleeping = idle >= IDLE_ROUNDS_MAX
            self._wake.wait(None if self._is_sleeping and not self._used else REPORT_S)
            self._wake.clear()
            idle = 0 if self._report_once() else idle + 1

    def _report_once(self) -> bool:
        with self._lock:
            used, self._used, self._used_bytes = self._used, [], 0
        if used:
            try:
                self._directory.used(b"".join(used)[-KEYS_MAX * KEY_BYTES :])
            except StoreError as error:
                log.debug("uses are not reported: %s", error)
        return bool(used)

    def close(self) -> None:
        """Call it before the directory's client is closed."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        if self._reporter is not None:
            self._reporter.join()
            self._report_once()
        self._view = None
