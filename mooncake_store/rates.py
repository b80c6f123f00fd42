"""How fast bytes come from each storage node: a short probe, for estimates.

A probe connects with one small read, then reads PROBE_BYTES a few times into memory of its own
and takes the median. It is not a benchmark: it shares the machine with whatever runs.

Not here: what the numbers are used for (the conductor's estimates).
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from mooncake_store.errors import TransferFailed
from mooncake_store.known_nodes import KnownNodes
from mooncake_store.membership import NodeInfo
from mooncake_store.transport import Span, Transport

PROBE_BYTES = 2 * 1024**2
HELLO_BYTES = 4096
ROUNDS = 5
PROBE_S_MAX = 0.25  # per node


class Probe:
    """Probes the nodes that a worker knows. Thread-safe: one probe at a time."""

    def __init__(self, nodes: KnownNodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._buffer = np.zeros(PROBE_BYTES, np.uint8)
        self._buffer[:] = 1  # pre-fault
        self.latency_s: dict[str, float] = {}  # of one small read, from node_id
        nodes.register(self._buffer)

    def rates(self) -> dict[str, float]:
        """Bytes per second from each node that answers within PROBE_S_MAX."""
        found = {}
        self._nodes.refresh()
        with self._lock:
            for info in self._nodes.all():
                transport = self._nodes.transport(info)
                rate = self._rate(info, transport) if transport else None
                if rate is not None:
                    found[info.node_id] = rate
        return found

    def _rate(self, info: NodeInfo, transport: Transport) -> float | None:
        until_s = time.monotonic() + PROBE_S_MAX
        length_bytes = min(PROBE_BYTES, info.segment_bytes)
        seconds: list[float] = []
        try:
            self._read(info, transport, min(HELLO_BYTES, length_bytes), until_s)  # connects
            self.latency_s[info.node_id] = self._read(
                info, transport, min(HELLO_BYTES, length_bytes), until_s
            )
            while len(seconds) < ROUNDS and time.monotonic() < until_s:
                seconds.append(self._read(info, transport, length_bytes, until_s))
        except TransferFailed:
            if not seconds:
                self._nodes.mark_bad(info)
        return length_bytes / statistics.median(seconds) if seconds else None

    def _read(
        self, info: NodeInfo, transport: Transport, length_bytes: int, until_s: float
    ) -> float:
        span, started_s = Span(0, length_bytes), time.perf_counter()
        transport.read(info, [span], [(self._buffer, span)], until_s - time.monotonic())
        return time.perf_counter() - started_s
