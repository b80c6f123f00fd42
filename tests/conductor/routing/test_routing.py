"""The corner cases of routing; test_pairs.py holds the choice against brute force."""

from __future__ import annotations

import pytest

from conductor import Conductor, ConductorConfig, Reject, Route
from conductor.routing.fetching import cached_tokens
from mooncake_store.records.events import BlockAdded, Event, NodeUp, WorkerUp
from tests.conductor.fleet import conductor, fleet, keys, node, prompt, worker


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    assert cached_tokens(10, 64, 640) == 639
    assert cached_tokens(10, 64, 641) == 640
    assert cached_tokens(0, 64, 5) == 0
    assert cached_tokens(3, 64, 1) == 0


def test_a_worker_that_failed_this_request_is_not_tried_again_by_it() -> None:
    made = conductor()
    avoided = frozenset({("p0", "w1"), ("d0", "w1")})
    for number in range(4):
        routed = made.on_request(prompt(f"r{number}", "a*3", excluded_workers=avoided), 0.0)
        assert isinstance(routed, Route)
        assert (routed.prefill.worker_id, routed.decode.worker_id) == ("p1", "d1")
    nobody = frozenset({("p0", "w1"), ("p1", "w1")})
    refused = made.on_request(prompt("r9", "a*3", excluded_workers=nobody), 0.0)
    assert isinstance(refused, Reject) and refused.kind == "no_prefill_worker"
    assert "2 x excluded by this request" in refused.reason


def test_a_burst_of_unrelated_requests_is_spread_over_both_pools() -> None:
    made = conductor(fleet(prefills=4, decodes=4, nodes=2))
    used: dict[str, int] = {}
    for number in range(16):
        routed = made.on_request(prompt(f"r{number}", f"x{number}*8"), 0.0)
        assert isinstance(routed, Route)
        for name in (routed.prefill.worker_id, routed.decode.worker_id):
            used[name] = used.get(name, 0) + 1
    assert set(used.values()) == {4}, used


def test_an_idle_cluster_takes_its_workers_in_turn_so_that_all_memory_is_used() -> None:
    made, order = conductor(fleet(prefills=3, decodes=3, nodes=3)), []
    for number in range(6):
        routed = made.on_request(prompt(f"r{number}", f"x{number}*8"), number * 0.1)
        assert isinstance(routed, Route)
        order.append(routed.prefill.worker_id)
        made.on_finished(f"r{number}", number * 0.1 + 0.05)
    assert order == ["p0", "p1", "p2"] * 2


def test_workers_of_different_speed_share_a_burst_by_their_speed() -> None:
    slow, fast = (0.0, 0.003, 0.0), (0.0, 0.001, 0.0)
    events: list[Event] = [
        NodeUp(node("s0")),
        WorkerUp(worker("p0", "prefill", "s0", prefill_coefficients=slow, slots_max=99)),
        WorkerUp(worker("p1", "prefill", "s0", prefill_coefficients=fast, slots_max=99)),
        WorkerUp(worker("d0", "decode", "s0", slots_max=99)),
    ]
    made, to_fast = conductor(events, ttft_slo_s=30.0, tbt_slo_s=1.0), 0
    for number in range(40):
        routed = made.on_request(prompt(f"r{number}", prompt_tokens=500), 0.0)
        assert isinstance(routed, Route)
        to_fast += routed.prefill.worker_id == "p1"
    assert to_fast == 30


@pytest.mark.parametrize("policy", ["cache_aware", "load_balance", "random"])
def test_the_compared_policies_never_fetch(policy: str) -> None:
    made = conductor(policy=policy)
    made.on_events([BlockAdded(key, "s0") for key in keys("a*30")], 0.0)
    for number in range(30):
        routed = made.on_request(prompt(f"r{number}", "a*30"), 0.0)
        if isinstance(routed, Route):
            assert routed.fetch_node is None
    assert made.stats().fetches == 0


def test_random_routing_is_the_same_for_the_same_request_and_uses_every_worker() -> None:
    def names() -> list[str]:
        made = Conductor(ConductorConfig(policy="random"))
        made.on_events(fleet(prefills=4, decodes=4, slots_max=999), 0.0)
        routed = [made.on_request(prompt(f"r{n}", "a*1"), 0.0) for n in range(40)]
        return [r.prefill.worker_id for r in routed if isinstance(r, Route)]

    assert names() == names() and len(set(names())) == 4
