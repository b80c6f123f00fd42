"""A prompt that the connector did not recognise is computed, on both sides, instead of failing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.engine.connected.block_pages import SlotUse
from backends.engine.connected.generation import Outcome
from backends.errors import WorkerUnavailable
from backends.workers.connected.decode import ConnectedDecode, EngineAnswer
from backends.workers.connected.driver import UNCLAIMED_S_MAX
from backends.workers.connected.prefill import ConnectedPrefill, StagedPrompt
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle import prefill
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import JobPhase, JobState
from backends.workers.protocol import BlockRef

REF = BlockRef(0, "s0", 1, 1, 0)


class InPool:
    """No block lies in a slot."""

    def places(self, pages: list[int], whole: int) -> tuple[list[int], tuple[SlotUse, ...]]:
        return pages, ()


class Heard:
    """A driver over a worker that writes down what it hears."""

    def __init__(self) -> None:
        put = BlockPut("a", 40, pages=[0, 1, 2], keys=[b"0", b"1"], first_block=1)
        put.refs = {0: REF}
        request: Any = SimpleNamespace(request_id="a", cache_salt="tenant", decode_inbox="")
        self.job = PrefillJob(
            request=request,
            client=None,
            submitted_s=0.0,
            token_ids=np.arange(40),
            put=put,  # type: ignore[arg-type]
        )
        self.job.state = JobState(JobPhase.COMPUTING)
        self.said: list[Any] = []
        said, job = self.said, self.job
        self.driver: Any = object.__new__(ConnectedPrefill)
        self.driver.is_native, self.driver._transfer_s_max = False, 60.0
        self.driver._step_began_s = self.driver._step_ended_s = 0.0
        self.driver._health = SimpleNamespace(went_well=lambda: said.append("well"))
        self.driver._worker = SimpleNamespace(
            lock=threading.Condition(),
            jobs={"a": job},
            settle_behind=lambda job, blocks: said.append("others may look again"),
            post=self.post,
            batching=SimpleNamespace(computed=lambda chunks: None),
            process=SimpleNamespace(watch=SimpleNamespace(progressed=lambda now_s: None)),
        )
        self.prompt = StagedPrompt(self.driver, job, 40, range(1, 3))
        self.driver._prompts = {job: self.prompt}

    def post(self, job: PrefillJob, event: On, value: Any = None) -> None:
        job.state, actions = prefill.step(job.state, event, value)
        if Do.SEND_FIRST in actions:
            self.said.append(("first", value, job.cached_tokens))
        if Do.AWAIT_WRITES in actions:
            self.said.append(job.reply("me", 8).blocks)


def test_a_prompt_that_was_not_recognised_is_answered_without_blocks() -> None:
    heard = Heard()
    driver, prompt = heard.driver, heard.prompt
    prompt.token_id, prompt.ended_s = 7, 1.0  # computed, and the connector has said nothing of it
    assert driver._late(1.0 + UNCLAIMED_S_MAX / 2) == []
    assert driver._late(1.0 + UNCLAIMED_S_MAX * 2) == [prompt]
    driver._give_up([prompt])
    assert heard.said == ["others may look again", ("first", 7, 0), "well", []]
    assert driver._late(1e9) == [], "once"


def test_what_was_cached_is_known_before_anything_is_said() -> None:
    """The engine's token may come before the connector's word of what it did not compute."""
    heard = Heard()
    heard.job.cached_tokens, heard.prompt.unsaved = 39, range(0)
    heard.driver.computed(heard.prompt, 7)
    assert heard.said == []
    heard.driver.claimed("a", 8, 24)
    assert heard.said == [], "nobody said that what was loaded is what was verified"
    heard.driver.loaded("a")
    assert heard.said == [("first", 7, 32), "well", [REF]]
    heard.driver.claimed("a", 0, 0)
    assert heard.job.cached_tokens == 32, "it was said"
    assert [each for each in heard.said if each != "well"] == [("first", 7, 32), [REF]], "each once"


@pytest.mark.parametrize(("refs", "loaded"), [([], 0), ([REF], 28)])
def test_what_was_not_handed_over_is_staged_as_nothing_to_load(
    refs: list[BlockRef], loaded: int
) -> None:
    driver: Any = object.__new__(ConnectedDecode)
    staged: list[Any] = []
    driver._staged, driver._staged_jobs = SimpleNamespace(stage=staged.append), {}
    driver._placed = InPool()
    driver.engine, driver._block_tokens = SimpleNamespace(handover_tokens=4), 16
    driver._worker = SimpleNamespace(
        lock=threading.Condition(), process=SimpleNamespace(fingerprint="print")
    )
    request = SimpleNamespace(cache_salt="", blocks=refs)
    job: Any = SimpleNamespace(
        request_id="a", token_ids=list(range(31)), request=request, pages=[0, 1]
    )
    driver._stage(EngineAnswer(driver, job))
    assert [each.loaded_tokens for each in staged] == [loaded]


class HashedNamespace(SimpleNamespace):
    __hash__ = object.__hash__


class Streamed:
    """A decode driver, and what its worker was given, in order. Its KV lies in slots."""

    def __init__(self, are_in_slots: bool = True) -> None:
        self.said: list[Any] = []
        said = self.said
        self.in_slots = are_in_slots
        driver: Any = object.__new__(ConnectedDecode)
        self.driver = driver
        driver._placed = SimpleNamespace(
            is_in_slots=lambda pages: self.in_slots, forget=lambda pages: self.forget()
        )
        driver._transfer_s_max, driver._has_news = 60.0, False
        driver._health = SimpleNamespace(went_well=lambda: None, failed=said.append)
        driver.engine = SimpleNamespace(
            llm=SimpleNamespace(soon=lambda act: act(), post=lambda act: act())
        )
        self.job: Any = HashedNamespace(
            request_id="a",
            pages=[0, 1],
            finish_reason="",
            output_ids=[],
            is_leaving=False,
            has_left=False,
            tokens_given=30,
        )
        driver._worker = SimpleNamespace(
            lock=threading.Condition(),
            is_closing=False,
            decoded=lambda tokens_of: said.extend(ids for _, ids in tokens_of),
            send_news=lambda: None,
            fail=lambda job, error: said.append(error),
            writer=SimpleNamespace(mark=lambda mark: None),
            process=SimpleNamespace(
                watch=SimpleNamespace(progressed=lambda now_s: None),
                observations=SimpleNamespace(observe=lambda *_, **__: None),
            ),
        )
        self.answer = EngineAnswer(driver, self.job)
        driver._answers, driver._staged_jobs = {self.job: self.answer}, {"a": self.job}

    def forget(self) -> None:
        self.in_slots = False


def test_no_token_leaves_before_its_kv_is_known_to_be_what_was_verified() -> None:
    streamed = Streamed()
    streamed.answer.tokens([1])
    streamed.driver.claimed("a", 0, 28)
    streamed.answer.tokens([2, 3])
    streamed.answer.ended(Outcome(finish_reason="cancelled"))
    assert streamed.said == [], "the slots may have been given away during the load"
    streamed.driver.loaded("a")
    tokens, error = streamed.said[:2], streamed.said[2:]
    assert tokens == [[1], [2, 3]] and "cancelled" in str(error), "held, in order"
    streamed.answer.tokens([4])
    assert streamed.said[-1] == [4]


def test_tokens_of_kv_in_the_pool_or_of_nothing_loaded_leave_at_once() -> None:
    pooled = Streamed(are_in_slots=False)
    pooled.answer.tokens([1])
    assert pooled.said == [[1]]
    local = Streamed()
    local.answer.tokens([1])
    local.driver.claimed("a", 28, 0)
    assert local.said == [[1]]


def test_held_tokens_of_an_unmatched_stage_leave_and_those_of_a_stuck_load_fail() -> None:
    unmatched, stuck = Streamed(), Streamed()
    stuck.driver.claimed("a", 0, 28)
    for streamed in (unmatched, stuck):
        streamed.answer.tokens([1])
        held_s = streamed.answer.held_s
        streamed.driver._look_at_held(held_s + UNCLAIMED_S_MAX / 2)
        assert streamed.said == []
        streamed.driver._look_at_held(held_s + UNCLAIMED_S_MAX * 2)
    assert unmatched.said == [[1]], "the engine computed the prompt itself"
    assert stuck.said == []
    stuck.driver._look_at_held(held_s + 61.0)
    assert isinstance(stuck.said[-1], WorkerUnavailable) and [1] not in stuck.said


@pytest.mark.parametrize("is_claimed", [False, True])
def test_an_error_of_the_engine_is_reported_at_once_and_held_tokens_are_dropped(
    is_claimed: bool,
) -> None:
    """The engine ends when a slot changed during its copy, so it never reports that load."""
    streamed, error = Streamed(), WorkerUnavailable("tensorrt_llm: a slot changed")
    if is_claimed:
        streamed.driver.claimed("a", 0, 28)
    streamed.answer.tokens([1])
    streamed.answer.ended(Outcome(error=error))
    assert streamed.said[-1] is error and [1] not in streamed.said
    streamed.answer.believe()
    streamed.driver._look_at_held(streamed.answer.held_s + 1e9)
    assert [1] not in streamed.said
