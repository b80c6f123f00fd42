"""A link between nodes with a given rate, under the real transport.

Not here: its traffic (__main__.py).
"""

from __future__ import annotations

import threading
import time
from typing import Any


class SlowLink:
    """A link shared by all reads of a process from other nodes: bytes follow each other at
    `rate`.
    """

    def __init__(self, rate: Any) -> None:
        self._rate = rate  # bytes per second, in memory that processes share; 0: not throttled
        self._lock = threading.Lock()
        self._free_s = 0.0  # end of the earlier transfers

    def passed(self, moved_bytes: int, started_s: float) -> None:
        """Wait until bytes that were requested at `started_s` would have passed."""
        if (rate := self._rate.value) <= 0:
            return
        with self._lock:
            self._free_s = max(self._free_s, started_s) + moved_bytes / rate
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def throttle(rate: Any) -> None:
    """In a worker's process: NIXL's reads pass through a link and are otherwise unchanged."""
    from mooncake_store.transports import known_nodes

    link = SlowLink(rate)

    class Throttled(known_nodes.NixlTransport):
        def read(self, node: Any, remote: Any, local: Any, deadline_s: float) -> None:
            started_s = time.monotonic()
            super().read(node, remote, local, deadline_s)
            link.passed(sum(span.length_bytes for span in remote), started_s)

    known_nodes.NixlTransport = Throttled  # type: ignore[misc]
