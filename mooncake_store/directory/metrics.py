"""Prometheus metrics of a directory.

The directory and the metrics page run in different threads. The page shows the DirectoryStats that
the server loop passes to `update` once a second, and never reads the directory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mooncake_store.process.metrics_page import counter, counters, gauge, gauges
from mooncake_store.records.status import DirectoryStats, HolderStats

HOLDER = ("node_id", "tier")
_PER_HOLDER: tuple[tuple[str, str, Callable[[HolderStats], float]], ...] = (
    ("bytes_max", "Memory of the holder.", lambda node: node.segment_bytes),
    (
        "used_bytes",
        "Memory of blocks, rounded up to units, and of reserved slots.",
        lambda node: node.used_units * node.unit_bytes,
    ),
    (
        "block_bytes",
        "Bytes of the blocks, without rounding up to units.",
        lambda node: node.used_bytes,
    ),
    (
        "quarantined_bytes",
        "Memory in quarantine, because a transfer may still write to it.",
        lambda node: node.quarantined_units * node.unit_bytes,
    ),
    (
        "pinned_bytes",
        "Memory of hard-pinned blocks.",
        lambda node: node.pinned_units * node.unit_bytes,
    ),
    (
        "is_open",
        "1 once the holder's inventory is complete; before that it takes no blocks.",
        lambda node: node.is_open,
    ),
    ("is_draining", "1 while the holder is drained.", lambda node: node.is_draining),
)
_COUNTED_PER_HOLDER: tuple[tuple[str, str, Callable[[HolderStats], float]], ...] = (
    ("evictions", "Copies evicted from the holder.", lambda node: node.evictions),
    (
        "adopted_blocks",
        "Blocks adopted from before this directory's start.",
        lambda node: node.adopted,
    ),
)


class DirectoryCollector(Collector):
    """Shows the latest stats; nothing before the first update."""

    def __init__(self) -> None:
        self._stats: DirectoryStats | None = None
        self._silent_addresses = 0

    def update(self, stats: DirectoryStats, silent_addresses: int) -> None:
        self._stats, self._silent_addresses = stats, silent_addresses

    def collect(self) -> Iterator[Metric]:
        if self._stats is None:
            return
        yield from directory_families(self._stats)
        yield gauge(
            "mooncake_directory_silent_addresses",
            "Addresses that could not be bound again after the key was renewed; see the log.",
            self._silent_addresses,
        )


def directory_families(stats: DirectoryStats) -> Iterator[Metric]:
    at = "mooncake_directory_"
    yield gauge(
        at + "epoch", "Epoch of the directory, which identifies its incarnation.", stats.epoch
    )
    yield counter(at + "events", "Events published.", stats.sequence)
    yield gauge(at + "blocks", "Distinct announced block keys.", stats.blocks)
    yield gauge(at + "copies", "Announced copies, over all holders.", stats.copies)
    yield gauge(
        at + "ephemeral_copies", "Copies that are freed with their last lease.", stats.ephemeral
    )
    yield gauge(at + "leases", "Leases, one per copy and request.", stats.leases)
    yield gauge(at + "lease_owners", "Requests that hold leases.", stats.owners)
    yield gauge(at + "pinned_keys", "Keys with a pin, soft or hard.", stats.pins)
    yield gauge(at + "workers", "Registered prefill and decode workers.", stats.workers)
    yield counter(at + "lookups", "Lookups answered.", stats.lookups)
    yield counters(
        at + "lookup_blocks",
        "Blocks looked up, by result: in DRAM, on SSDs only, missing.",
        ["result"],
        [
            (["dram"], stats.hit_blocks - stats.hit_ssd_blocks),
            (["ssd"], stats.hit_ssd_blocks),
            (["miss"], stats.lookup_blocks - stats.hit_blocks),
        ],
    )
    yield counter(at + "commits", "Blocks committed.", stats.commits)
    yield counter(at + "evictions", "Copies evicted.", stats.evictions)
    yield counter(at + "spills", "Copies committed to SSDs.", stats.spills)
    yield counter(
        at + "bad_copies",
        "Copies that readers found missing or corrupt (checksums).",
        stats.bad_copies,
    )
    yield gauges(
        at + "tenant_used_bytes",
        "Bytes of a tenant's blocks.",
        ["tenant"],
        [([name], used) for name, used, _ in stats.tenants],
    )
    yield gauges(
        at + "tenant_quota_bytes",
        "Quota of a tenant; not shown without a quota.",
        ["tenant"],
        [([name], quota) for name, _, quota in stats.tenants if quota],
    )
    yield from _holder_families(stats.nodes)


def _holder_families(nodes: tuple[HolderStats, ...]) -> Iterator[Metric]:
    """Metrics with one row per registered holder (the DRAM or the SSD of a node)."""
    at = "mooncake_directory_holder_"
    for name, meaning, value in _PER_HOLDER:
        rows = [((node.node_id, node.tier), float(value(node))) for node in nodes]
        yield gauges(at + name, meaning, HOLDER, rows)
    yield gauges(
        at + "blocks",
        "Blocks by state: idle ones may be evicted, leased ones are leased or hard-pinned.",
        [*HOLDER, "state"],
        [
            ((node.node_id, node.tier, state), count)
            for node in nodes
            for state, count in (
                ("writing", node.writing_blocks),
                ("idle", node.idle_blocks),
                ("leased", node.ready_blocks - node.idle_blocks),
            )
        ],
    )
    for name, meaning, value in _COUNTED_PER_HOLDER:
        rows = [((node.node_id, node.tier), float(value(node))) for node in nodes]
        yield counters(at + name, meaning, HOLDER, rows)
