"""Who sends a prefix: the holder that can soonest, and who is asked if that fails."""

from __future__ import annotations

import random

import pytest

from conductor import Conductor, Route
from conductor.routing.fetching import EVICTION_COST_SHARE
from mooncake_store.records.events import BlockRemoved, Event, NodeDown, NodeUp, WorkerUp
from tests.conductor.fleet import BLOCK_TOKENS, added, conductor, keys, node, prompt, worker

SLOW = {"s0": 1e8, "s1": 1e8}  # bytes/s: 30 blocks of 1 MB take 0.3 s


def on_s2(
    rates: dict[str, float],
    *held: Event,
    latency_s: dict[str, float] | None = None,
    policy: str = "kvcache_centric",
    **of_prefill: object,
) -> Conductor:
    """Both workers on s2; s0 and s1 only hold blocks. Computing takes longer than any fetch."""
    events: list[Event] = [NodeUp(node(f"s{n}")) for n in range(3)]
    events += [
        WorkerUp(
            worker(
                f"{role[0]}0",
                role,
                "s2",
                slots_max=99,
                prefill_coefficients=(0.0, 0.01, 0.0),
                transfer_bytes_per_s=rates,
                transfer_latency_s=latency_s or {},
                **(of_prefill if role == "prefill" else {}),
            )
        )
        for role in ("prefill", "decode")
    ]
    return conductor([*events, *held], ttft_slo_s=1e6, admission="none", policy=policy)


def routed(made: Conductor, name: str, blocks: str, now_s: float) -> Route:
    found = made.on_request(prompt(name, blocks), now_s)
    assert isinstance(found, Route)
    return found


@pytest.mark.parametrize("rates", [{}, SLOW, {"s0": 1e8, "s1": 0.9e8}])
def test_a_busy_sender_is_avoided_and_comes_back_when_it_has_sent(rates: dict[str, float]) -> None:
    made = on_s2(rates, *added("s0", "a*30"), *added("s1", "a*30"))
    first = routed(made, "r1", "a*30", 0.0)
    assert first.fetch_nodes == ("s0", "s1")
    assert routed(made, "r2", "a*30", 0.001).fetch_nodes == ("s1", "s0"), "s0 is sending"
    made.on_prefill_finished("r1", 0.002, first.cached_tokens)
    assert routed(made, "r3", "a*30", 0.003).fetch_nodes == ("s0", "s1"), "s1 is sending"


def test_a_much_slower_sender_is_not_taken_only_because_it_is_idle() -> None:
    made = on_s2({"s0": 1e9, "s1": 1e7}, *added("s0", "a*30"), *added("s1", "a*30"))
    assert routed(made, "r1", "a*30", 0.0).fetch_nodes == ("s0", "s1")
    assert routed(made, "r2", "a*30", 0.001).fetch_nodes == ("s0", "s1"), "0.06 s beside 3 s"


def test_the_second_choice_lacks_least_of_the_run_and_is_not_the_own_node() -> None:
    made = on_s2(
        {},
        *added("s0", "a*30"),
        *added("s1", "a*20"),
        *added("s2", "a*10"),
        NodeUp(node("s3")),
        *added("s3", "a*29"),
    )
    found = routed(made, "r1", "a*30", 0.0)
    assert (found.local_blocks, found.fetch_nodes) == (10, ("s0", "s3"))
    made.on_events([NodeDown("s3", "n1")], 0.1)
    assert routed(made, "r2", "a*30", 0.1).fetch_nodes == ("s0", "s1")
    made.on_events([NodeDown("s1", "n1")], 0.2)
    assert routed(made, "r3", "a*30", 0.2).fetch_nodes == ("s0",), "s2 has less than is fetched"


def test_without_a_fetch_nobody_is_named() -> None:
    made = on_s2({}, *added("s2", "a*30"), *added("s1", "a*30"))
    assert routed(made, "r1", "a*30", 0.0).fetch_nodes == ()


def test_of_equal_holders_the_soonest_is_named_and_the_next_one_is_second(seed: int) -> None:
    """Against a walk over all holders, after fetches of random size."""
    rng, both = random.Random(seed), 0
    for _ in range(50):
        nodes = [f"s{n}" for n in range(3, 3 + rng.randint(2, 6))]
        made = on_s2({})
        made.on_events([NodeUp(node(name)) for name in nodes], 0.0)
        for name in nodes:
            made.on_events(added(name, "a*30") + added(name, f"{name}*{rng.randint(1, 60)}"), 0.0)
        for number in range(rng.randint(0, 6)):
            name = rng.choice(nodes)
            routed(made, f"{name}-{number}", f"{name}*60", 0.0)
        waits = {name: made._cluster.send_wait_s(name, 0.0) for name in nodes}
        found = routed(made, "r", "a*30", 0.0)
        if found.fetch_node is None:
            continue  # what waits there is longer than computing takes
        least = sorted(waits.values())
        assert waits[found.fetch_node] == least[0]
        assert found.second_fetch_node not in (None, found.fetch_node)
        assert waits[str(found.second_fetch_node)] == least[1]
        both += 1
    assert both > 10, "too dull to prove anything"


def test_a_measured_latency_decides_between_holders_of_one_rate_and_is_in_the_prediction() -> None:
    held = (*added("s0", "a*30"), *added("s1", "a*30"))
    found = routed(on_s2({}, *held, latency_s={"s0": 0.3, "s1": 0.004}), "r1", "a*30", 0.0)
    assert found.fetch_nodes == ("s1", "s0")
    assert found.predicted.transfer_s == pytest.approx(0.004 + 30 * 1e6 / 1e9)
    assert found.predicted.handover_s == pytest.approx(31 * 1e6 / 4e9), "none within a node"


def test_a_node_that_nobody_measured_has_the_configured_latency() -> None:
    made = on_s2({}, *added("s0", "a*30"), latency_s={"s1": 0.0001})
    found = routed(made, "r1", "a*30", 0.0)
    assert found.predicted.transfer_s == pytest.approx(0.001 + 30 * 1e6 / 1e9)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    ("tokens_of_a_step", "holder", "hidden_share"),
    [
        pytest.param(60 * BLOCK_TOKENS, "s0", 0.75, id="a prompt that passes layer by layer"),
        pytest.param(60 * BLOCK_TOKENS + 1, "s0", 0.0, id="a prompt of one step"),
        pytest.param(60 * BLOCK_TOKENS, "s0/ssd", 0.0, id="a run on an ssd"),
    ],
)
def test_a_fetch_costs_what_computing_layer_by_layer_does_not_hide(
    tokens_of_a_step: int, holder: str, hidden_share: float, is_compiled: bool
) -> None:
    """It takes longer than it would take to compute: the half that is computed hides most of it."""
    computing_s = 30 * BLOCK_TOKENS * 0.01
    rate = 30 * 1e6 / (0.9 * computing_s)
    made = on_s2(
        {"s0": rate},
        *added(holder, "a*30"),
        policy="adaptive",
        load_beside_share=0.75,
        chunk_tokens=tokens_of_a_step,
    )
    if not is_compiled:
        made._compiled = None
    found = routed(made, "r1", "a*30+b*30", 0.0)
    assert (found.fetch_node, found.fetch_blocks) == ("s0", 30)
    of_transfer_s = 0.9 * computing_s + 0.001
    left_s = of_transfer_s - hidden_share * found.predicted.prefill_s
    assert found.predicted.transfer_s == pytest.approx(left_s, rel=1e-3)
    assert found.predicted.prefill_s == pytest.approx(computing_s, rel=1e-3)


@pytest.mark.parametrize(("of_computing", "fetches"), [(0.85, True), (0.95, False)])
def test_copies_for_a_small_gain_are_not_made_where_memory_is_full(
    of_computing: float, fetches: bool
) -> None:
    """To fetch takes so much of the time that computing takes, and crowds out other blocks."""
    rate = 1e6 / (of_computing * 0.01 * BLOCK_TOKENS)
    for policy in ("adaptive", "kvcache_centric"):
        made = on_s2({"s0": rate}, *added("s0", "a*30"), *added("s2", "b*1"), policy=policy)
        found = routed(made, "r0", "a*30", 0.0)
        assert found.fetch_nodes == ("s0",) and found.predicted.eviction_cost_s == 0, (
            "there is room"
        )
        made.on_finished("r0", 1.0)
        made.on_events([BlockRemoved(key, "s2") for key in keys("b*1")], 2.0)
        found = routed(made, "r1", "a*30", 2.0)
        does_fetch = fetches or policy == "kvcache_centric"
        assert found.fetch_nodes == (("s0",) if does_fetch else ())
        saved_s = 30 * BLOCK_TOKENS * 0.01 if does_fetch and policy == "adaptive" else 0.0
        assert found.predicted.eviction_cost_s == pytest.approx(EVICTION_COST_SHARE * saved_s)
