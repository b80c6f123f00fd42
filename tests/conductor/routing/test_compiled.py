"""A compiled decision is the one that numpy makes, to the last bit: random fleets, with everything
that decides."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import numpy as np
import pytest

from conductor import Conductor, ConductorConfig, Reject, Request, Route
from conductor.config import ADMISSIONS
from conductor.routing.compiled import CompiledDecision
from conductor.routing.policies import POLICIES, Terms
from conductor.routing.routing import DecodeOption, Options, PrefillOption
from mooncake_store.native import library
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeUp,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import WorkerInfo, WorkerReport
from tests.conductor.fleet import conductor, node, prompt, report, worker

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.why_not())
DEPTH = 40  # blocks of the longest prompt
CHAINS = 6  # prompts begin with one of so many texts


def chain(text: int, blocks: int) -> list[bytes]:
    """Texts have their first blocks in common."""
    return [
        f"{0 if block < 3 else text}-{block}".encode().ljust(16, b".") for block in range(blocks)
    ]


class Twins:
    """Two conductors that hear the same; one decides with numpy."""

    def __init__(self, rng: random.Random, **config: object) -> None:
        self.rng, self.now_s, self.number = rng, 0.0, 0
        self.compiled, self.plain = (
            Conductor(ConductorConfig(**config))
            for _ in range(2)  # type: ignore[arg-type]
        )
        assert self.compiled._compiled is not None
        self.plain._compiled = None
        if self.plain._cluster.forecasts is not None:
            self.plain._cluster.forecasts.compiled = None
        self.nodes = [f"s{number}" for number in range(rng.randint(1, 12))]
        self.is_alike = rng.random() < 0.5  # blocks, links and stages
        self.has_layers = rng.random() < 0.5  # long prompts pass layer by layer
        self.workers: list[WorkerInfo] = []
        self.routes: dict[str, Route] = {}
        self.joined: set[str] = set()
        self.on_events([NodeUp(node(name)) for name in self.nodes])
        for role in ("prefill", "decode"):
            for number in range(rng.randint(1, 24)):
                self.add_worker(role, number)

    def on_events(self, events: list[Event]) -> None:
        for each in (self.compiled, self.plain):
            each.on_events(events, self.now_s)

    def add_worker(self, role: str, number: int) -> None:
        rng, changes = self.rng, {}
        if not self.is_alike:
            changes = {
                "block_tokens": rng.choice((64, 64, 128)),
                "transfer_bytes_per_s": {
                    name: rng.uniform(1e8, 1e10) for name in self.nodes if rng.random() < 0.7
                },
                "transfer_latency_s": {name: rng.uniform(1e-5, 1e-2) for name in self.nodes},
            }
        if role == "prefill" and not self.is_alike and rng.random() < 0.3:
            changes |= {"pipeline_group": f"g{number}", "pipeline_stages": 2, "chunk_tokens": 512}
        elif role == "prefill" and self.has_layers:
            changes |= {"load_beside_share": 1 - 1 / 12, "chunk_tokens": rng.choice((512, 2_048))}
        home = rng.choice(self.nodes)
        info = worker(
            f"{role[0]}{number}",
            role,
            home,
            slots_max=rng.choice((2, 8, 30)),
            pages_max=rng.choice((60, 400, 2_000)),
            context_tokens_max=6_000,
            preempts_prompts=rng.random() < 0.7,
            prefill_coefficients=rng.choice(((0.01, 1e-3, 0.0), (0.005, 2e-4, 1e-8))),
            decode_coefficients=rng.choice(((0.02, 5e-3, 0.0), (0.01, 1e-3, 1e-7))),
            **changes,
        )
        found = [info]
        if info.pipeline_group:
            second = worker(
                f"{role[0]}{number}.1",
                role,
                rng.choice(self.nodes),
                pipeline_stage=1,
                prefill_coefficients=(0.004, 3e-4, 1e-8),
                **changes,
            )
            found.append(second)
        self.workers += found
        self.on_events([WorkerUp(each) for each in found])

    def step(self) -> None:
        """Something happens."""
        rng = self.rng
        self.now_s += rng.choice((0.0, 0.001, 0.05, 0.7))
        match rng.randrange(10):
            case 0:
                self.on_events([WorkerReported(self.a_report(info)) for info in self.workers])
            case 1:
                self.on_events([WorkerReported(self.a_report(rng.choice(self.workers)))])
            case 2 | 3:
                holder = rng.choice(self.nodes) + ("/ssd" if rng.random() < 0.3 else "")
                keys = chain(rng.randrange(CHAINS), rng.randint(1, DEPTH))
                kind = BlockRemoved if rng.random() < 0.15 else BlockAdded
                keys = keys[rng.randint(0, 10) :] if kind is BlockRemoved else keys
                self.on_events([kind(key, holder) for key in keys])
            case 4:
                for each in (self.compiled, self.plain):
                    each.on_tick(self.now_s)
            case 5:
                decodes = [info for info in self.workers if info.role == "decode"]
                info = rng.choice(decodes if rng.random() < 0.5 else self.workers)
                for each in (self.compiled, self.plain):
                    if info.role == "decode":
                        each.on_worker_refused(info.worker_id, "w1", self.now_s)
                    else:
                        each.on_worker_failed(info.worker_id, "w1", self.now_s)
            case 6:
                if rng.random() < 0.1:
                    self.add_worker(rng.choice(("prefill", "decode")), 100 + self.number)
                    self.number += 1
            case _:
                self.progress()

    def a_report(self, info: WorkerInfo) -> WorkerReport:
        rng = self.rng
        waiting = rng.choice((0, 0, 1, 5))
        running = rng.choice((0, 1, 3)) if info.role == "decode" else min(1, waiting)
        return report(
            info.worker_id,
            running=running,
            queue_requests=waiting,
            step_s=rng.choice((0.0, 0.05)),
            queue_tokens=waiting * 700,
            context_tokens=running * 400,
            pages_used=running * 7,
        )

    def progress(self) -> None:
        """A request's prefill ends, or the request."""
        if not self.routes:
            return
        name = self.rng.choice(sorted(self.routes))
        route = self.routes[name]
        if name in self.joined:
            del self.routes[name]
        self_joined = name not in self.joined
        seconds = route.predicted.prefill_s * self.rng.uniform(0.5, 2.0)
        for each in (self.compiled, self.plain):
            if self_joined:
                each.on_prefill_finished(name, self.now_s, route.cached_tokens, seconds)
            else:
                each.on_finished(name, self.now_s, 7)
        self.joined.add(name)

    def a_request(self) -> Request:
        rng = self.rng
        self.number += 1
        blocks = rng.randint(0, DEPTH)
        some = rng.sample(self.workers, min(2, len(self.workers)))
        names = {(info.worker_id, "w1") for info in some}
        return Request(
            f"r{self.number}",
            blocks * 64 + rng.randint(1, 63),
            chain(rng.randrange(CHAINS), blocks),
            rng.choice((1, 20, 400)),
            priority=rng.choice((0, 0, -1, 1)),
            excluded_workers=frozenset(names if rng.random() < 0.1 else ()),
            is_resumed=rng.random() < 0.1,
        )

    def ask(self) -> Route | Reject:
        request = self.a_request()
        self.compare_terms(request)
        ours = self.compiled.on_request(request, self.now_s)
        theirs = self.plain.on_request(request, self.now_s)
        assert ours == theirs
        if isinstance(ours, Route):
            self.routes[request.request_id] = ours
        return ours

    def compare_terms(self, request: Request) -> None:
        made, plain = (each._options(request, self.now_s) for each in (self.compiled, self.plain))
        assert isinstance(made, Options) == isinstance(plain, Options)
        if not isinstance(made, Options) or not isinstance(plain, Options):
            return
        for name in Terms._fields:
            found, expected = getattr(made._terms, name), getattr(plain._terms, name)
            if name == "delay_s" and not made._policy.spares_others:
                continue  # what is not weighed is not asked for
            assert np.array_equal(found, expected), name
        for name in ("fetch_s", "source", "fill_s"):
            found, expected = getattr(made._plans, name), getattr(plain._plans, name)
            assert np.array_equal(found, expected), name
        assert made.backlog_s == plain.backlog_s
        ours, theirs = made.best(), plain.best()
        assert ours.predicted == theirs.predicted
        assert shown(ours.prefill) == shown(theirs.prefill)
        assert shown(ours.decode) == shown(theirs.decode)
        assert [*map(shown, made.prefills)] == [*map(shown, plain.prefills)]
        assert [*map(shown, made.decodes)] == [*map(shown, plain.decodes)]


def shown(option: PrefillOption | DecodeOption) -> dict[str, object]:
    """The two conductors have workers of their own, by the same names."""
    found = {field.name: getattr(option, field.name) for field in fields(option)}
    return found | {"worker": option.worker.key}


def drawn_config(rng: random.Random) -> dict[str, object]:
    return {
        "admission": rng.choice(ADMISSIONS),
        "fetch_must_pay": rng.random() < 0.7,
        "finalists_max": rng.choice((1, 2, 4)),
        "queue_order": rng.choice(("fifo", "shortest_first")),
        "ttft_slo_s": rng.choice((3.0, 60.0)),
        "tie_ratio": rng.choice((0.0, 0.02)),
        "tie_s": rng.choice((0.0, 0.001)),
        "slow_start_s": rng.choice((0.0, 30.0)),
        "advisory": rng.random() < 0.2,
        "ssd_bytes_per_s": rng.choice((1e8, 1e9)),
        "tbt_slo_s": rng.choice((0.05, 1.0)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_decision_is_the_one_that_numpy_makes(policy: str, seed: int) -> None:
    rng = random.Random(f"{seed} {policy}")
    decided: list[Route | Reject] = []
    for _ in range(12):
        twins = Twins(rng, policy=policy, **drawn_config(rng))
        for _ in range(60):
            twins.step()
            decided.append(twins.ask())
        twins.compiled.check()
    routes = [each for each in decided if isinstance(each, Route)]
    assert len(routes) > len(decided) / 4
    if POLICIES[policy].fetch != "never":
        assert any(each.fetch_node for each in routes)
    assert any(each.local_blocks for each in routes)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_coefficients_that_are_no_numbers_do_no_harm(role: str) -> None:
    """Wherever they come from: the process goes on, and a pair is chosen."""
    nothing = (math.nan, math.nan, math.nan)
    events: list[Event] = [NodeUp(node("s0"))]
    for number in range(3):
        for each in ("prefill", "decode"):
            changes = {f"{role}_coefficients": nothing} if each == role else {}
            events.append(WorkerUp(worker(f"{each[0]}{number}", each, "s0", **changes)))
    made = conductor(events, admission="none")
    assert isinstance(made.on_request(prompt("r1", "a*3"), 0.0), Route)


def test_whose_coefficients_are_no_numbers_is_not_chosen_while_it_drains() -> None:
    nothing = (math.nan, math.nan, math.nan)
    events: list[Event] = [NodeUp(node(f"s{number}")) for number in range(3)]
    for number in range(3):
        info = worker(f"p{number}", "prefill", f"s{number}", prefill_coefficients=nothing)
        events.append(WorkerUp(info))
    events += [WorkerUp(worker("d0", "decode", "s2"))]
    events.append(WorkerReported(report("p0", is_draining=True)))
    made = conductor(events, admission="none")
    route = made.on_request(prompt("r1", "a*3"), 0.0)
    assert isinstance(route, Route) and route.prefill.worker_id == "p1"


def test_without_a_compiler_numpy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_NATIVE", "off")
    library.forget()
    assert Conductor(ConductorConfig())._compiled is None
    monkeypatch.undo()
    library.forget()
    assert isinstance(Conductor(ConductorConfig())._compiled, CompiledDecision)
