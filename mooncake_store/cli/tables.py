"""The state of a store as tables for people. Not here: asking for it (app.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from mooncake_store.cli.places import shown_bytes
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.records.status import DirectoryStats


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def holders(stats: DirectoryStats) -> Table:
    """One line per holder: how full, and of what."""
    table = _table(
        "holders",
        ["node", "size", "used", "blocks", "writing", "resting", "idle", "evicted", ""],
    )
    for node in stats.nodes:
        state = "draining" if node.is_draining else "" if node.is_open else "telling what it has"
        table.add_row(
            node.node_id, shown_bytes(node.segment_bytes),
            f"{100 * node.used_units / max(1, node.units):.1f} %", str(node.ready_blocks),
            str(node.writing_blocks), shown_bytes(node.quarantined_units * node.unit_bytes),
            str(node.idle_blocks), str(node.evictions), state,
        )  # fmt: skip
    return table


def totals(stats: DirectoryStats) -> Table:
    """What the directory has counted since its epoch began."""
    table = _table("directory", ["", ""])
    hit = stats.hit_blocks / stats.lookup_blocks if stats.lookup_blocks else 0.0
    lines = {
        "epoch": stats.epoch, "blocks": stats.blocks, "copies": stats.copies,
        "stored": shown_bytes(stats.used_bytes), "leases": stats.leases, "owners": stats.owners,
        "pinned keys": stats.pins, "workers": stats.workers,
        "blocks looked up": stats.lookup_blocks, "found": f"{100 * hit:.1f} %",
        "found on SSD only": stats.hit_ssd_blocks, "commits": stats.commits,
        "evictions": stats.evictions, "spills": stats.spills, "bad copies": stats.bad_copies,
    }  # fmt: skip
    for name, value in lines.items():
        table.add_row(name, str(value))
    for name, used, quota in stats.tenants:
        table.add_row(f"tenant {name}", f"{shown_bytes(used)} of {shown_bytes(quota)}")
    return table


def blocks(found: Iterable[tuple[bytes, Copy]]) -> Table:
    """One line per copy; --json of `stat KEY` has slot and generation too."""
    table = _table("blocks", ["key", "node", "bytes", "checksum"])
    table.columns[0].no_wrap = True
    for key, copy in found:
        table.add_row(key.hex(), copy.node_id, str(copy.size_bytes), f"{copy.checksum:016x}")
    return table


def nodes(infos: Sequence[NodeInfo]) -> Table:
    table = _table("storage nodes", ["node", "tier", "size", "rack", "reached by"])
    for info in infos:
        ways = ["mapped" if not info.is_ssd else "its node"]
        ways += ["NIXL"] * bool(info.agent_name) + ["TCP " + info.data_address] * bool(
            info.data_address
        )
        table.add_row(
            info.node_id, info.tier, shown_bytes(info.segment_bytes), info.rack or "-",
            ", ".join(ways),
        )  # fmt: skip
    return table
