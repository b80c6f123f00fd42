"""How many bytes this process has asked of each storage node: not received yet, and in all.

Not here: what that means for the choice of a copy (path_cost.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

NODES_MAX = 4_096


class Traffic:
    """Thread-safe. Remembers the last NODES_MAX nodes that something was asked of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}  # under way; nodes with nothing are not in it
        self._asked_bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def moving(self, node_id: str, moved_bytes: int) -> Iterator[None]:
        """So many bytes are under way until the block ends, however it ends."""
        with self._lock:
            self._bytes[node_id] = self._bytes.get(node_id, 0) + moved_bytes
            self._asked_bytes[node_id] = self._asked_bytes.pop(node_id, 0) + moved_bytes
            if len(self._asked_bytes) > NODES_MAX:
                del self._asked_bytes[next(iter(self._asked_bytes))]
        try:
            yield
        finally:
            with self._lock:
                left_bytes = self._bytes.pop(node_id) - moved_bytes
                assert left_bytes >= 0, f"{node_id}: {left_bytes} bytes under way"
                if left_bytes:
                    self._bytes[node_id] = left_bytes

    def under_way_bytes(self, node_id: str) -> int:
        return self._bytes.get(node_id, 0)

    def asked_bytes(self) -> dict[str, int]:
        """Since this process began, from node_id."""
        with self._lock:
            return dict(self._asked_bytes)
