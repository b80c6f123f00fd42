"""Copies that take long, fail, or are not wanted any more, with each engine."""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine.connected.copier import HostCopier
from tests.backends.engine.connected.connected import Make, expected, filled, prompt_of, step_until
from tests.backends.engine.connected.gate import Gate
from tests.backends.engine.connected.gate import gate as gate  # a fixture
from tests.backends.engine.connected.listening import WAIT_S


def test_pages_stay_while_they_are_saved_and_the_answer_does_not_wait(
    make: Make, gate: Gate
) -> None:
    engine, prompt = make(), prompt_of(40)
    pages = engine.stage("a", prompt)
    request = engine.submit(1, prompt, 1)
    step_until(engine, lambda: request.finish_reason)
    assert engine.output(request) == expected(engine, prompt, 1)
    assert gate.is_reached.wait(WAIT_S)
    other = engine.submit(2, prompt_of(9, 2), 3)
    step_until(engine, lambda: other.finish_reason)  # other requests continue
    assert engine.saving == {1} and not engine.all_free
    assert ("saved", "a", 40) not in engine.heard.all
    gate.is_open.set()
    engine.executor.run_until_idle()
    assert engine.all_free
    engine.heard.wait_for("saved", "a", 40)
    engine.unstage("a", pages)


def test_unstaging_waits_for_a_slow_save(make: Make, gate: Gate) -> None:
    engine, prompt = make(), prompt_of(40)
    engine.stage("a", prompt)
    request = engine.submit(1, prompt, 1)
    step_until(engine, lambda: request.finish_reason)
    assert gate.is_reached.wait(WAIT_S)
    future = engine.host.unstage("a", WAIT_S)
    engine.host.unstage("nobody", WAIT_S).result(WAIT_S)  # a later request does not wait
    assert not future.done()
    gate.is_open.set()
    future.result(WAIT_S)
    engine.executor.run_until_idle()


def test_taking_a_stage_back_while_it_runs_stops_further_copies_only(make: Make) -> None:
    prompt = prompt_of(100)
    store = filled(make(), prompt[:50])
    engine = make(enable_chunked_prefill=True, max_num_tokens=16)
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.submit(1, prompt, 3)
    engine.executor.step()
    engine.unstage("a", pages)
    for page in pages:
        engine.page(page)[:] = 0x11  # another request has the page by now
    engine.executor.run_until_idle()
    assert engine.output(request) == expected(engine, prompt, 3)
    assert all((engine.page(page) == 0x11).all() for page in pages)


def test_a_copy_that_fails_is_told_and_nothing_is_called_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copier: HostCopier, runs: Any, after: Any) -> None:
        raise RuntimeError("the bus is off")

    monkeypatch.setattr(HostCopier, "save", fail)
    engine, prompt = make(), prompt_of(40)
    engine.stage("a", prompt)
    request = engine.generate(1, prompt, 1)
    assert engine.output(request) == expected(engine, prompt, 1)
    reason = "rank 0 could not copy KV: the bus is off"
    engine.heard.wait_for("broken", reason)
    assert engine.all_free and not [what for what in engine.heard.all if what[0] == "saved"]
