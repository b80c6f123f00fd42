"""The index benchmark: its indexes agree, its loads are what they say, its decisions are routes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.index import decision
from bench.index.indexes import OurIndex, PyDict, memory_per_block, placed, requests_of
from bench.index.lookups import Contender, contenders
from loadtest.replay.trace import TraceRow, read_trace

TRACE = Path(__file__).parents[1] / "data" / "conversation_turns.jsonl"


def conversations(seed: int, count: int) -> list[list[int]]:
    """Turns that begin with one common block; each is an earlier one and a few blocks more."""
    rng, fresh = random.Random(seed), iter(range(1, 1_000_000))
    found: list[list[int]] = [[0]]
    for _ in range(count):
        history = rng.choice(found[-30:] if rng.random() < 0.7 else found[:1])
        found.append([*history, *(next(fresh) for _ in range(rng.randint(1, 9)))])
    return found[1:]


@pytest.mark.parametrize("placement", ["rr", "rep4"])
@pytest.mark.parametrize("workers", [3, 64, 200])
def test_our_index_scores_what_the_reference_scores(
    seed: int, placement: str, workers: int
) -> None:
    load = placed(conversations(seed, 300), placement, workers)
    ours, reference = OurIndex(), PyDict()
    for worker, _, ids in load.stored:
        ours.store(worker, ids)
        reference.store(worker, ids)
    for ids in load.requests:
        scores = ours.scores(ours.find(ids))
        assert scores == reference.find(ids) and max(scores.values()) == len(ids)


def test_all_indexes_find_the_same_and_each_round_is_counted(seed: int) -> None:
    load = placed(conversations(seed, 120), "rep4", 8)
    for one in contenders(load):  # refuses when they disagree
        one.round()
        one.round()
        first, second = one.measured.rounds
        assert 0 < second.best_us <= first.best_us <= first.mean_us


def test_an_index_that_overcounts_is_refused(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    answers = Contender.answers

    def wrong(self: Contender) -> list[dict[int, int]]:
        found = answers(self)
        if self.measured.index == "ours":
            found[-1] = {worker: blocks + 1 for worker, blocks in found[-1].items()}
        return found

    monkeypatch.setattr(Contender, "answers", wrong)
    with pytest.raises(RuntimeError, match="disagree"):
        contenders(placed(conversations(seed, 20), "rr", 4))


def test_a_worker_announces_only_blocks_that_are_new_to_it() -> None:
    load = placed([[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3]], "rr", 2)
    assert list(load.stored) == [(0, None, [0, 1, 2]), (1, None, [0, 3]), (0, 2, [4])]
    assert (load.blocks, load.keys) == (6, 5)
    assert len(placed([[0]] * 5, "rep3", 2).stored) == 2, "more copies than workers"
    with pytest.raises(ValueError, match="neither rr nor rep"):
        placed([[0]], "rep", 2)


def test_memory_is_measured_per_block_and_the_reference_needs_more(
    tmp_path: Path, seed: int
) -> None:
    load = placed(conversations(seed, 1_500), "rr", 8)
    ours, reference = (memory_per_block(load, way, tmp_path) for way in ("ours", "pydict"))
    assert 49 + 24 < ours["counted_bytes"] < ours["rss_bytes"] * 1.2
    assert ours["rss_bytes"] < reference["rss_bytes"]


@pytest.mark.parametrize("policy", ["kvcache_centric", "adaptive"])
def test_the_fleet_does_what_was_predicted_and_nothing_is_left_over(policy: str) -> None:
    rows = [
        TraceRow(number, 0.0, len(ids) * 512 + 7, 20, tuple(ids))
        for number, ids in enumerate(conversations(5, 60))
    ]
    fleet = decision.fleet_of(policy, 4)
    fleet.cache(rows[:30])
    times = decision.decided_us(fleet, rows[30:], 0.5)
    assert len(times) == 30 and min(took.wall_us for took in times) > 0
    fleet.conductor.check()
    fleet.advance(1e6)
    stats = fleet.conductor.stats()
    assert (stats.routed, stats.in_flight, sum(stats.rejected.values())) == (30, 0, 0)
    assert stats.cached_tokens > 0 and not any(map(len, fleet.prefilling.values()))


def test_the_published_format_is_read() -> None:
    assert requests_of(TRACE, 3) == [list(row.hash_ids) for row in read_trace(TRACE, 3)]
