"""Prometheus metrics of a storage node, and of any process that reads from the store.

One-sided reads of a node's memory (mapped, RDMA, CMA) cannot be counted by the node, because its
process takes no part. The reading process counts them: ReaderCollector, in workers and in nodes
that fetch.

Not here: HTTP (metrics_page.py), the source of the numbers (spiller.py, ssd/, tcp_server.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mooncake_store.process.metrics_page import Latencies, counter, counters, gauge, gauges
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.nixl_transport import frozen_agents
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.transport import TransferCounters
from mooncake_store.wire.node_protocol import AnyControl, NodeStats

Answer = Callable[[AnyControl, float], object]  # (request, monotonic time of arrival)


class NodeCollector(Collector):
    """Calls `stats` and `served` for each request of the page, in its thread."""

    def __init__(
        self,
        stats: Callable[[], NodeStats],
        served: Callable[[], Mapping[str, TransferCounters]] = dict,
    ) -> None:
        self._stats, self._served = stats, served

    def collect(self) -> Iterable[Metric]:
        yield from node_families(self._stats())
        yield from transfer_families("mooncake_node_served_", self._served())


class ReaderCollector(Collector):
    """Bytes per transport and per path of one process's reads and writes."""

    def __init__(self, nodes: Callable[[], KnownNodes | None]) -> None:
        """`nodes` returns None before the first read."""
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        nodes = self._nodes()
        if nodes is None:
            return
        counted = {transport.name: transport.counters for transport in nodes.transports()}
        yield from transfer_families("mooncake_reader_", counted)
        yield from nic_families("mooncake_reader_", nodes.nic_counters(), frozen_agents())
        asked, routes = nodes.traffic.asked_bytes(), nodes.routes()
        rows, rates = [], []
        for info in nodes.all():
            transport, route = nodes.transport(info), routes.get(info.node_id)
            if transport is None or route is None:
                continue
            path = (info.node_id, transport.name, route.distance.name.lower())
            rows.append((path, asked.get(info.node_id, 0)))
            if route.bytes_per_s:
                rates.append((path, route.bytes_per_s))
        labels = ["node_id", "transport", "distance"]
        yield counters("mooncake_reader_path_bytes", "Bytes asked of each node.", labels, rows)
        yield gauges(
            "mooncake_reader_path_bytes_per_second", "Its rate, as measured last.", labels, rates
        )


def timed(answer: Answer, latencies: Latencies) -> Answer:
    """`answer`, with the latency of each request from its arrival, by verb."""

    def answer_timed(request: AnyControl, came_s: float) -> object:
        try:
            return answer(request, came_s)
        finally:
            verb = str(request.__struct_config__.tag)
            latencies.observe(verb, time.monotonic() - came_s)

    return answer_timed


def transfer_families(prefix: str, counted: Mapping[str, TransferCounters]) -> Iterator[Metric]:
    """Bytes, transfers, seconds and failures by transport."""
    items = sorted(counted.items())
    both = ["transport", "direction"]
    yield counters(
        prefix + "bytes",
        "Bytes moved.",
        both,
        [
            ((name, way), value)
            for name, c in items
            for way, value in (("read", c.read_bytes), ("write", c.write_bytes))
        ],
    )
    yield counters(
        prefix + "transfers",
        "Transfers that ended well.",
        both,
        [
            ((name, way), value)
            for name, c in items
            for way, value in (("read", c.reads), ("write", c.writes))
        ],
    )
    yield counters(
        prefix + "transfer_seconds",
        "Their seconds; those of concurrent ones add up.",
        ["transport"],
        [((name,), c.seconds) for name, c in items],
    )
    yield counters(
        prefix + "transfer_failures",
        "Transfers that failed, or missed their deadline.",
        ["transport", "kind"],
        [
            ((name, kind), value)
            for name, c in items
            for kind, value in (("failed", c.failures), ("timeout", c.timeouts))
        ],
    )


def nic_families(
    prefix: str, counted: Mapping[str, NicCounters], agents_given_up: int
) -> Iterator[Metric]:
    """Traffic of each network card with a NIXL agent of its own; nothing without such cards."""
    if not counted:
        return
    items = sorted(counted.items())
    yield counters(
        prefix + "nic_bytes",
        "Bytes moved to and from other hosts.",
        ["nic", "direction"],
        [
            ((name, way), value)
            for name, c in items
            for way, value in (("read", c.read_bytes), ("write", c.write_bytes))
        ],
    )
    yield counters(
        prefix + "nic_failures",
        "Parts that failed, or were overdue and moved elsewhere.",
        ["nic", "kind"],
        [
            ((name, kind), value)
            for name, c in items
            for kind, value in (("failed", c.failures), ("given_up", c.given_up))
        ],
    )
    yield counters(
        prefix + "nic_rests",
        "Times that a path of this card began to rest.",
        ["nic"],
        [((name,), c.rests) for name, c in items],
    )
    yield gauges(
        prefix + "nic_resting_paths",
        "Paths of this card that rest now.",
        ["nic"],
        [((name,), c.resting) for name, c in items],
    )
    yield counter(
        prefix + "nixl_agents_given_up",
        "NIXL agents that stay unused until the process ends.",
        agents_given_up,
    )


def node_families(stats: NodeStats) -> Iterator[Metric]:
    """All metrics of a storage node, from its stats alone."""
    at = "mooncake_node_"
    yield gauges(
        at + "info",
        "Who this is: always 1.",
        ["node_id", "incarnation", "pages", "ssd"],
        [((stats.node_id, stats.incarnation, stats.segment_pages, stats.ssd), 1)],
    )
    yield gauge(at + "segment_bytes", "DRAM that it offers.", stats.segment_bytes)
    yield gauge(at + "requests_waiting", "Requests on its control socket.", stats.requests_waiting)
    yield gauge(at + "ssd_bytes", "Size of its file of blocks.", stats.ssd_bytes)
    yield gauge(at + "ssd_blocks", "Blocks that its manifest lists.", stats.ssd_blocks)
    yield counter(at + "spilled_blocks", "Blocks copied to the SSD.", stats.spilled_blocks)
    yield counter(at + "spilled_bytes", "Their bytes.", stats.spilled_bytes)
    yield counter(
        at + "spills_given_up",
        "Evicted while they were written, or not written.",
        stats.spills_given_up,
    )
    yield counter(at + "restored_blocks", "Blocks read back from the SSD.", stats.restored_blocks)
    yield counter(at + "restored_bytes", "Their bytes.", stats.restored_bytes)
    yield counter(
        at + "restores_missed",
        "Not there any more, too late, or not readable.",
        stats.restores_missed,
    )
    yield counter(
        at + "checksum_failures",
        "Blocks whose bytes on the SSD were not theirs.",
        stats.checksum_failures,
    )
    yield counter(at + "disk_errors", "Errors of the disk.", stats.disk_errors)
    yield gauge(
        at + "index_blocks",
        "In the index replica of its host, if it writes that.",
        stats.index_blocks,
    )
    yield counter(at + "fetched_blocks", "Blocks pulled from other nodes.", stats.fetched_blocks)
