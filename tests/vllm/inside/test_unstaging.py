"""The worker unstages a prompt in each phase: no copy uses its places afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.engine.connected.connected import keys_of, prompt_of, step_until
from tests.backends.engine.connected.gate import Gate
from tests.backends.engine.connected.listening import WAIT_S
from tests.vllm.inside.gates import LoadGate
from tests.vllm.inside.gates import load_gate as load_gate  # a fixture
from tests.vllm.inside.gates import save_gate as save_gate  # a fixture
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled

LONG = prompt_of(300)
TOKENS = 12


def overwrite(engine: RealVllm, pages: list[int]) -> None:
    """Another request has the pages of the pool."""
    for page in pages:
        engine.page(page)[:] = 0x11


def check_untouched(engine: RealVllm, pages: list[int]) -> None:
    assert all((engine.page(page) == 0x11).all() for page in pages)


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_stage_that_is_unstaged_before_the_first_step_is_not_read(
    engine: RealVllm, is_submitted: bool
) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}
    pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a") if is_submitted else None
    engine.unstage("a", pages)
    overwrite(engine, pages)
    request = request or engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.heard.all == []
    check_untouched(engine, pages)
    engine.check_clean()


@pytest.mark.parametrize("has_pages", [False, True])
def test_unstaging_between_match_and_allocation(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch, has_pages: bool
) -> None:
    """With pages the load was promised: it is ordered, and unstaging waits for it. Without pages
    vLLM asks again, and computes the prompt."""
    store = filled(engine, LONG)
    manager = engine.executor.scheduler.kv_cache_manager
    allocate, unstaged = manager.allocate_slots, []

    def allocate_late(*args: Any, **options: Any) -> Any:
        if unstaged:
            return allocate(*args, **options)
        entry = engine.scheduler._table.entries["a"]
        unstaged.append(engine.host.unstage("a", WAIT_S))
        # A message that is handled after the first one.
        engine.host.unstage("unknown", WAIT_S).result(WAIT_S)
        assert entry.is_unstaged and not unstaged[0].done()
        return allocate(*args, **options) if has_pages else None

    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    monkeypatch.setattr(manager, "allocate_slots", allocate_late)
    request = engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.step()
    unstaged[0].result(WAIT_S)
    overwrite(engine, pages)
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    claims = [("claimed", 0, 256), ("loaded",)] if has_pages else []
    assert engine.news("a") == claims
    check_untouched(engine, pages)
    engine.unstage("a", pages)
    engine.check_clean()


def test_unstaging_waits_for_a_load_that_runs(engine: RealVllm, load_gate: LoadGate) -> None:
    load_gate.is_open.set()
    store = filled(engine, LONG)
    load_gate.is_open.clear()
    load_gate.is_reached.clear()
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    request = engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.step()
    assert load_gate.is_reached.wait(WAIT_S)
    unstaged = engine.host.unstage("a", WAIT_S)
    engine.host.unstage("unknown", WAIT_S).result(WAIT_S)
    assert not unstaged.done()
    load_gate.is_open.set()
    unstaged.result(WAIT_S)
    overwrite(engine, pages)
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    check_untouched(engine, pages)
    engine.unstage("a", pages)
    engine.check_clean()


def test_nothing_is_saved_after_a_stage_was_unstaged_between_chunks(engine: RealVllm) -> None:
    prompt = prompt_of(400)
    pages = engine.stage("a", prompt)
    request = engine.submit(1, prompt, TOKENS, name="a")
    engine.executor.step()  # 256 of 400 tokens
    engine.unstage("a", pages)
    overwrite(engine, pages)
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(prompt, TOKENS)
    check_untouched(engine, pages)
    assert [what[1] for what in engine.news("a") if what[0] == "saved"] in ([], [256])
    engine.check_clean()


def test_unstaging_waits_for_a_slow_save(engine: RealVllm, save_gate: Gate) -> None:
    pages = engine.stage("a", LONG)
    request = engine.submit(1, LONG, TOKENS, name="a")
    step_until(engine, lambda: request.finish_reason)
    assert save_gate.is_reached.wait(WAIT_S)
    unstaged = engine.host.unstage("a", WAIT_S)
    engine.host.unstage("unknown", WAIT_S).result(WAIT_S)
    assert not unstaged.done()
    save_gate.is_open.set()
    unstaged.result(WAIT_S)
    overwrite(engine, pages)
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    check_untouched(engine, pages)
    engine.unstage("a", pages)
    engine.check_clean()
