"""Steps in flight: how many, when they are over, and what waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from backends.engine.batching.batching import Chunk
from backends.workers.pipeline.step_window import SentStep, StepWindow
from backends.workers.step_times import HUNG_S_MIN


def job(name: str, *pages: int) -> Any:
    return SimpleNamespace(request_id=name, put=SimpleNamespace(pages=list(pages)))


def step(window: StepWindow, *jobs: Any) -> SentStep:
    sent = SentStep(
        number=window.next_number,
        parts=[(Chunk("", 0, 1, False), each, range(0)) for each in jobs],
        started_s=0.0,
        sent_s=0.0,
        predicted_s=0.1,
    )
    window.sent(sent)
    return sent


def finish(window: StepWindow, sent: SentStep, stages: int) -> None:
    assert window.computed(sent.number) is sent
    for stage in range(1, stages):
        window.written(sent.number, stage)
    assert sent.is_over
    window.over(sent)


def test_one_step_more_than_there_are_stages_is_under_way_and_no_more() -> None:
    window = StepWindow(2)
    steps = []
    while not window.is_full:
        steps.append(step(window, job("a")))
    assert len(steps) == 3
    window.computed(0)
    assert not window.is_full, "what is only being written takes no place"


def test_a_step_is_over_when_it_is_computed_and_every_stage_has_written_it() -> None:
    window = StepWindow(3)
    sent = step(window, job("a"))
    window.written(0, 1)
    window.computed(0)
    assert not sent.is_over
    assert window.written(0, 1) is None, "said twice"
    window.written(0, 2)
    assert sent.is_over


def test_what_waits_for_a_request_comes_behind_its_last_step_and_its_late_prefix() -> None:
    window, done = StepWindow(2), list[str]()
    a, b = job("a", 1, 2), job("b", 3)
    first, second = step(window, a, b), step(window, a)
    load = window.wanted([3], 60.0)
    for each in (a, b):
        window.behind(each, lambda each=each: done.append(each.request_id))  # type: ignore[misc]
    finish(window, first, 2)
    assert done == [], "a has another step, b a prefix on its way"
    window.loaded(load.number, 1, 0)
    assert done == ["b"]
    finish(window, second, 2)
    assert done == ["b", "a"]
    assert window.is_empty


def test_of_a_prefix_counts_what_all_stages_have() -> None:
    window = StepWindow(3)
    load = window.wanted([1, 2, 3, 4], 60.0)
    window.loaded(load.number, 1, 4)
    assert not load.is_over
    window.loaded(load.number, 2, 3)
    assert (load.is_here, load.blocks) == (True, 3)


def test_a_group_that_breaks_forgets_its_steps_and_lets_everybody_go() -> None:
    window, done = StepWindow(2), list[str]()
    a = job("a", 1)
    step(window, a)
    load = window.wanted([1], 60.0)
    window.behind(a, lambda: done.append("a"))
    window.clear()
    assert done == ["a"]
    assert load.is_over
    assert not load.is_here
    assert window.computed(0) is None
    assert window.next_number == 0


def test_a_step_that_takes_far_longer_than_it_should_is_late() -> None:
    window = StepWindow(2)
    step(window, job("a"))
    assert window.late(HUNG_S_MIN - 1) == ""
    assert window.late(HUNG_S_MIN + 1) == "step 0 is not computed in time"


def test_a_prefix_of_which_a_stage_never_says_anything_is_late() -> None:
    window = StepWindow(3)
    load = window.wanted([1], 60.0)
    window.loaded(load.number, 1, 1)
    assert window.late(59.0) == ""
    assert window.late(61.0) == "a cached prefix is not loaded in time by stage 2"
    window.loaded(load.number, 2, 1)
    assert window.late(61.0) == ""
