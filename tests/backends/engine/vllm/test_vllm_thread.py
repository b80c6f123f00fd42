"""The worker's end of vLLM's process: its start, news, errors and end."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.engine.connected.generation import Order, Outcome
from backends.engine.vllm import llm_thread
from backends.engine.vllm import messages as m
from backends.engine.vllm.llm_thread import VllmThread
from backends.errors import ConfigError, InvalidRequest, WorkerUnavailable
from backends.token_logprobs import TokenLogprobs
from tests.backends.engine.vllm.small_process import (
    DESCRIBED,
    DIES,
    ENDS_WELL,
    LOGPROBS,
    REFUSED,
    STAYS,
)
from tests.e2e.server import wait_until

WAIT_S = 20.0
Open = Callable[..., VllmThread]


class Noted:
    """A sink that notes the tokens, and hands out the end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._ends: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs

    def ended(self, outcome: Outcome) -> None:
        self._ends.put(outcome)

    def end(self) -> Outcome:
        return self._ends.get(timeout=WAIT_S)

    @property
    def has_further_end(self) -> bool:
        return not self._ends.empty()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(llm_thread, "MODULE", "tests.backends.engine.vllm.small_process")
    made: list[VllmThread] = []

    def make(**arguments: Any) -> VllmThread:
        setup = m.Setup(f"ipc://{tmp_path}/llm-{len(made)}", arguments)
        made.append(VllmThread(Path(sys.executable), setup, {}, lambda stats: None))
        return made[-1]

    yield make
    for each in made:
        each.close()


def begun(thread: VllmThread) -> VllmThread:
    assert thread.described() == DESCRIBED
    thread.begin(m.Begin({}, {}))
    return thread


def order(tokens: int, how: int) -> Order:
    return Order([tokens, how], {"max_tokens": tokens})


def test_a_generation_brings_its_tokens_and_then_one_end(opened: Open) -> None:
    thread, sink = begun(opened()), Noted()
    thread.generate(order(5, ENDS_WELL), sink)
    assert sink.end() == Outcome("length")
    assert sink.token_ids == [7] * 5
    assert thread.is_healthy
    assert not sink.has_further_end


def test_tokens_come_with_logprobs_if_they_were_asked_for(opened: Open) -> None:
    thread, sink = begun(opened()), Noted()
    thread.generate(Order([2, ENDS_WELL], {"max_tokens": 2, "logprobs": 2}), sink)
    assert sink.end() == Outcome("length")
    assert sink.logprobs == [LOGPROBS] * 2


def test_what_vllm_refuses_is_the_clients_mistake_and_the_engine_stays_healthy(
    opened: Open,
) -> None:
    thread, sink = begun(opened()), Noted()
    thread.generate(order(5, REFUSED), sink)
    error = sink.end().error
    assert isinstance(error, InvalidRequest)
    assert "too long" in str(error)
    assert thread.is_healthy


def test_an_abort_ends_a_generation_as_cancelled(opened: Open) -> None:
    thread, sink = begun(opened()), Noted()
    run = thread.generate(order(2, STAYS), sink)
    wait_until(lambda: sink.token_ids, "its first tokens")
    run.abort()
    assert sink.end() == Outcome("cancelled")
    run.abort()  # has no effect


def test_a_dead_engine_fails_all_generations_and_later_ones_at_once(opened: Open) -> None:
    thread, first, second, later = begun(opened()), Noted(), Noted(), Noted()
    thread.generate(order(2, STAYS), first)
    thread.generate(order(2, DIES), second)
    for sink in (first, second):
        assert isinstance(sink.end().error, WorkerUnavailable)
    assert not thread.is_healthy
    thread.generate(order(2, ENDS_WELL), later)
    assert "EngineCore has died" in str(later.end().error)


def test_a_process_that_is_killed_fails_its_generations(opened: Open) -> None:
    thread, sink = begun(opened()), Noted()
    thread.generate(order(2, STAYS), sink)
    wait_until(lambda: sink.token_ids, "its first tokens")
    thread._process.kill()
    assert isinstance(sink.end().error, WorkerUnavailable)
    assert not thread.is_healthy


def test_a_process_that_ends_during_the_start_is_reported_with_its_status(opened: Open) -> None:
    with pytest.raises(ConfigError, match="ended with code 3"):
        opened(ends=3).described()


def test_the_reason_why_vllm_does_not_start_is_reported(opened: Open) -> None:
    with pytest.raises(ConfigError, match="no such option"):
        opened(fails="ValueError: no such option").described()


def test_a_program_that_is_not_there_is_reported(tmp_path: Path) -> None:
    setup = m.Setup(f"ipc://{tmp_path}/llm", {})
    with pytest.raises(ConfigError, match="cannot be started"):
        VllmThread(tmp_path / "python", setup, {}, lambda stats: None)


def test_closing_ends_the_process_and_open_generations_once(opened: Open) -> None:
    thread, sink = begun(opened()), Noted()
    thread.generate(order(2, STAYS), sink)
    wait_until(lambda: sink.token_ids, "its first tokens")
    process = psutil.Process(thread._process.pid)
    thread.close()
    assert isinstance(sink.end().error, WorkerUnavailable)
    assert not sink.has_further_end
    assert not process.is_running()
