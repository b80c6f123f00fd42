"""Pages that are being saved are pinned: vLLM gives them to no other request until then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.engine.vllm.connector import EndedSaves
from tests.backends.engine.connected.connected import prompt_of, step_until
from tests.backends.engine.connected.gate import Gate
from tests.backends.engine.connected.listening import WAIT_S
from tests.vllm.inside.conftest import Engines
from tests.vllm.inside.gates import save_gate as save_gate  # a fixture
from tests.vllm.inside.memory import kv_pages
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled

FEW_BLOCKS = 13  # one of them is never given to a request
SMALL = {"blocks": FEW_BLOCKS, "max_model_len": 256, "max_num_batched_tokens": 128}
TOKENS = 12


@pytest.fixture
def small(engines: Engines) -> RealVllm:
    """An engine whose memory has room for 384 tokens."""
    return engines.get(**SMALL)


def pinned_ids(engine: RealVllm) -> list[int]:
    saves = engine.in_scheduler._pinned._saves
    return [block_id for of_one in saves.values() for each in of_one for block_id in each]


def test_pages_of_a_finished_request_stay_until_a_slow_rank_has_saved_them(
    small: RealVllm, save_gate: Gate
) -> None:
    prompt, other = prompt_of(128), prompt_of(200, seed=2)
    pages = small.stage("a", prompt)
    request = small.submit(1, prompt, 1, name="a")
    step_until(small, lambda: request.finish_reason)
    assert save_gate.is_reached.wait(WAIT_S)
    held = pinned_ids(small)
    assert len(held) == 4 and small.executor.blocks.free_blocks == FEW_BLOCKS - 1 - 4
    assert small.executor.has_work, "vLLM would make no step in which they are unpinned"
    before = kv_pages(small, held)
    for seed in range(3):  # all other pages are written
        other = prompt_of(200, seed=seed + 5)
        following = small.submit(2 + seed, other, TOKENS)
        step_until(small, lambda request=following: request.finish_reason)
        assert small.output(following) == small.expected(other, TOKENS)
    for was, now in zip(before, kv_pages(small, held), strict=True):
        assert (was == now).all(), "a page was written while it was saved"
    assert small.news("a") == [("claimed", 0, 0)]
    save_gate.is_open.set()
    small.executor.run_until_idle()
    small.heard.wait_for("saved", "a", 128)
    saved = np.concatenate([small.page(page) for page in pages])
    assert (saved == np.concatenate(before)).all()
    small.unstage("a", pages)
    small.check_clean()


@pytest.mark.parametrize("waits", [True, False])
def test_preemption_while_pages_are_saved_overwrites_none_of_them(
    small: RealVllm, save_gate: Gate, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """While pages are pinned, vLLM preempts no request (`has_pending_block_frees`). If `waits` is
    False, the connector does not ask it to wait."""
    if not waits:
        monkeypatch.setattr(small.in_scheduler, "has_pending_block_frees", lambda: False)
    preempted: list[str] = []
    preempt = small.executor.scheduler._preempt_request

    def noted(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **options)

    monkeypatch.setattr(small.executor.scheduler, "_preempt_request", noted)
    prompts = {"a": prompt_of(128, 5), "b": prompt_of(128, 6)}
    pages = {name: small.stage(name, prompt) for name, prompt in prompts.items()}
    requests = {
        name: small.submit(number, prompt, 100, name=name)
        for number, (name, prompt) in enumerate(prompts.items())
    }
    # Both need eight pages in the end, and there are twelve.
    for _ in range(150):
        small.executor.step()
        held = pinned_ids(small)
        if len(held) == 8:
            break
    before = kv_pages(small, held)
    for _ in range(150):
        small.executor.step()
    assert bool(preempted) != waits
    for was, now in zip(before, kv_pages(small, held), strict=True):
        assert (was == now).all(), "a page was written while it was saved"
    save_gate.is_open.set()
    small.executor.run_until_idle()
    for number, (name, request) in enumerate(requests.items()):
        assert small.output(request) == small.expected(prompts[name], 100)
        small.heard.wait_for("saved", name, 128)
        saved = np.concatenate([small.page(page) for page in pages[name]])
        assert (saved == np.concatenate(before[4 * number : 4 * number + 4])).all()
        small.unstage(name, pages[name])
    assert preempted
    small.check_clean()


@pytest.mark.parametrize("loaded", [0, 64])
def test_preempted_requests_save_the_blocks_that_they_compute(small: RealVllm, loaded: int) -> None:
    prompts = [prompt_of(100, seed) for seed in (5, 6, 7)]
    store: dict[bytes, bytes] = {}
    for prompt in prompts:
        store |= filled(small, prompt)
    names = [str(number) for number in range(3)]
    pages = [
        small.stage(name, prompt, store, loaded, more_tokens=90)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    requests = [
        small.submit(1, prompt, 90, name=name) for name, prompt in zip(names, prompts, strict=True)
    ]
    inside = list(small.executor.scheduler.requests.values())
    small.executor.run_until_idle()
    assert sum(request.num_preemptions for request in inside), "they fit together"
    for name, request, own in zip(names, requests, pages, strict=True):
        assert small.output(request) == small.expected(request.prompt, 90)
        claims = [what for what in small.news(name) if what[0] in ("claimed", "loaded")]
        assert claims == [("claimed", 0, loaded), ("loaded",)][: 1 + bool(loaded)]
        small.heard.wait_for("saved", name, 160)
        small.keep(request.tokens[:160], own, store)
        small.unstage(name, own)
    small.forget()
    for name, request in zip(names, requests, strict=True):
        prompt, name = request.tokens[:150], f"again-{name}"
        own = small.stage(name, prompt, store, loaded_tokens=128)
        again = small.ask(name, prompt, TOKENS)
        assert small.output(again) == small.expected(prompt, TOKENS)
        assert small.news(name)[0] == ("claimed", 0, 128)
        small.unstage(name, own)
    small.check_clean()


def test_loads_that_do_not_fit_together_run_one_after_the_other(small: RealVllm) -> None:
    prompts = {str(seed): prompt_of(200, seed) for seed in (5, 6, 7)}
    store: dict[bytes, bytes] = {}
    for prompt in prompts.values():
        store |= filled(small, prompt)
    pages = {name: small.stage(name, prompt, store, 192) for name, prompt in prompts.items()}
    requests = {
        name: small.submit(1, prompt, TOKENS, name=name) for name, prompt in prompts.items()
    }
    small.executor.run_until_idle()
    for name, prompt in prompts.items():
        assert small.output(requests[name]) == small.expected(prompt, TOKENS)
        assert small.news(name)[:2] == [("claimed", 0, 192), ("loaded",)]
        small.unstage(name, pages[name])
    small.check_clean()


def test_reports_of_several_ranks_become_one() -> None:
    report = EndedSaves({0: {"a": 1}}).aggregate(EndedSaves({1: {"a": 2, "b": 1}}))
    assert report == EndedSaves({0: {"a": 1}, 1: {"a": 2, "b": 1}})


def test_a_pass_that_raises_saves_nothing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines.get(**SMALL)
    prompt = prompt_of(200)
    pages = engine.stage("a", prompt)
    engine.submit(1, prompt, TOKENS, name="a")
    engine.executor.step()  # 128 of 200 tokens
    engine.heard.wait_for("saved", "a", 128)
    runner = engine.executor.core.model_executor.driver_worker.worker.model_runner

    def raises(*args: Any, **options: Any) -> None:
        raise RuntimeError("the pass failed")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model_forward", raises)
        with pytest.raises(RuntimeError, match="the pass failed"):
            engine.executor.step()
    assert engine.copies[0]._next_saves, "the second pass had saves"
    engine.copies[0]._drop_uncomputed()  # as the next step does; this engine makes none
    engine.unstage("a", pages)
    assert [what[1] for what in engine.news("a") if what[0] == "saved"] == [128]
    engines.close()
