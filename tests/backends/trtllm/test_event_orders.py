"""The engine and its connector speak in two threads: their words come in any order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.engine.connected.generation import Outcome
from backends.engine.sampling_params import SamplingParams
from backends.errors import WorkerUnavailable
from backends.workers.connected.decode import LAST_BLOCK_S_MAX, ConnectedDecode, EngineAnswer
from backends.workers.connected.prefill import ConnectedPrefill, StagedPrompt
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle import prefill
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import JobPhase, JobState
from backends.workers.protocol import BlockRef

TOKENS, BLOCK = 40, 16  # two whole blocks and a part of a third one
TOKEN = 7
LEFT = (On.ENGINE_LEFT, True)
WORDS = ("claimed", "loaded", "computed", "ended", "saved 1", "saved 3")


def orders() -> Iterator[tuple[str, ...]]:
    for order in itertools.permutations(WORDS):
        is_possible = order.index("computed") < order.index("ended")
        if is_possible and order.index("saved 1") < order.index("saved 3"):
            yield order


class Prefill:
    """A driver with one prompt at the engine, over a worker that writes down what it hears."""

    def __init__(self, handoff: str) -> None:
        request: Any = SimpleNamespace(
            request_id="a", sampling=SamplingParams(max_tokens=9, end_ids=(TOKEN,))
        )
        put = BlockPut("a", TOKENS, pages=[0, 1, 2], keys=[b"0", b"1"], first_block=0)
        put.refs = {0: BlockRef(0, "s0", 1, 1, 0)}
        self.job = PrefillJob(
            request=request,
            client=None,
            submitted_s=0.0,
            token_ids=np.arange(TOKENS),
            put=put,  # type: ignore[arg-type]
        )
        self.job.state = JobState(JobPhase.COMPUTING)
        self.said: list[Any] = []
        self.jobs = {"a": self.job}
        said = self.said
        driver: Any = object.__new__(ConnectedPrefill)
        driver.is_native, driver._transfer_s_max = handoff == "native", 5.0
        driver._step_began_s = driver._step_ended_s = 0.0
        driver._block_tokens = BLOCK
        driver._health = SimpleNamespace(went_well=lambda: None, failed=said.append)
        driver._worker = SimpleNamespace(
            lock=threading.Condition(),
            jobs=self.jobs,
            is_closing=False,
            settle_behind=lambda job, blocks: None,
            writer=SimpleNamespace(
                put_whole=lambda put, blocks, is_handover: said.append(list(blocks))
            ),
            post=self.post,
            fail=lambda job, error: said.append(error),
            batching=SimpleNamespace(computed=lambda chunks: None),
            process=SimpleNamespace(watch=SimpleNamespace(progressed=lambda now_s: None)),
        )
        self.driver = driver
        self.prompt = StagedPrompt(driver, self.job, TOKENS, range(3))
        driver._prompts = {self.job: self.prompt}

    def post(self, job: PrefillJob, event: On, value: Any = None) -> None:
        if event is On.ENGINE_LEFT:
            self.said.append("left" if value else "lost")
            return
        before = job.state
        job.state, actions = prefill.step(before, event, value)
        if Do.SEND_FIRST in actions:
            self.said.append(f"first of {job.cached_tokens}")
        if job.state.awaited > before.awaited:
            is_last = event is On.COMPUTED and self.driver.is_native
            self.said.append("over" if is_last else "answer")

    def hear(self, word: str) -> None:
        match word.split():
            case ["claimed"]:
                self.driver.claimed("a", 0, 32)
            case ["loaded"]:
                self.driver.loaded("a")
            case ["computed"]:
                self.prompt.tokens([TOKEN])
            case ["ended"]:
                self.prompt.ended(Outcome("length", native=b"where it lies"))
            case ["saved", blocks]:
                self.driver.saved("a", min(TOKENS, int(blocks) * BLOCK))


@pytest.mark.parametrize("handoff", ["store", "native"])
@pytest.mark.parametrize("order", list(orders()), ids=", ".join)
def test_each_thing_is_said_once_and_not_before_it_is_true(
    handoff: str, order: tuple[str, ...]
) -> None:
    heard = Prefill(handoff)
    for number, word in enumerate(order):
        heard.hear(word)
        known = set(order[: number + 1])
        whole = {"claimed", "loaded", "computed"}
        needed = whole | {"ended" if handoff == "native" else "saved 3"}
        assert ("first of 32" in heard.said) == (whole <= known)
        assert ("answer" in heard.said) == (needed <= known), word
        assert ("over" in heard.said) == (
            handoff == "native" and (needed | {"saved 3"}) <= known
        ), word
    puts = [each for each in heard.said if isinstance(each, list)]
    assert puts == [[0], [1, 2]]
    for word in WORDS:  # all of it again, late
        heard.hear(word)
    assert heard.said.count("first of 32") == heard.said.count("answer") == 1
    assert [each for each in heard.said if isinstance(each, list)] == puts


@pytest.mark.parametrize("order", list(orders())[:5], ids=", ".join)
def test_nothing_is_said_of_a_prompt_that_has_left(order: tuple[str, ...]) -> None:
    heard = Prefill("store")
    heard.jobs.clear()
    heard.job.state = JobState(JobPhase.QUITTING)
    for word in order:
        heard.hear(word)
    assert heard.said == []


def test_a_prompt_whose_end_id_the_engine_keeps_is_computed_all_the_same() -> None:
    heard = Prefill("store")
    for word in ("claimed", "loaded", "saved 3"):
        heard.hear(word)
    heard.prompt.ended(Outcome("stop"))
    assert heard.said == [[0, 1, 2], "first of 32", "answer"] and heard.prompt.token_id == TOKEN


def test_a_prompt_that_the_engine_ends_without_a_token_fails_unless_it_was_stopped() -> None:
    heard = Prefill("store")
    heard.prompt.ended(Outcome("cancelled"))
    reason, error = heard.said
    assert isinstance(error, WorkerUnavailable) and "cancelled" in reason
    stopped = Prefill("store")
    stopped.job.state = JobState(JobPhase.LEAVING)
    stopped.prompt.ended(Outcome("cancelled"))
    assert stopped.said == []


def test_kv_that_does_not_come_out_fails_its_prompt_after_a_while() -> None:
    heard = Prefill("store")
    heard.driver._health.went_well = lambda: heard.said.append("went well")
    for word in ("claimed", "loaded", "computed", "ended"):
        heard.hear(word)
    assert "went well" not in heard.said, "its KV is missing, so the engine may be lost"
    heard.prompt.ended_s = 100.0
    assert heard.driver._late(105.0) == []
    heard.driver._give_up(heard.driver._late(105.1))
    assert isinstance(heard.said[-1], WorkerUnavailable)


# -- decode: the end of a request, its last blocks, and its pages


class Ended:
    """Stands where a DecodeJob would."""

    def __init__(self) -> None:
        self.request_id = "a"
        self.filled, self.saved_blocks = [1, 2], 1
        self.finish_reason = "length"
        self.pages_left = [4]


class Decode:
    """A driver with one staged request whose last two blocks have just been filled."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        said = self.said
        self.job: Any = Ended()
        driver: Any = object.__new__(ConnectedDecode)
        driver._block_tokens = BLOCK
        driver._staged = SimpleNamespace(
            give_back=lambda name, pages, then: (said.append(pages), then(True))
        )
        driver._worker = SimpleNamespace(
            lock=threading.Condition(),
            put_saved=self._put_saved,
            post=lambda job, *event: said.append(event),
            process=SimpleNamespace(is_lost=False),
        )
        self.driver = driver
        self.answer = EngineAnswer(driver, self.job, is_staged=True)
        driver._answers = {self.job: self.answer}
        driver._staged_jobs = {"a": self.job}

    def _put_saved(self, job: Any) -> None:
        saved = [block for block in job.filled if block < job.saved_blocks]
        job.filled = [block for block in job.filled if block >= job.saved_blocks]
        self.said += saved


def test_pages_wait_for_the_last_block_that_comes_out_of_them() -> None:
    decode = Decode()
    decode.job.pages_left = [4, 5, 6]
    decode.driver.leave(decode.job)
    decode.driver._let_go(decode.answer.ended_s)
    assert decode.said == [] and decode.driver._answers
    decode.driver.saved("a", 2 * BLOCK)
    decode.driver._let_go(decode.answer.ended_s)
    assert decode.said == [1]
    decode.driver.saved("a", 3 * BLOCK)
    decode.driver._let_go(decode.answer.ended_s)
    assert decode.said == [1, 2, [4, 5, 6], LEFT] and not decode.driver._answers
    decode.driver.saved("a", 4 * BLOCK)
    decode.driver._let_go(1e9)
    assert decode.said[-1] == LEFT and len(decode.said) == 4, "once"


def test_blocks_that_do_not_come_hold_pages_for_a_moment_only() -> None:
    decode = Decode()
    decode.driver.leave(decode.job)
    decode.driver._let_go(decode.answer.ended_s + LAST_BLOCK_S_MAX + 0.1)
    assert decode.said == [[4], LEFT]


@pytest.mark.parametrize("finish_reason", ["cancelled", ""])
def test_a_request_that_did_not_end_well_waits_for_no_block(finish_reason: str) -> None:
    decode = Decode()
    decode.job.finish_reason = finish_reason
    decode.driver.leave(decode.job)
    decode.driver._let_go(decode.answer.ended_s)
    assert decode.said == [[4], LEFT]


def test_pages_that_no_connector_knows_are_released_at_once() -> None:
    decode = Decode()
    decode.answer.is_staged = False
    decode.driver.leave(decode.job)
    assert decode.said == [LEFT] and not decode.driver._answers


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_staged_prompt_has_left_the_engine_with_the_connector_s_word(is_certain: bool) -> None:
    heard, asked = Prefill("store"), list[Any]()
    heard.driver._staged = SimpleNamespace(
        give_back=lambda name, pages, then: asked.append((pages, then))
    )
    heard.job.pages_left = [4, 5]
    heard.driver.leave(heard.job)
    ((pages, then),) = asked
    assert (heard.said, pages) == ([], [4, 5]), "ranks may still copy"
    then(is_certain)
    assert heard.said == ["left" if is_certain else "lost"]
    heard.driver.leave(heard.job)  # as one that was never staged
    assert heard.said[1:] == ["left"] and len(asked) == 1


@pytest.mark.parametrize("finish_reason", ["", "cancelled", "stop_word", "length", "end_id"])
def test_the_engine_hears_of_an_end_that_only_we_know(finish_reason: str) -> None:
    decode, aborted = Decode(), []
    decode.answer.running = SimpleNamespace(abort=lambda: aborted.append(0))  # type: ignore[assignment]
    decode.job.finish_reason = finish_reason
    decode.driver.leave(decode.job)
    assert bool(aborted) == (finish_reason not in ("length", "end_id"))
