"""Logprobs of an engine that batches by itself stay with their tokens."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from backends.engine.connected.generation import Outcome
from backends.token_logprobs import TokenLogprobs
from backends.workers.connected.decode import ConnectedDecode, EngineAnswer
from backends.workers.connected.prefill import ConnectedPrefill, StagedPrompt

FIRST, SECOND, THIRD = (TokenLogprobs(-float(i), (i,), (-float(i),)) for i in range(3))


class Decode:
    """A driver with one request. The job finishes with its second token."""

    def __init__(self) -> None:
        self.recorded: list[tuple[list[int], int]] = []  # tokens, and logprobs there are by then
        self.job: Any = SimpleNamespace(drawn_logprobs=[], finish_reason="", output_ids=[])
        self.has_read = False
        self.driver: Any = object.__new__(ConnectedDecode)
        self.driver._has_news = True
        self.driver._health = SimpleNamespace(went_well=lambda: None)
        self.driver._worker = SimpleNamespace(
            process=SimpleNamespace(watch=SimpleNamespace(progressed=lambda now_s: None)),
            decoded=self._record,
        )
        self.driver.has_read = lambda job: self.has_read
        self.answer = EngineAnswer(self.driver, self.job)

    def _record(self, tokens_of: Any) -> None:
        ((job, token_ids),) = tokens_of
        self.recorded.append((token_ids, len(job.drawn_logprobs)))
        job.output_ids += token_ids
        job.finish_reason = "stop_word" if len(job.output_ids) >= 2 else ""


def test_tokens_without_logprobs_are_recorded_together() -> None:
    decode = Decode()
    decode.has_read = True
    decode.answer.tokens([4, 5])
    assert decode.recorded == [([4, 5], 0)]


def test_tokens_with_logprobs_are_recorded_one_by_one_until_the_end() -> None:
    decode = Decode()
    decode.has_read = True
    decode.answer.tokens([4, 5, 6], [FIRST, SECOND, THIRD])
    assert decode.recorded == [([4], 1), ([5], 2)]
    assert decode.job.drawn_logprobs == [FIRST, SECOND]


def test_held_tokens_keep_their_logprobs() -> None:
    decode = Decode()
    decode.answer.tokens([4], [FIRST])
    decode.answer.tokens([5], [SECOND])
    decode.answer.ended(Outcome("length"))
    assert decode.recorded == []
    decode.answer.believe()
    assert decode.recorded == [([4], 1), ([5], 2)]


def test_the_first_token_of_a_prompt_has_its_logprobs() -> None:
    job: Any = SimpleNamespace(
        has_left=False, is_leaving=True, token_ids=[1, 2], request_id="a", logprobs=[]
    )
    driver: Any = object.__new__(ConnectedPrefill)
    driver._step_began_s = driver._step_ended_s = 0.0
    driver._worker = SimpleNamespace(
        lock=threading.Condition(),
        process=SimpleNamespace(watch=SimpleNamespace(progressed=lambda now_s: None)),
        batching=SimpleNamespace(computed=lambda chunks: None),
    )
    prompt = StagedPrompt(driver, job, 0, range(0))
    prompt.tokens([4], [FIRST])
    assert (prompt.token_id, job.logprobs) == (4, [FIRST])
