"""A worker that joins others at work gets its share little by little; a new cluster has none."""

from __future__ import annotations

from collections import Counter

import pytest

from conductor import Conductor, ConductorConfig, Route
from conductor.load.worker import budget, warm_up
from mooncake_store.records.events import WorkerReported, WorkerUp
from tests.conductor.fleet import fleet, prompt, report, worker


def burst(
    joined_ago_s: float | None, policy: str = "adaptive", requests: int = 12, **config: object
) -> Counter[str]:
    """Where 12 prompts of a second each go, on two workers with four seconds of work and one that
    joined so long ago."""
    made = Conductor(
        ConductorConfig(policy=policy, queue_order="fifo", report_s_max=1e6, **config)  # type: ignore[arg-type]
    )
    made.on_events(fleet(prefills=2, slots_max=100), 0.0)
    if joined_ago_s is not None:
        joined = WorkerUp(worker("p9", "prefill", "s0", slots_max=100))
        made.on_events([joined], 1_000.0 - joined_ago_s)
    busy = [report(name, queue_requests=1, queue_tokens=4_000) for name in ("p0", "p1")]
    made.on_events([WorkerReported(said) for said in busy], 1_000.0)
    went = Counter[str]()
    for number in range(requests):
        answer = made.on_request(prompt(f"r{number}", prompt_tokens=1_000), 1_000.0)
        assert isinstance(answer, Route), answer
        went[answer.prefill.worker_id] += 1
    made.check()
    return went


def test_warm_up_falls_from_one_to_nothing_and_copies_grow_from_an_eighth() -> None:
    ages = (-1.0, 0.0, 15.0, 29.0, 30.0, 1e9)
    found = [warm_up(0.0, age_s, 30.0) for age_s in ages]
    assert found == [1.0, 1.0, 0.5, pytest.approx(1 / 30), 0.0, 0.0]
    assert warm_up(0.0, 0.0, 0.0) == 0.0, "0 s turns it off"
    assert [budget(128, new) for new in found[1:3]] == [16, 64] and budget(128, 0.0) == 128
    assert budget(1, 1.0) == 1


@pytest.mark.parametrize("policy", ["adaptive", "kvcache_centric", "cache_aware"])
def test_a_worker_in_its_warm_up_gets_little_at_first_and_its_share_in_the_end(policy: str) -> None:
    shares = [burst(ago_s, policy)["p9"] for ago_s in (0.0, 15.0, 30.0)]
    assert shares == sorted(shares) and 1 <= shares[0] <= 3, shares
    assert shares[-1] == burst(0.0, policy, slow_start_s=0.0)["p9"] >= 6


def test_a_cluster_that_starts_as_a_whole_has_no_warming_up_since_s() -> None:
    made = Conductor(ConductorConfig())
    made.on_events(fleet(prefills=3, nodes=3), 0.0)
    went = {
        answer.prefill.worker_id
        for number in range(3)
        if isinstance(answer := made.on_request(prompt(f"r{number}", "a*3"), 0.1), Route)
    }
    assert went == {"p0", "p1", "p2"}


def test_a_worker_in_its_warm_up_is_used_when_only_it_keeps_the_service_level() -> None:
    assert burst(0.0, requests=3, ttft_slo_s=3.5, shedding="limit", admission="baseline")["p9"] == 3
