"""What the directory says of the storage nodes, asked once a second.

In a thread of its own: a directory that does not answer costs its client two seconds, and the
frontend's other numbers should not wait for it. Not here: showing it (metrics.py).
"""

from __future__ import annotations

import logging
import threading

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.records.status import DirectoryStats

log = logging.getLogger(__name__)
PERIOD_S = 1.0


class Evictions:
    """Per node since the first look, however often node and directory begin anew. Pure.

    The directory's own count is no counter for a metrics page: it restarts, and a conductor that
    was reloaded would add all of it again. (While one reloads, both of its processes count.)
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[int, str], int]] = {}  # node -> (incarnation, its count)
        self._is_first = True
        self.totals: dict[str, int] = {}

    def look(self, stats: DirectoryStats) -> None:
        for node in stats.nodes:
            incarnation = (stats.epoch, node.incarnation)
            seen_incarnation, seen = self._last.get(node.node_id, (incarnation, 0))
            if self._is_first:
                seen = node.evictions  # those before were another process's to count
            is_same = incarnation == seen_incarnation
            new = node.evictions - seen if is_same else node.evictions
            self._last[node.node_id] = (incarnation, node.evictions)
            self.totals[node.node_id] = self.totals.get(node.node_id, 0) + new
        self._is_first = False


class StoreWatch:
    def __init__(self, directory: DirectoryClient) -> None:
        self.seen: DirectoryStats | None = None  # None while the directory does not answer
        self._directory = directory
        self._evictions = Evictions()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    @property
    def evictions(self) -> dict[str, int]:
        """Per node, as Evictions counts them."""
        return dict(self._evictions.totals)

    def close(self) -> None:
        """Before the client is closed."""
        self._is_closing.set()
        self._thread.join(timeout=self._directory.timeout_s + 1.0)

    def _run(self) -> None:
        while True:
            try:
                stats = self._directory.stats()
                self._evictions.look(stats)
                self.seen = stats
            except StoreError as error:
                if self.seen is not None:
                    log.warning("the directory does not answer: %s", error)
                self.seen = None
            if self._is_closing.wait(PERIOD_S):
                return
