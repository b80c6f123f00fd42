"""The whole conductor: long random lives, the same inputs twice, snapshots, and retries."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from conductor import Conductor, ConductorConfig, Prediction, Reject, Replicate, Request, Route
from conductor.routing.policies import POLICIES
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    NodeDown,
    NodeUp,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from tests.conductor.fleet import BLOCK_TOKENS, conductor, fleet, keys, node, prompt, report, worker

Outcome = Route | Reject | list[Replicate]
FAMILIES = [keys(f"{name}*12") for name in "abcdefgh"]


class RandomLife:
    """Random events, requests and reports, many of them late, doubled or about the unknown."""

    def __init__(self, seed: int, config: ConductorConfig) -> None:
        self.rng = random.Random(seed)
        self.conductor = Conductor(config)
        self.conductor.on_events(fleet(prefills=3, decodes=3, nodes=3), 0.0)
        self.now_s, self.number = 0.0, 0
        self.alive: list[str] = []
        self.outcomes: list[Outcome] = []
        self.steps = [
            self.request,
            self.request,
            self.request,
            self.retry,
            self.prefilled,
            self.prefilled,
            self.finish,
            self.finish,
            self.report,
            self.report,
            self.block,
            self.block,
            self.node,
            self.worker,
            self.fail,
            self.tick,
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now_s += self.rng.choice((0.0, 0.001, 0.05, 0.4))
            self.rng.choice(self.steps)()
            self.conductor.check()

    def any_request(self) -> str:
        """Mostly one that lives; sometimes one that was never heard of."""
        if self.alive and self.rng.random() < 0.95:
            return self.rng.choice(self.alive)
        return "unknown"

    def ask(self, request_id: str, excluded: frozenset[tuple[str, str]] = frozenset()) -> None:
        family = self.rng.choice(FAMILIES)[: self.rng.randint(0, 12)]
        tokens = len(family) * BLOCK_TOKENS + self.rng.randint(0, BLOCK_TOKENS - 1)
        request = Request(
            request_id,
            max(1, tokens),
            family,
            self.rng.choice((0, 5, 500)),
            self.rng.choice((-1, 0, 1)),
            excluded,
            is_prefilled=self.rng.random() < 0.1,
        )
        before = self.conductor.stats()
        candidates = self.conductor.explain(request, self.now_s).candidates
        assert self.conductor.stats() == before, "explaining decides nothing"
        outcome = self.conductor.on_request(request, self.now_s)
        self.outcomes.append(outcome)
        if isinstance(outcome, Route):
            self.alive.append(request_id)
            assert outcome.cached_tokens < request.prompt_tokens
            assert (outcome.fetch_blocks > 0) == (outcome.fetch_node is not None)
            chosen = [c for c in candidates if c.verdict == "chosen"]
            if not excluded:  # a retry frees what it had reserved, which explain() may not
                assert [(c.prefill, c.decode) for c in chosen] == [
                    (outcome.prefill, outcome.decode)
                ]

    def request(self) -> None:
        self.number += 1
        self.ask(f"r{self.number}")

    def retry(self) -> None:
        if self.alive:
            failed = f"p{self.rng.randrange(3)}"
            request_id = self.alive.pop(self.rng.randrange(len(self.alive)))
            self.conductor.on_worker_failed(failed, "w1", self.now_s)
            self.ask(request_id, frozenset({(failed, "w1")}))

    def prefilled(self) -> None:
        seconds = self.rng.choice((None, 0.0, 0.2, 3.0))
        self.conductor.on_prefill_finished(self.any_request(), self.now_s, 64, seconds)

    def finish(self) -> None:
        request_id = self.any_request()
        for _ in range(self.rng.randint(1, 2)):
            self.conductor.on_finished(request_id, self.now_s)
        if request_id in self.alive:
            self.alive.remove(request_id)

    def report(self) -> None:
        name = self.rng.choice(("p0", "p1", "p2", "d0", "d1", "d2", "nobody"))
        running = self.rng.randint(0, 9)
        said = report(
            name,
            self.rng.choice(("w1", "w1", "w2")),
            queue_requests=self.rng.randint(0, 4),
            queue_tokens=self.rng.randint(0, 3_000),
            running=running,
            pages_used=running * 3,
            context_tokens=running * 99,
            step_s=self.rng.choice((0.0, 0.03, 0.5)),
            is_draining=self.rng.random() < 0.1,
        )
        self.conductor.on_events([WorkerReported(said)], self.now_s)

    def block(self) -> None:
        run = self.rng.choice(FAMILIES)[: self.rng.randint(1, 12)]
        node_id = f"s{self.rng.randrange(3)}"
        kind = self.rng.choice((BlockAdded, BlockAdded, BlockRemoved))
        self.conductor.on_events([kind(key, node_id) for key in run], self.now_s)

    def node(self) -> None:
        node_id, incarnation = f"s{self.rng.randrange(3)}", self.rng.choice(("n1", "n2"))
        event = (
            NodeDown(node_id, incarnation)
            if self.rng.random() < 0.3
            else NodeUp(node(node_id, incarnation))
        )
        self.conductor.on_events([event], self.now_s)

    def worker(self) -> None:
        role, number = self.rng.choice(("prefill", "decode")), self.rng.randrange(3)
        name, incarnation = f"{role[0]}{number}", self.rng.choice(("w1", "w2"))
        info = worker(name, role, f"s{number}", incarnation=incarnation)
        event = WorkerDown(name, incarnation) if self.rng.random() < 0.3 else WorkerUp(info)
        self.conductor.on_events([event], self.now_s)

    def fail(self) -> None:
        worker, made = (f"d{self.rng.randrange(4)}", "w1"), self.conductor
        change = self.rng.randrange(4)
        if change < 2:
            made.on_worker_reached(*worker, bool(change), self.now_s)
        else:
            (made.on_worker_failed, made.on_worker_refused)[change - 2](*worker, self.now_s)

    def tick(self) -> None:
        self.outcomes.append(self.conductor.on_tick(self.now_s))

    def finish_all(self) -> None:
        for request_id in self.alive:
            self.conductor.on_finished(request_id, self.now_s)
        self.conductor.check()


def busy(**changes: object) -> ConductorConfig:
    return replace(
        ConductorConfig(ttft_slo_s=3.0, tbt_slo_s=0.2, hot_hits_per_s=0.05, request_s_max=200.0),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["reserved", "predictive", "early", "baseline", "none"])
def test_after_a_long_random_life_nothing_stays_reserved(seed: int, policy: str) -> None:
    lived = RandomLife(seed, busy(admission=policy))
    lived.run(2_000)
    lived.finish_all()
    idle = [report(n, w) for n in ("p0", "p1", "p2", "d0", "d1", "d2") for w in ("w1", "w2")]
    lived.conductor.on_events([WorkerReported(said) for said in idle], lived.now_s)
    assert lived.conductor.stats().in_flight == 0
    for status in lived.conductor.status(lived.now_s):
        assert status.queue_s == 0.0 and status.requests == 0, status
    kinds = {type(outcome) for outcome in lived.outcomes}
    assert kinds == {Route, Reject, list}, "the lived was too dull to prove anything"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_inputs_give_the_same_decisions(seed: int, policy: str) -> None:
    lives = [RandomLife(seed, busy(policy=policy)) for _ in range(2)]
    for lived in lives:
        lived.run(500)
    assert lives[0].outcomes == lives[1].outcomes


def test_a_conductor_that_joins_by_snapshot_decides_as_one_that_heard_every_event() -> None:
    blocks = dict.fromkeys(keys("a*3"), ("s0", "s1")) | dict.fromkeys(keys("b*9"), ("s1",))
    heard = conductor()
    for key, holders in blocks.items():
        heard.on_events([BlockAdded(key, node_id) for node_id in holders], 0.0)
    heard.on_events([WorkerReported(report("p0", queue_tokens=900, running=1))], 0.0)
    joined = Conductor(ConductorConfig())
    events = fleet()
    snapshot = Snapshot(
        epoch=1,
        sequence=9,
        nodes=tuple(e.info for e in events if isinstance(e, NodeUp)),
        workers=tuple(e.info for e in events if isinstance(e, WorkerUp)),
        reports=(report("p0", queue_tokens=900, running=1),),
        holders=tuple(blocks.items()),
    )
    joined.on_snapshot(snapshot, 0.0)
    for number, run in enumerate(("a*3", "b*9", "c*2", "b*4", "a*1")):
        request = prompt(f"r{number}", run)
        assert heard.on_request(request, 1.0) == joined.on_request(request, 1.0)


def test_a_snapshot_forgets_what_is_gone_and_keeps_the_reservations_of_what_stayed() -> None:
    made = conductor()
    made.on_events([BlockAdded(key, "s1") for key in keys("z*4")], 0.0)
    first, second = (made.on_request(prompt(name, "a*9"), 0.0) for name in ("r1", "r2"))
    assert isinstance(first, Route) and isinstance(second, Route)
    assert {first.prefill.worker_id, second.prefill.worker_id} == {"p0", "p1"}
    stayed = Snapshot(
        2, 1, (node("s0"),), (worker("p0", "prefill", "s0"), worker("d0", "decode", "s0")), (), ()
    )
    made.on_snapshot(stayed, 0.1)
    made.check()
    queues = {status.worker.worker_id: status.queue_s for status in made.status(0.1)}
    assert queues.keys() == {"p0", "d0"} and queues["p0"] > 0.4
    third = made.on_request(prompt("r3", "z*4"), 0.1)
    assert isinstance(third, Route) and third.cached_tokens == 0
    for name in ("r1", "r2", "r3"):
        made.on_finished(name, 0.2)
    made.check()


def test_a_worker_that_returns_under_its_old_incarnation_starts_without_reservations() -> None:
    made = conductor()
    routed = made.on_request(prompt("r1", "a*9"), 0.0)
    assert isinstance(routed, Route)
    name, info = routed.prefill.worker_id, worker(routed.prefill.worker_id, "prefill", "s0")
    made.on_events([WorkerDown(name, "w1"), WorkerUp(info)], 0.1)
    made.check()
    assert {s.queue_s for s in made.status(0.1)} == {0.0}
    made.on_finished("r1", 0.2)
    made.check()


def test_who_comes_back_when_told_to_is_admitted() -> None:
    made = conductor(fleet(prefills=1, decodes=1, nodes=1), ttft_slo_s=2.0, report_s_max=99.0)
    made.on_events([WorkerReported(report("p0", queue_tokens=4_000, running=1))], 0.0)
    refused = made.on_request(prompt("r1", prompt_tokens=500), 0.0)
    assert isinstance(refused, Reject) and refused.kind == "ttft_slo"
    early = made.on_request(prompt("r1", prompt_tokens=500), refused.retry_after_s - 0.01)
    assert isinstance(early, Reject)
    again = made.on_request(prompt("r1", prompt_tokens=500), refused.retry_after_s + 0.001)
    assert isinstance(again, Route)


def test_who_comes_back_when_a_decode_slot_is_expected_free_finds_it_free() -> None:
    made = conductor(
        fleet(prefills=1, decodes=1, nodes=1, slots_max=2), decode_s_expected=4.0, report_s_max=99.0
    )
    for name, now_s in (("r1", 0.0), ("r2", 1.0)):
        assert isinstance(made.on_request(prompt(name, "a*1", output=1_000), now_s), Route)
        made.on_prefill_finished(name, now_s + 0.1, 0)
    refused = made.on_request(prompt("r3", "b*1"), 1.2)
    assert isinstance(refused, Reject) and refused.kind == "decode_full"
    assert refused.retry_after_s == pytest.approx(4.1 - 1.2)
    made.on_finished("r1", 4.1)
    again = made.on_request(prompt("r3", "b*1"), 1.2 + refused.retry_after_s)
    assert isinstance(again, Route)


def test_time_that_a_slow_thread_read_earlier_does_no_harm() -> None:
    made = conductor()
    assert isinstance(made.on_request(prompt("r1", "a*9"), 5.0 - 3.0), Route)
    assert isinstance(made.on_request(prompt("r2", "b*9"), 1.0), Route)
    made.on_finished("r1", 0.5)
    made.check()


def test_a_request_that_nobody_finishes_is_forgotten_after_its_time() -> None:
    made = conductor(request_s_max=100.0)
    made.on_request(prompt("r1", "a*9"), 0.0)
    made.on_tick(99.0)
    assert made.stats().in_flight == 1
    made.on_tick(101.0)
    assert made.stats().in_flight == 0
    made.check()


def test_a_prediction_adds_up_and_its_error_is_counted() -> None:
    made = conductor()
    routed = made.on_request(prompt("r1", "a*9"), 0.0)
    assert isinstance(routed, Route)
    p: Prediction = routed.predicted
    assert p.ttft_s == pytest.approx(p.queue_s + p.transfer_s + p.prefill_s + p.handover_s)
    made.on_prefill_finished("r1", 2 * p.prefill_s, 0, 2 * p.prefill_s)
    assert made.stats().prefill_error == pytest.approx(0.5)
    assert made.stats().ttft_error == pytest.approx(0.5)


def test_a_worker_that_proves_slow_is_predicted_slower_and_given_another_chance_later() -> None:
    made = conductor(fleet(prefills=1, decodes=1, nodes=1), report_s_max=999.0)

    def predicted_s(name: str, now_s: float) -> float:
        routed = made.on_request(prompt(name, "a*9"), now_s)
        assert isinstance(routed, Route)
        made.on_finished(name, now_s)
        return routed.predicted.prefill_s

    usual_s = predicted_s("r0", 0.0)
    for number in range(1, 20):
        name, now_s = f"s{number}", number * 10 * usual_s
        made.on_request(prompt(name, "a*9"), now_s)
        made.on_prefill_finished(name, now_s + 3 * usual_s, 0, 3 * usual_s)
        made.on_finished(name, now_s + 3 * usual_s)
    assert predicted_s("r1", 200 * usual_s) == pytest.approx(3 * usual_s, rel=0.2)
    assert predicted_s("r2", 200 * usual_s + 600.0) == pytest.approx(usual_s, rel=0.05)


def test_prompts_that_shared_their_steps_do_not_make_a_worker_look_slow() -> None:
    made = conductor(fleet(prefills=1, decodes=1, nodes=1, slots_max=99), report_s_max=999.0)
    decisions = [made.on_request(prompt(f"r{n}", prompt_tokens=50), 0.0) for n in range(10)]
    assert all(isinstance(decision, Route) for decision in decisions)
    together_s = 10 * 0.06
    for number in range(10):
        made.on_prefill_finished(f"r{number}", together_s, 0, together_s)
    (status,) = (s for s in made.status(together_s) if s.role == "prefill")
    assert status.speed_ratio == pytest.approx(1.0, abs=0.05)


def test_a_bad_config_is_a_mistake_of_the_shell() -> None:
    with pytest.raises(AssertionError, match="tbt_slo_s is -1"):
        Conductor(ConductorConfig(tbt_slo_s=-1))


def test_a_further_answer_to_a_prompt_waits_in_no_queue_and_counts_in_its_decode_batch() -> None:
    made = conductor(fleet(prefills=1, decodes=1, nodes=1), ttft_slo_s=1.0)
    first = made.on_request(Request("first", 900, keys("a*14"), 10), 0.0)
    assert isinstance(first, Route)
    made.on_prefill_finished("first", 0.9, 0, 0.9)
    busy = made.on_request(Request("busy", 900, keys("b*14"), 10), 0.9)
    late = made.on_request(Request("late", 900, keys("c*14"), 10), 0.9)
    assert isinstance(busy, Route) and isinstance(late, Reject) and late.kind == "ttft_slo"
    before = made.stats()
    copy = Request("copy", 900, keys("a*14"), 10, is_prefilled=True)
    route = made.on_request(copy, 0.9)
    assert isinstance(route, Route) and route.cached_tokens == 899 and not route.fetch_blocks
    made.on_prefill_finished("copy", 0.9, 0, 0.9)
    made.check()
    after = made.stats()
    assert (after.prompt_tokens, after.cached_tokens) == (
        before.prompt_tokens,
        before.cached_tokens,
    )
    assert (after.ttft_error, after.prefill_error) == (before.ttft_error, before.prefill_error)
    [decode] = [each for each in made.status(0.9) if each.role == "decode"]
    assert decode.requests == 2
    made.on_finished("copy", 1.0, 10)
    made.check()


def test_a_further_answer_teaches_other_frontends_nothing_about_prefill() -> None:
    def learned(is_prefilled: bool) -> float:
        events = fleet(prefills=1, decodes=1, nodes=1)
        one, other = (Conductor(ConductorConfig(), frontend=name) for name in ("f0", "f1"))
        for made in (one, other):
            made.on_events(events, 0.0)
            other.on_routed_elsewhere(one.take_notes(0.0, 10), 0.0)
            one.on_routed_elsewhere(other.take_notes(0.0, 10), 0.0)
        for number in range(8):
            request = Request(f"r{number}", 900, keys("a*14"), 10, is_prefilled=is_prefilled)
            assert isinstance(one.on_request(request, 1.0), Route)
            one.on_prefill_finished(f"r{number}", 1.0, 0, 0.9)
        other.on_routed_elsewhere(one.take_notes(1.0, 100), 1.0)
        [prefill] = [each for each in other.status(1.0) if each.role == "prefill"]
        return prefill.speed_ratio

    assert learned(is_prefilled=True) == 1.0
    assert learned(is_prefilled=False) != 1.0, "this test sees what is learned"
