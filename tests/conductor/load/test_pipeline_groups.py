"""Pipeline groups are one candidate: called at stage 0, and none while a stage is missing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from conductor import Conductor, Reject, Route
from conductor.routing.policies import POLICIES
from mooncake_store.records.events import Event, NodeUp, WorkerDown, WorkerReported, WorkerUp
from mooncake_store.records.membership import WorkerInfo
from tests.conductor.fleet import added, conductor, node, prompt, report, worker

CHUNK = 512
WHOLE = (0.0, 0.001, 1e-8)  # of all layers


def stage(number: int, of: int = 2, group: str = "g", **changes: object) -> WorkerInfo:
    facts: dict[str, object] = {
        "pipeline_group": group,
        "pipeline_stage": number,
        "pipeline_stages": of,
        "pipeline_hop_s": 0.002,
        "chunk_tokens": CHUNK,
        "prefill_coefficients": tuple(part / of for part in WHOLE),
    }
    made = worker(f"{group}{number}", "prefill", f"s{number}", **facts)
    return replace(made, **changes)  # type: ignore[arg-type]


def a_fleet(*prefills: WorkerInfo) -> list[Event]:
    nodes = [NodeUp(node(f"s{number}")) for number in range(4)]
    return [*nodes, *map(WorkerUp, prefills), WorkerUp(worker("d0", "decode", "s3"))]


def single(name: str = "p0") -> WorkerInfo:
    return worker(name, "prefill", "s2", prefill_coefficients=WHOLE, chunk_tokens=CHUNK)


def why_not(made: Conductor, name: str, now_s: float = 0.0) -> str:
    return next(s.why_not for s in made.status(now_s) if s.worker.worker_id == name)


def test_a_group_is_one_candidate_and_its_later_stages_are_none() -> None:
    made = conductor(a_fleet(stage(0), stage(1)))
    explained = made.explain(prompt("r1", "a*8"), 0.0)
    assert [(c.prefill.worker_id, c.pipeline_stages) for c in explained.candidates] == [("g0", 2)]
    assert why_not(made, "g0") == ""
    assert why_not(made, "g1") == "stage 1 of pipeline group g"
    takers = [s.worker.worker_id for s in made.status(0.0) if s.takes_requests]
    assert takers == ["d0", "g0"]


def test_a_long_prompt_goes_to_the_group_and_a_short_one_to_the_single_worker() -> None:
    made = conductor(a_fleet(stage(0), stage(1), single()), policy="kvcache_centric")
    long = made.on_request(prompt("long", prompt_tokens=20 * CHUNK), 0.0)
    assert isinstance(long, Route)
    assert long.prefill.worker_id == "g0"
    expected_s = 5.12 + 1e-8 * (20 * CHUNK) ** 2 / 4
    last_s = 0.256 + 0.5e-8 * CHUNK * (20 * CHUNK - CHUNK / 2)
    assert long.predicted.prefill_s == pytest.approx(expected_s + last_s + 0.002)
    assert long.predicted.fill_s == pytest.approx(last_s + 0.002)
    made.on_finished("long", 0.0)
    short = made.on_request(prompt("short", prompt_tokens=200), 0.0)
    assert isinstance(short, Route)
    assert short.prefill.worker_id == "p0", "the hop makes the group slower"
    assert short.predicted.fill_s == 0.0
    made.check()


def test_what_waits_at_a_group_drains_at_the_pace_of_its_slowest_stage() -> None:
    slow = tuple(part * 0.75 for part in WHOLE)
    made = conductor(a_fleet(stage(0), stage(1, prefill_coefficients=slow)))
    for number in range(3):
        made.on_request(prompt(f"r{number}", prompt_tokens=4 * CHUNK), 0.0)
    found = made.explain(prompt("last", prompt_tokens=4 * CHUNK), 0.0).candidates[0].predicted
    tokens = 4 * CHUNK
    assert found.queue_s == pytest.approx(3 * 0.75 * (tokens * 1e-3 + 1e-8 * tokens**2 / 2))


def test_a_short_prompt_that_overtakes_at_a_group_delays_by_its_work_and_not_its_fill() -> None:
    made = conductor(a_fleet(stage(0), stage(1)), policy="adaptive")
    for number in range(2):
        made.on_request(prompt(f"r{number}", prompt_tokens=40 * CHUNK), 0.0)
    found = made.explain(prompt("short", prompt_tokens=100), 0.0).candidates[0].predicted
    behind = found.delay_s / (found.prefill_s - found.fill_s)
    assert behind == pytest.approx(round(behind))
    assert round(behind) >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.on_events([WorkerDown("g1", "w1")], 1.0), "stage 1 .* is missing"),
        (
            lambda made: made.on_events([WorkerReported(report("g1", is_draining=True))], 1.0),
            "stage 1 .*: draining",
        ),
        (lambda made: made.on_worker_failed("g1", "w1", 1.0), "stage 1 .*: a call to it failed"),
        (lambda made: made.on_worker_reached("g1", "w1", False, 1.0), "stage 1 .*: not reached"),
        (
            lambda made: made.on_events([WorkerUp(stage(1, of=3, incarnation="w2"))], 1.0),
            "stage 1 .* reports 3 stages, but stage 0 reports 2",
        ),
        (
            lambda made: made.on_events([WorkerUp(stage(1, fingerprint="x", incarnation="w2"))], 1),
            "stage 1 .* another fingerprint",
        ),
        (
            lambda made: made.on_events([WorkerUp(stage(1, worker_id="other"))], 1.0),
            "stage 1 .* registered by 2 workers",
        ),
    ],
)
def test_a_group_whose_later_stage_cannot_compute_is_no_candidate(
    change: Callable[[Conductor], object], words: str
) -> None:
    made = conductor(a_fleet(stage(0), stage(1), single()))
    change(made)
    assert re.search(words, why_not(made, "g0", 1.0)), why_not(made, "g0", 1.0)
    found = made.explain(prompt("r1", "a*8"), 1.0).candidates
    assert {c.prefill.worker_id for c in found} == {"p0"}
    made.check()


def test_a_silent_later_stage_takes_the_group_away_and_its_report_brings_it_back() -> None:
    made = conductor(a_fleet(stage(0), stage(1)), report_s_max=3.0)
    made.on_events([WorkerReported(report("g0")), WorkerReported(report("d0"))], 10.0)
    rejected = made.on_request(prompt("r1", "a*8"), 10.0)
    assert isinstance(rejected, Reject)
    assert rejected.kind == "no_prefill_worker"
    assert "1 x stage 1 of its pipeline group: no report" in rejected.reason
    made.on_events([WorkerReported(report("g1"))], 10.0)
    assert isinstance(made.on_request(prompt("r2", "a*8"), 10.0), Route)
    made.check()


def test_a_stage_that_starts_again_completes_its_group_again() -> None:
    made = conductor(a_fleet(stage(0), stage(1)))
    made.on_events([WorkerDown("g1", "w1")], 1.0)
    made.on_events([WorkerUp(stage(1, incarnation="w2"))], 2.0)
    assert isinstance(made.on_request(prompt("r1", "a*8"), 2.0), Route)
    made.check()


def test_reports_of_a_later_stage_say_nothing_about_the_queue() -> None:
    made = conductor(a_fleet(stage(0), stage(1)))
    made.on_events(
        [WorkerReported(report("g1", queue_requests=5, queue_tokens=50_000, running=5))], 1.0
    )
    found = {s.worker.worker_id: (s.queue_s, s.requests) for s in made.status(1.0)}
    assert found["g0"] == found["g1"] == (0.0, 0)
    assert made.explain(prompt("r1", "a*8"), 1.0).candidates[0].predicted.queue_s == 0.0


def test_a_later_stage_alone_is_never_called() -> None:
    made = conductor(a_fleet(stage(1)))
    rejected = made.on_request(prompt("r1", "a*8"), 0.0)
    assert isinstance(rejected, Reject)
    assert rejected.kind == "no_prefill_worker"


@pytest.mark.parametrize("policy", POLICIES)
def test_columns_say_what_the_groups_say_whatever_happens(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    stages = [stage(n, 3, "g") for n in range(3)] + [stage(n, 2, "h") for n in range(2)]
    made = conductor(a_fleet(*stages, single()), policy=policy, advisory=True)
    now_s, open_requests = 0.0, []
    for number in range(300):
        now_s += rng.uniform(0.0, 0.5)
        made.on_events([WorkerReported(report("d0")), WorkerReported(report("p0"))], now_s)
        what = rng.random()
        if what < 0.5:
            request = prompt(f"r{number}", f"a*{rng.randint(1, 60)}")
            if isinstance(made.on_request(request, now_s), Route):
                open_requests.append(request.request_id)
        elif what < 0.7 and open_requests:
            name = open_requests.pop(rng.randrange(len(open_requests)))
            made.on_prefill_finished(name, now_s, 64, rng.uniform(0.0, 2.0))
            made.on_finished(name, now_s)
        elif what < 0.9:
            of = rng.choice(stages)
            draining = rng.random() < 0.2
            made.on_events(
                [WorkerReported(report(of.worker_id, is_draining=draining, step_s=0.1))], now_s
            )
        elif what < 0.95:
            of = rng.choice(stages)
            event: Event = WorkerUp(of)
            if any(s.worker.worker_id == of.worker_id for s in made.status(now_s)):
                event = WorkerDown(of.worker_id, "w1")
            made.on_events([event], now_s)
        else:
            made.on_events(added(rng.choice(("s0", "s2")), f"a*{rng.randint(1, 40)}"), now_s)
        made.check()
        status = {s.worker.worker_id: s for s in made.status(now_s)}
        for follower in ("g1", "g2", "h1"):
            assert follower not in status or not status[follower].takes_requests
