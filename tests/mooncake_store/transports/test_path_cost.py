"""Which copy is read: near before far, idle before busy, memory before SSD, and load is shared."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mooncake_store.records.blocks import Copy
from mooncake_store.transports.known_nodes import Traffic
from mooncake_store.transports.paths.path_cost import CopyRoute, Distance, best_copies, distance
from tests.mooncake_store.makers import node_info

SIZE = 1024**2
IDLE = {
    "own": CopyRoute(Distance.SAME_NODE, 0.0),
    "host": CopyRoute(Distance.SAME_HOST, 0.0),
    "rack": CopyRoute(Distance.SAME_RACK, 0.0),
    "far": CopyRoute(Distance.OTHER, 0.0),
}


def copy(node_id: str, slot: int = 0) -> Copy:
    return Copy(node_id, slot, 1, 0, SIZE)


@pytest.mark.parametrize("bytes_per_s", [0.0, 3e9])
def test_equal_and_idle_the_nearest_wins_in_any_order(bytes_per_s: float, seed: int) -> None:
    chance, routes = random.Random(seed), dict(IDLE)
    routes = {name: replace(route, bytes_per_s=bytes_per_s) for name, route in IDLE.items()}
    names = list(routes)  # nearest first
    while len(names) > 1:
        copies = [copy(name) for name in chance.sample(names, len(names))]
        assert best_copies([copies], routes) == [copy(names[0])]
        names.pop(0)


def test_a_busy_near_node_loses_to_an_idle_far_one_only_when_waiting_takes_longer() -> None:
    far = CopyRoute(Distance.OTHER, 2e9)
    for under_way_bytes, chosen in ((0, "host"), (2 * SIZE, "host"), (100 * SIZE, "far")):
        near = CopyRoute(Distance.SAME_HOST, 4e9, under_way_bytes)
        found = [[copy("far"), copy("host")]]
        assert best_copies(found, {"far": far, "host": near}) == [copy(chosen)]


def test_one_batch_is_shared_between_equal_holders_in_proportion_to_their_rates() -> None:
    routes = {"a": CopyRoute(Distance.SAME_RACK, 1e9), "b": CopyRoute(Distance.SAME_RACK, 3e9)}
    found = [[copy("a", slot), copy("b", slot)] for slot in range(400)]
    chosen = best_copies(found, routes)
    shares = {
        name: sum(best is not None and best.node_id == name for best in chosen) for name in routes
    }
    assert shares == {"a": 100, "b": 300}


def test_every_choice_is_the_cheapest_given_the_ones_before_it(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        routes = {
            f"n{i}": CopyRoute(
                chance.choice(list(Distance)),
                chance.choice([0.0, 1e8, 1e9, 7e9]),
                chance.choice([0, 0, SIZE, 64 * SIZE]),
                chance.random() < 0.2,
            )
            for i in range(4)
        }
        names = [*routes, "gone"]
        found = [
            [
                Copy(name, slot, 1, 0, chance.choice([1, 4096, SIZE]))
                for name in chance.sample(names, chance.randint(0, 4))
            ]
            for slot in range(30)
        ]
        given: dict[str, int] = {}
        for copies, best in zip(found, best_copies(found, routes), strict=True):
            costs = {}
            for place in copies:
                if (route := routes.get(place.node_id)) is not None:
                    ahead_bytes = given.get(place.node_id, 0)
                    costs[place] = route.is_ssd, route.cost_s(ahead_bytes + place.size_bytes)
            assert (best is None) == (not costs)
            if best is not None:
                is_ssd, cost_s = min(costs.values())
                assert costs[best][0] == is_ssd
                assert costs[best][1] == pytest.approx(cost_s, rel=1e-9)
                given[best.node_id] = given.get(best.node_id, 0) + best.size_bytes


def test_memory_anywhere_wins_over_an_ssd_next_door() -> None:
    routes = {**IDLE, "own/ssd": CopyRoute(Distance.SAME_NODE, 9e9, is_ssd=True)}
    assert best_copies([[copy("own/ssd"), copy("far")]], routes) == [copy("far")]
    assert best_copies([[copy("own/ssd")]], routes) == [copy("own/ssd")]


def test_a_block_without_a_usable_holder_is_none_and_harms_no_other() -> None:
    found = [[], [copy("gone")], [copy("gone"), copy("far")]]
    assert best_copies(found, IDLE) == [None, None, copy("far")]


def test_distance_is_told_by_node_then_host_then_rack_label() -> None:
    info = replace(node_info("s1"), host_id="h1", rack="r1")
    assert distance(info, "s1", "h1", "r1") is Distance.SAME_NODE
    assert distance(replace(info, node_id="s1/ssd"), "s1", "h1", "") is Distance.SAME_NODE
    assert distance(info, "s0", "h1", "r9") is Distance.SAME_HOST
    assert distance(info, "s0", "h9", "r1") is Distance.SAME_RACK
    assert distance(info, "s0", "h9", "r9") is Distance.OTHER
    assert distance(replace(info, rack=""), "s0", "h9", "") is Distance.OTHER  # no label, no rack


def test_traffic_is_what_is_under_way_and_nothing_stays_behind() -> None:
    traffic = Traffic()
    with traffic.moving("a", 5), traffic.moving("b", 7):
        with pytest.raises(RuntimeError), traffic.moving("a", 3):
            assert traffic.under_way_bytes("a") == 8
            raise RuntimeError
        assert (traffic.under_way_bytes("a"), traffic.under_way_bytes("b")) == (5, 7)
    assert traffic.under_way_bytes("a") == 0 and not traffic._bytes
