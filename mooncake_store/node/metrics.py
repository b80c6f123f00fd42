"""Prometheus metrics of a storage node, and of any process that reads from the store.

A node cannot count one-sided reads of its memory (mapped, RDMA, CMA), because its process takes no
part. The reading process counts its own reads. ReaderCollector exports the reads of a storage node;
workers have their own page (backends/workers/metrics.py).

Not here: HTTP (metrics_page.py), the source of the numbers (spiller.py, ssd/, tcp_server.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mooncake_store.process.metrics_page import Latencies, Rows, counter, counters, gauge, gauges
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.nixl_transport import frozen_agents
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.transport import TransferCounters
from mooncake_store.wire.node_protocol import AnyControl, NodeStats

Answer = Callable[[AnyControl, float], object]  # (request, monotonic time of arrival)


@dataclass(eq=False)
class NodeCollector(Collector):
    """A node's own metrics. Each scrape calls `_stats` and `_served` in an HTTP thread."""

    _stats: Callable[[], NodeStats]
    _served: Callable[[], Mapping[str, TransferCounters]] = dict

    def collect(self) -> Iterable[Metric]:
        yield from node_families(self._stats())
        yield from transfer_families("mooncake_node_served_", self._served())


class ReaderCollector(Collector):
    """Bytes that one process moved: by transport, by network card, and for reads also by node."""

    def __init__(self, nodes: Callable[[], KnownNodes | None]) -> None:
        """`nodes` returns None until the process first reads from the store."""
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
        yield counters(
            "mooncake_reader_path_bytes", "Bytes requested from each node.", labels, rows
        )
        yield gauges(
            "mooncake_reader_path_bytes_per_second",
            "Latest measured read rate from each node, in bytes/s.",
            labels,
            rates,
        )


def timed(answer: Answer, latencies: Latencies) -> Answer:
    """Wrap `answer`: record the seconds from a request's arrival to its answer, by verb."""

    def answer_timed(request: AnyControl, arrived_s: float) -> object:
        try:
            return answer(request, arrived_s)
        finally:
            verb = str(request.__struct_config__.tag)
            latencies.observe(verb, time.monotonic() - arrived_s)

    return answer_timed


def transfer_families(prefix: str, counted: Mapping[str, TransferCounters]) -> Iterator[Metric]:
    """Bytes, transfers, seconds and failures by transport."""
    both = ["transport", "direction"]
    moved = _rows(counted, read="read_bytes", write="write_bytes")
    meaning = "Bytes moved; read: out of a node's segment, write: into it."
    yield counters(prefix + "bytes", meaning, both, moved)
    ended = _rows(counted, read="reads", write="writes")
    yield counters(prefix + "transfers", "Successful transfers.", both, ended)
    yield counters(
        prefix + "transfer_seconds",
        "Seconds of successful transfers; concurrent transfers are added.",
        ["transport"],
        [((name,), c.seconds) for name, c in sorted(counted.items())],
    )
    yield counters(
        prefix + "transfer_failures",
        "Transfers that failed, or missed their deadline.",
        ["transport", "kind"],
        _rows(counted, failed="failures", timeout="timeouts"),
    )


def _rows(counted: Mapping[str, object], **attributes: str) -> Rows:
    """For each object and each label=attribute: ((object's name, label), attribute's value)."""
    for name, each in sorted(counted.items()):
        for label, attribute in attributes.items():
            yield (name, label), getattr(each, attribute)


def nic_families(
    prefix: str, counted: Mapping[str, NicCounters], agents_abandoned: int
) -> Iterator[Metric]:
    """Traffic of each network card that has its own NIXL agent; nothing without such cards."""
    if not counted:
        return
    items = sorted(counted.items())
    yield counters(
        prefix + "nic_bytes",
        "Bytes moved to and from other hosts.",
        ["nic", "direction"],
        _rows(counted, read="read_bytes", write="write_bytes"),
    )
    yield counters(
        prefix + "nic_failures",
        "failed: transfers or posts that failed; given_up: overdue parts that were abandoned.",
        ["nic", "kind"],
        _rows(counted, failed="failures", given_up="abandoned"),
    )
    yield counters(
        prefix + "nic_rests",
        "Cool-downs of this card's paths.",
        ["nic"],
        [((name,), c.cool_downs) for name, c in items],
    )
    yield gauges(
        prefix + "nic_resting_paths",
        "Paths of this card in cool-down now.",
        ["nic"],
        [((name,), c.cooling_down) for name, c in items],
    )
    yield counter(
        prefix + "nixl_agents_given_up",
        "NIXL agents frozen after a path was abandoned; a frozen agent stays until the process "
        "ends.",
        agents_abandoned,
    )


# Field of NodeStats -> help text of its metric.
_GAUGES = {
    "segment_bytes": "Size of the memory segment.",
    "requests_waiting": "Requests waiting at the control socket.",
    "ssd_bytes": "Size of the SSD file.",
    "ssd_blocks": "Blocks on the SSD, from its manifest.",
    "index_blocks": "Entries of the host's index replica; 0 if another node writes it.",
}
_COUNTERS = {
    "spilled_blocks": "Blocks copied to the SSD.",
    "spilled_bytes": "Bytes copied to the SSD.",
    "spills_given_up": "Offered blocks that were not stored: evicted meanwhile, corrupt, not "
    "written, or commit rejected.",
    "restored_blocks": "Blocks read back from the SSD.",
    "restored_bytes": "Bytes read back from the SSD.",
    "restores_missed": "Blocks not restored: missing, late or unreadable.",
    "checksum_failures": "Blocks on the SSD with a wrong checksum.",
    "disk_errors": "Errors of the disk.",
    "fetched_blocks": "Blocks pulled from other nodes.",
}


def node_families(stats: NodeStats) -> Iterator[Metric]:
    """The metrics that are computed from NodeStats."""
    at = "mooncake_node_"
    yield gauges(
        at + "info",
        "Identity of the node; always 1.",
        ["node_id", "incarnation", "pages", "ssd"],
        [((stats.node_id, stats.incarnation, stats.segment_pages, stats.ssd), 1)],
    )
    for name, meaning in _GAUGES.items():
        yield gauge(at + name, meaning, getattr(stats, name))
    for name, meaning in _COUNTERS.items():
        yield counter(at + name, meaning, getattr(stats, name))
