"""Hot prefixes: rates, whole chains, limits, bounded memory."""

from __future__ import annotations

import random

import pytest

from conductor import ConductorConfig
from conductor.replication.hotspots import TURN_S, Hotspots
from mooncake_store.prefix_index.prefix_index import PrefixIndex
from tests.conductor.fleet import keys


def setup(**config: object) -> tuple[Hotspots, PrefixIndex]:
    return Hotspots(ConductorConfig(**config)), PrefixIndex()  # type: ignore[arg-type]


def hold(index: PrefixIndex, node_id: str, blocks: str) -> None:
    for key in keys(blocks):
        index.add_many([key], node_id)


def hits_per_s(hot: Hotspots, key: bytes, now_s: float) -> float:
    """Exact for a steady rate that has lasted several half-lives."""
    hot._count()
    per_s = hot._per_s(now_s)
    return hot._heats[key].hits * per_s


def test_a_steady_rate_is_measured_and_fades_by_half_in_a_half_life() -> None:
    hot, _ = setup(hot_half_life_s=10.0)
    for tick in range(1_000):
        hot.note(keys("a*1"), 1, tick * 0.1)
    assert hits_per_s(hot, keys("a*1")[0], 100.0) == pytest.approx(10.0, rel=0.01)
    assert hits_per_s(hot, keys("a*1")[0], 110.0) == pytest.approx(5.0, rel=0.01)


def test_rates_survive_rescaling_over_a_long_time() -> None:
    hot, _ = setup(hot_half_life_s=1.0)
    for second in range(1_000):
        hot.note(keys("a*1"), 1, float(second))
        hot.check()
    assert 0.3 < hits_per_s(hot, keys("a*1")[0], 1_000.0) < 1.0


def test_a_cold_prefix_is_left_alone() -> None:
    hot, index = setup(hot_hits_per_s=1.0)
    hold(index, "s0", "a*5")
    hot.note(keys("a*5"), 5, 0.0)
    assert hot.suggest(index, ["s0", "s1"], 0.0) == []


def test_the_target_gets_what_it_lacks_in_order_from_one_that_has_it_all() -> None:
    hot, index = setup(hot_hits_per_s=0.1, hot_half_life_s=10.0)
    hold(index, "s0", "a*6")
    hold(index, "s1", "a*2")
    for _ in range(30):
        hot.note(keys("a*6"), 6, 0.0)
    (made,) = hot.suggest(index, ["s0", "s1"], 0.0)
    assert (made.source_node, made.target_node) == ("s0", "s1")
    assert made.block_keys == tuple(keys("a*6")[2:])


def test_a_shared_beginning_is_copied_with_the_end_that_is_hot_too() -> None:
    hot, index = setup(hot_hits_per_s=1.0, hot_half_life_s=10.0, hot_copies_max=2)
    hold(index, "s0", "sys*2+a*3")
    for number in range(60):
        hot.note(keys("sys*2"), 2, 0.0)
        if number < 20:
            hot.note(keys("sys*2+a*3"), 5, 0.0)
    (made,) = hot.suggest(index, ["s0", "s1"], 0.0)
    assert made.block_keys == tuple(keys("sys*2+a*3"))


def test_copies_stop_at_their_maximum_and_where_each_is_cool_enough() -> None:
    hot, index = setup(hot_hits_per_s=1.0, hot_half_life_s=10.0, hot_copies_max=3)
    hold(index, "s0", "a*1")
    nodes = [f"s{n}" for n in range(8)]
    for _ in range(1_000):
        hot.note(keys("a*1"), 1, 0.0)
    for expected in ("s1", "s2"):
        (made,) = hot.suggest(index, nodes, 0.0)
        assert made.target_node == expected
        hold(index, expected, "a*1")
        hot.arrived(keys("a*1")[0], expected)
    assert hot.suggest(index, nodes, 0.0) == []
    assert hot.suggest(index, nodes, 60.0) == [], "it has cooled down"


def test_a_suggestion_on_its_way_is_not_repeated_until_it_is_given_up() -> None:
    hot, index = setup(hot_hits_per_s=0.01, replicate_s_max=5.0)
    hold(index, "s0", "a*3")
    for _ in range(100):
        hot.note(keys("a*3"), 3, 0.0)
    assert len(hot.suggest(index, ["s0", "s1"], 0.0)) == 1
    assert hot.suggest(index, ["s0", "s1"], 4.0) == []
    assert len(hot.suggest(index, ["s0", "s1"], 6.0)) == 1
    hot.node_down("s1")
    assert len(hot.suggest(index, ["s0", "s1"], 6.0)) == 1, "what was on its way there is lost"


def test_copies_on_their_way_count_towards_the_maximum() -> None:
    hot, index = setup(hot_hits_per_s=0.01, hot_copies_max=3)
    hold(index, "s0", "a*1")
    for _ in range(1_000):
        hot.note(keys("a*1"), 1, 0.0)
    nodes = [f"s{n}" for n in range(8)]
    made = [hot.suggest(index, nodes, 0.0) for _ in range(4)]
    assert [[s.target_node for s in each] for each in made] == [["s1"], ["s2"], [], []]


def test_what_nobody_has_any_more_cannot_be_copied() -> None:
    hot, index = setup(hot_hits_per_s=0.01)
    for _ in range(100):
        hot.note(keys("a*3"), 3, 0.0)
    assert hot.suggest(index, ["s0", "s1"], 0.0) == []
    hold(index, "s0", "a*1")
    (made,) = hot.suggest(index, ["s0", "s1"], 0.0)
    assert made.block_keys == tuple(keys("a*1"))


def test_memory_is_bounded_and_the_hot_survive(seed: int) -> None:
    rng, (hot, _) = random.Random(seed), setup(hot_keys_max=200)
    for number in range(3_000):
        hot.note(keys(f"sys*2+x{rng.randrange(10_000)}*3"), 5, number * 0.01)
    assert hits_per_s(hot, keys("sys*2")[1], 30.0) > 10
    assert len(hot) <= 200
    hot.check()


def test_every_limit_holds_under_random_load(seed: int) -> None:
    config = ConductorConfig(
        hot_hits_per_s=0.01,
        hot_blocks_per_tick_max=7,
        hot_blocks_in_flight_max=20,
        hot_target_blocks_max=9,
    )
    rng, hot, index = random.Random(seed), Hotspots(config), PrefixIndex()
    nodes = ["s0", "s1", "s2"]
    for tick in range(300):
        family = f"{rng.choice('abcdef')}*{rng.randint(1, 12)}"
        hold(index, rng.choice(nodes), family)
        hot.note(keys(family), len(keys(family)), float(tick))
        made = hot.suggest(index, nodes, float(tick))
        hot.check()
        assert sum(len(s.block_keys) for s in made) <= 7
        for suggestion in made:
            assert 0 < len(suggestion.block_keys) <= 9
            assert suggestion.target_node != suggestion.source_node
            holding = [index.holders(key) for key in suggestion.block_keys]
            assert all(suggestion.source_node in names for names in holding)
            if rng.random() < 0.7:
                for key in suggestion.block_keys:
                    index.add_many([key], suggestion.target_node)
                    hot.arrived(key, suggestion.target_node)


def test_a_silence_of_a_week_cools_everything_and_breaks_nothing() -> None:
    hot, index = setup(hot_hits_per_s=0.01, hot_half_life_s=60.0)
    hold(index, "s0", "a*3")
    for _ in range(100):
        hot.note(keys("a*3"), 3, 0.0)
    assert hits_per_s(hot, keys("a*3")[0], 7 * 86_400.0) < 1e-9
    assert hot.suggest(index, ["s0", "s1"], 7 * 86_400.0) == []
    hot.check()


def test_a_node_that_joins_others_is_not_flooded_with_copies() -> None:
    hot, index = setup(
        hot_hits_per_s=0.01,
        hot_target_blocks_max=64,
        hot_blocks_per_tick_max=1_000,
        hot_blocks_in_flight_max=1_000,
        slow_start_s=30.0,
        replicate_s_max=5.0,
    )
    for name in "abcdefgh":
        for node_id in ("s0", "s1"):
            hold(index, node_id, f"{name}*20")
        for _ in range(100):
            hot.note(keys(f"{name}*20"), 20, 0.0)
    assert hot.suggest(index, ["s0", "s1"], 0.0) == [], "both have all of it"
    sent = {}
    for now_s in (10.0, 25.0, 60.0):
        made = hot.suggest(index, ["s0", "s1", "s2"], now_s)
        assert {suggestion.target_node for suggestion in made} == {"s2"}
        sent[now_s] = sum(len(suggestion.block_keys) for suggestion in made)
        hot.check()
    assert sent == {10.0: 8, 25.0: 32, 60.0: 64}


def test_who_comes_later_copies_a_prefix_that_is_still_wanted_when_its_turn_comes() -> None:
    hot, index = setup(hot_hits_per_s=0.01, hot_half_life_s=100.0)
    hold(index, "s0", "a*3")
    for _ in range(30):
        hot.note(keys("a*3"), 3, 0.0)
    nodes = ["s0", "s1"]
    asked = []

    def second(key: bytes) -> int:
        asked.append(key)
        return 1

    assert hot.suggest(index, nodes, 0.0, second) == []
    assert hot.suggest(index, nodes, TURN_S - 0.1, second) == []
    assert hot.suggest(index, nodes, TURN_S, second), "those before it do not see it, or died"
    assert set(asked) == {keys("a*3")[0]}, "all agree on the order: they may know different ends"


def test_who_comes_later_leaves_alone_what_was_copied_before_its_turn() -> None:
    hot, index = setup(hot_hits_per_s=0.2, hot_half_life_s=10.0, hot_copies_max=2)
    hold(index, "s0", "a*3")
    for _ in range(6):
        hot.note(keys("a*3"), 3, 0.0)
    nodes = ["s0", "s1"]
    assert hot.suggest(index, nodes, 0.0, lambda key: 1) == []
    hold(index, "s1", "a*3")
    assert hot.suggest(index, nodes, TURN_S, lambda key: 1) == []


def test_copies_are_counted_by_heat() -> None:
    hot, index = setup(hot_hits_per_s=1.0, hot_half_life_s=10.0, hot_copies_max=1)
    hold(index, "s0", "a*2")
    hold(index, "s1", "a*1")
    hold(index, "s0", "b*1")
    for tick in range(1_000):  # 5 hits per second on a, 1.25 on b, 10 on c, which is nowhere
        hot.note(keys("a*2"), 2, tick * 0.2)
        hot.note(keys("c*1"), 1, tick * 0.2)
        hot.note(keys("c*1"), 1, tick * 0.2)
        if tick % 4 == 0:
            hot.note(keys("b*1"), 1, tick * 0.2)
    hot.suggest(index, ["s0", "s1"], 200.0)
    found = {each.heat: (each.blocks, each.copies) for each in hot.copies_by_heat(index, 200.0)}
    assert found == {1: (1, 1), 2: (0, 0), 4: (2, 3), 8: (0, 0)}
    cold = hot.copies_by_heat(index, 300.0)
    assert [(each.heat, each.blocks) for each in cold] == [(1, 0), (2, 0), (4, 0), (8, 0)]
