"""Probes the transport and the rate of each storage node, for estimates.

A probe connects with one small read. It then reads HELLO_BYTES and PROBE_BYTES several times each
into its own memory, and takes the medians. It is not a benchmark, because it shares the machine
with all other work.

The result is logged once for each incarnation of a node. Between processes of one host NIXL copies
through the kernel (CMA). If the two processes differ in user, PID namespace or IPC namespace, NIXL
silently uses TCP, which is several times slower. So a node of this host is read by plain TCP too.
If NIXL is hardly faster than plain TCP, a warning gives the likely reason.

Not here: the use of the numbers (path_cost.py, the conductor's estimates).
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from mooncake_store.errors import TransferFailed
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.transport import ByteSpan, Transport

log = logging.getLogger("mooncake_store.store")
PROBE_BYTES = 2 * 1024**2
HELLO_BYTES = 4096
ROUNDS = 5
PROBE_S_MAX = 0.25  # per node and transport
AGAIN_S = 0.05  # pause between two probes of a node that did not answer
CMA_OVER_TCP_MIN = 1.5  # rate of NIXL over plain TCP; measured: 3.9 with CMA, 0.9 without


@dataclass(frozen=True, slots=True)
class PathReport:
    node_id: str
    transport: str  # its name
    bytes_per_s: float  # median of reads of PROBE_BYTES
    latency_s: float  # median of reads of HELLO_BYTES
    warning: str  # "" if the path is as expected


class Probe:
    """Probes the nodes that a worker can reach. Thread-safe: one probe at a time."""

    def __init__(self, nodes: KnownNodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._buffer = np.zeros(PROBE_BYTES, np.uint8)
        self._buffer[:] = 1  # pre-fault
        self._paths: dict[str, PathReport] = {}
        self._logged: dict[str, str] = {}  # node_id -> the incarnation that was logged
        nodes.register(self._buffer)

    @property
    def latency_s(self) -> dict[str, float]:
        """Seconds for one small read, by node_id."""
        return {node_id: path.latency_s for node_id, path in self._paths.items()}

    def paths(self) -> list[PathReport]:
        """The result of the last rates()."""
        return list(self._paths.values())

    def rates(self, patience_s: float = 0.0) -> dict[str, float]:
        """Bytes per second from each node that answers within PROBE_S_MAX. Other nodes are probed
        again until `patience_s` has passed, because on a busy machine a node may answer late."""
        found: dict[str, PathReport] = {}
        until_s = time.monotonic() + patience_s
        self._nodes.refresh()
        with self._lock:
            silent = self._nodes.all()
            while True:
                silent = [info for info in silent if not self._is_found(info, found)]
                if not silent or time.monotonic() >= until_s:
                    break
                time.sleep(AGAIN_S)
            self._paths = found
            rates = {node_id: path.bytes_per_s for node_id, path in found.items()}
            self._nodes.bytes_per_s = rates
        return dict(rates)

    def _is_found(self, info: NodeInfo, found: dict[str, PathReport]) -> bool:
        """Probe this node. True also if no transport reaches it, because retries would not help."""
        transport = self._nodes.transport(info)
        path = self._path(info, transport) if transport else None
        if path is not None:
            found[info.node_id] = path
            self._log(info, path)
        return path is not None or transport is None

    def _path(self, info: NodeInfo, transport: Transport) -> PathReport | None:
        try:
            measured = self._measured(info, transport)
        except TransferFailed as error:
            log.debug("node_id=%s probe: %s", info.node_id, error)
            self._nodes.mark_bad(info)
            return None
        if measured is None:
            return None
        rate, latency_s = measured
        is_doubtful = transport is self._nodes.nixl and self._nodes.is_same_host(info)
        plain = None
        if is_doubtful and info.data_address:
            with contextlib.suppress(TransferFailed):
                plain = self._measured(info, self._nodes.tcp)
        warning = ""
        if plain is not None and rate < CMA_OVER_TCP_MIN * plain[0]:
            warning = (
                f"on this host, but NIXL ({_gb(rate)}) is hardly faster than plain TCP "
                f"({_gb(plain[0])}), probably because the processes cannot copy from each other: "
                "run them as one user, in one PID and IPC namespace (containers: --pid=host "
                "--ipc=host), and see kernel.yama.ptrace_scope"
            )
        return PathReport(info.node_id, transport.name, rate, latency_s, warning)

    def _log(self, info: NodeInfo, path: PathReport) -> None:
        if self._logged.get(info.node_id) == info.incarnation:
            return
        self._logged[info.node_id] = info.incarnation
        log.info(
            "node_id=%s is read by %s: %s, %.0f us for %d bytes",
            path.node_id,
            path.transport,
            _gb(path.bytes_per_s),
            path.latency_s * 1e6,
            HELLO_BYTES,
        )
        if path.warning:
            log.warning("node_id=%s is %s", path.node_id, path.warning)

    def _measured(self, info: NodeInfo, transport: Transport) -> tuple[float, float] | None:
        """(bytes per second, seconds for one small read); None: the time was too short. Raises
        TransferFailed if the node failed before the end of the first read of PROBE_BYTES."""
        until_s = time.monotonic() + PROBE_S_MAX
        length_bytes = min(PROBE_BYTES, info.segment_bytes)
        hello_bytes = min(HELLO_BYTES, length_bytes)
        latencies_s: list[float] = []
        seconds: list[float] = []
        try:
            self._read(info, transport, hello_bytes, until_s)  # connects
            for _ in range(ROUNDS):
                latencies_s.append(self._read(info, transport, hello_bytes, until_s))
            while len(seconds) < ROUNDS and time.monotonic() < until_s:
                seconds.append(self._read(info, transport, length_bytes, until_s))
        except TransferFailed:
            if not seconds:
                raise
        if not seconds:
            return None
        return length_bytes / statistics.median(seconds), statistics.median(latencies_s)

    def _read(
        self, info: NodeInfo, transport: Transport, length_bytes: int, until_s: float
    ) -> float:
        span, started_s = ByteSpan(0, length_bytes), time.perf_counter()
        transport.read(info, [span], [(self._buffer, span)], until_s - time.monotonic())
        return time.perf_counter() - started_s


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
