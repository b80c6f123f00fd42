"""Evictions are counted once, whatever begins anew; a silent directory shows nothing."""

from __future__ import annotations

import threading
from dataclasses import fields, replace

from backends.frontend.metrics import StoreWatch, Totals, counts_of
from mooncake_store.errors import StoreUnavailable
from mooncake_store.records.status import DirectoryStats, HolderStats
from tests.e2e.server import wait_until


def node(node_id: str, evictions: int, incarnation: str = "life1") -> HolderStats:
    counts = {field.name: 0 for field in fields(HolderStats)}
    named = {"node_id": node_id, "incarnation": incarnation, "tier": "dram", "fingerprint": "f"}
    return HolderStats(**{**counts, **named, "evictions": evictions})  # type: ignore[arg-type]


def stats(*nodes: HolderStats, epoch: int = 1) -> DirectoryStats:
    counts = {field.name: 0 for field in fields(DirectoryStats)}
    return DirectoryStats(**{**counts, "epoch": epoch, "tenants": (), "nodes": nodes})  # type: ignore[arg-type]


def totals_of(found: Totals, node: bool = False) -> dict[str, int]:
    """Totals of nodes, or of everything else, by the last word that names them."""
    return {
        value or metric.removeprefix("mooncake_store_").removesuffix("_total"): count
        for (metric, label, value), count in found.totals.items()
        if (label == "node") is node
    }


def test_evictions_before_the_first_look_were_another_s_to_count() -> None:
    evictions = Totals()
    evictions.look(counts_of(stats(node("s0", 40))))
    assert totals_of(evictions, node=True) == {"s0": 0}
    evictions.look(counts_of(stats(node("s0", 43), node("s1", 5))))  # s1 came meanwhile
    assert totals_of(evictions, node=True) == {"s0": 3, "s1": 5}


def test_a_node_or_directory_that_begins_anew_counts_on() -> None:
    evictions = Totals()
    evictions.look(counts_of(stats(node("s0", 0))))
    evictions.look(counts_of(stats(node("s0", 7))))
    evictions.look(counts_of(stats(node("s0", 2, "life2"))))
    assert totals_of(evictions, node=True) == {"s0": 9}
    evictions.look(counts_of(stats(node("s0", 9, "life2"), epoch=2)))
    assert totals_of(evictions, node=True) == {"s0": 18}
    evictions.look(counts_of(stats(epoch=2)))
    assert totals_of(evictions, node=True) == {"s0": 18}


def looked_up(epoch: int, asked: int, hits: int, on_ssd: int) -> DirectoryStats:
    return replace(
        stats(epoch=epoch),
        lookup_blocks=asked,
        hit_blocks=hits,
        hit_ssd_blocks=on_ssd,
        spills=on_ssd,
        bad_copies=hits,
    )


def test_lookups_are_counted_by_tier_from_the_first_look_on_over_epochs() -> None:
    counts = Totals()
    counts.look(counts_of(looked_up(1, 100, 50, 20)))
    assert set(totals_of(counts).values()) == {0}
    counts.look(counts_of(looked_up(1, 110, 57, 22)))
    expected = {"dram": 5, "ssd": 2, "miss": 3, "spills": 2, "bad_copies": 7}
    assert totals_of(counts) == expected
    counts.look(counts_of(looked_up(2, 8, 4, 1)))  # a new leader
    assert totals_of(counts) == {"dram": 8, "ssd": 3, "miss": 7, "spills": 3, "bad_copies": 11}
    counts.look(counts_of(looked_up(2, 8, 4, 1)))
    assert totals_of(counts) == {"dram": 8, "ssd": 3, "miss": 7, "spills": 3, "bad_copies": 11}


class Directory:
    timeout_s = 0.1

    def __init__(self) -> None:
        self.is_silent = False
        self.asked = threading.Semaphore(0)

    def stats(self) -> DirectoryStats:
        self.asked.release()
        if self.is_silent:
            raise StoreUnavailable("no answer")
        return stats(node("s0", 0))


def test_a_directory_that_does_not_answer_shows_nothing(monkeypatch) -> None:
    monkeypatch.setattr("backends.frontend.metrics.PERIOD_S", 0.01)
    directory = Directory()
    watch = StoreWatch(directory)  # type: ignore[arg-type]
    try:
        wait_until(lambda: watch.seen, "the first look")
        directory.is_silent = True
        wait_until(lambda: watch.seen is None, "the silence to be noticed")
        directory.is_silent = False
        wait_until(lambda: watch.seen, "the directory to be back")
    finally:
        watch.close()
