"""Requests that are aborted in each phase of a load. vLLM ends EngineCore at a completion that it
does not expect, and frees the pages of an aborted load only at its completion."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.backends.engine.connected.connected import keys_of, prompt_of
from tests.backends.engine.connected.listening import WAIT_S
from tests.vllm.inside.gates import LoadGate
from tests.vllm.inside.gates import load_gate as load_gate  # a fixture
from tests.vllm.inside.real_engine import RealRequest, RealVllm
from tests.vllm.inside.stored import filled

LONG = prompt_of(300)
TOKENS = 12
ABORTS = 2000
WALK_S_MAX = 40.0


class Completions:
    """The loads that the rank reports to vLLM, by vLLM's name of the request."""

    def __init__(self, engine: RealVllm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[str] = []
        results = engine.in_rank.get_transfer_results

        def noted(finished: set[str]) -> Any:
            found = results(finished)
            assert not found.finished_sending, "vLLM would free pages twice"
            self.all += found.finished_recving or ()
            return found

        monkeypatch.setattr(engine.in_rank, "get_transfer_results", noted)


def check_alive(engine: RealVllm, pages: list[int]) -> None:
    """EngineCore computes, and everything is free."""
    engine.executor.run_until_idle()
    engine.unstage("a", pages)
    engine.check_clean()
    request = engine.generate(99, LONG[:150], TOKENS)
    assert engine.output(request) == engine.expected(LONG[:150], TOKENS)


def wrong_blocks(engine: RealVllm) -> dict[bytes, bytes]:
    return {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}


def test_an_abort_before_the_first_step(engine: RealVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = Completions(engine, monkeypatch)
    pages = engine.stage("a", LONG, wrong_blocks(engine), loaded_tokens=256)
    engine.executor.abort(engine.submit(1, LONG, TOKENS, name="a"))
    check_alive(engine, pages)
    assert reported.all == [] and engine.news("a") == []


def test_an_abort_after_a_match_without_pages(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = Completions(engine, monkeypatch)
    pages = engine.stage("a", LONG, wrong_blocks(engine), loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a")
    with monkeypatch.context() as patch:
        manager = engine.executor.scheduler.kv_cache_manager
        patch.setattr(manager, "allocate_slots", lambda *args, **options: None)
        engine.executor.step()
    assert engine.scheduler._table.entries["a"].llm_id is not None
    engine.executor.abort(request)
    check_alive(engine, pages)
    assert reported.all == [] and engine.news("a") == []


@pytest.mark.parametrize("is_unstaged_first", [False, True])
def test_an_abort_while_the_load_runs_keeps_the_pages_until_it_has_ended(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch, load_gate: LoadGate, is_unstaged_first: bool
) -> None:
    reported = Completions(engine, monkeypatch)
    pages = engine.stage("a", LONG, wrong_blocks(engine), loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.step()
    assert load_gate.is_reached.wait(WAIT_S)
    unstaged = engine.host.unstage("a", WAIT_S) if is_unstaged_first else None
    engine.executor.abort(request)
    for _ in range(3):
        engine.executor.step()
    assert engine.executor.blocks.blocks - engine.executor.blocks.free_blocks == 8
    assert reported.all == []
    load_gate.is_open.set()
    if unstaged is not None:
        unstaged.result(WAIT_S)
    check_alive(engine, pages)
    assert len(reported.all) == 1
    assert engine.news("a") == [("claimed", 0, 256), ("loaded",)]


def test_an_abort_between_the_completion_and_the_next_step(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = Completions(engine, monkeypatch)
    pages = engine.stage("a", LONG, wrong_blocks(engine), loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a")
    scheduler = engine.executor.scheduler
    for _ in range(10_000):
        engine.executor.step()
        if scheduler.finished_recving_kv_req_ids:
            break
    assert scheduler.finished_recving_kv_req_ids and engine.output(request) == []
    engine.executor.abort(request)
    check_alive(engine, pages)
    assert len(reported.all) == 1


def test_an_abort_after_the_load_while_it_generates(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(engine, LONG)
    reported = Completions(engine, monkeypatch)
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a")
    for _ in range(10_000):
        engine.executor.step()
        if len(engine.output(request)) >= 3:
            break
    engine.executor.abort(request)
    assert engine.output(request) == engine.expected(LONG, TOKENS)[:3]
    check_alive(engine, pages)
    assert len(reported.all) == 1


@dataclass
class Staged:
    request: RealRequest
    pages: list[int]
    tokens_max: int
    is_aborted: bool = False
    steps_left: int = field(default=0)  # before it is aborted; a large number: never


class AbortWalk:
    """Requests with and without KV in the pool, most of which are aborted after few steps."""

    def __init__(self, engine: RealVllm, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.prompts = [prompt_of(length, seed=length) for length in (40, 65, 128, 200, 300)]
        self.stores = [filled(engine, prompt) for prompt in self.prompts]
        self.going: dict[str, Staged] = {}
        self.number = self.aborted = self.answered = 0

    def arrive(self) -> None:
        rng, self.number = self.rng, self.number + 1
        which = rng.randrange(len(self.prompts))
        prompt, store, name = self.prompts[which], self.stores[which], str(self.number)
        wanted = -(-(len(prompt) + 20) // self.engine.block_tokens)
        if wanted > len(self.engine.free_pages):
            return
        loaded = len(prompt) // 64 * 64 if rng.random() < 0.8 else 0
        pages = self.engine.stage(name, prompt, store, loaded, more_tokens=20)
        tokens_max = rng.choice([1, 4, 20])
        salt = name if rng.random() < 0.7 else None  # nothing is in vLLM's prefix cache under it
        request = self.engine.submit(0, prompt, tokens_max, salt=salt, name=name)
        steps = rng.choice([0, 1, 1, 2, 3, 5]) if rng.random() < 0.9 else 1000
        self.going[name] = Staged(request, pages, tokens_max, steps_left=steps)

    def step(self) -> None:
        for each in self.going.values():
            if each.steps_left <= 0 and not each.request.finish_reason:
                self.engine.executor.abort(each.request)
                self.aborted += 1
            each.steps_left -= 1
        self.engine.executor.step()
        ended = [name for name, each in self.going.items() if each.request.finish_reason]
        for name in ended:
            if self.rng.random() < 0.7:  # the worker may be late
                self.leave(name)

    def leave(self, name: str) -> None:
        each = self.going.pop(name)
        output, engine = self.engine.output(each.request), self.engine
        expected = engine.expected(each.request.prompt, each.tokens_max)
        if each.request.finish_reason == "cancelled":
            assert output == expected[: len(output)], name
        else:
            assert output == expected, name
            self.answered += 1
        engine.host.unstage(name, WAIT_S)
        engine.host.unstage(name, WAIT_S).result(WAIT_S)
        engine.free_pages += each.pages


def test_random_aborts_leave_an_engine_that_computes(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    walk = AbortWalk(engine, random.Random(seed))
    reported = Completions(engine, monkeypatch)
    until_s = time.monotonic() + WALK_S_MAX
    while walk.aborted < ABORTS and time.monotonic() < until_s:
        for _ in range(walk.rng.choice([0, 1, 4])):
            walk.arrive()
        walk.step()
    print(f"{walk.aborted} aborts, {walk.answered} answers, {len(reported.all)} loads")
    engine.executor.run_until_idle()
    for name in list(walk.going):
        walk.leave(name)
    engine.check_clean()
    assert len(set(reported.all)) == len(reported.all), "a load was completed twice"
    assert walk.answered and walk.aborted >= 50 and len(reported.all) >= 20
