"""The state of one request: what it computes next and why it ends."""

from __future__ import annotations

import pytest

from backends.engine.sampling_params import SamplingParams
from bench.harness.generate import TokenSequence


def sequence(**params: object) -> TokenSequence:
    values = {"max_tokens": 3, "end_ids": (9,), **params}
    return TokenSequence("r", [1, 2, 3, 4], SamplingParams(**values), pages=[5])  # type: ignore


def test_work_walks_through_the_prompt_and_on_into_the_output() -> None:
    request = sequence()
    assert request.work(3).token_ids == [1, 2, 3]
    request.computed(3)
    assert (request.work(3).token_ids, request.work(3).start) == ([4], 3)
    request.computed(1)
    assert not request.is_decoding
    request.append(7)
    assert request.is_decoding
    assert (request.work(1).token_ids, request.work(1).start) == ([7], 4)


def test_a_migrated_request_recomputes_prompt_and_output_in_one_work() -> None:
    request = sequence(max_tokens=10)
    request.output_ids = [5, 6, 7]
    request.computed_tokens = 2
    assert request.work(100).token_ids == [3, 4, 5, 6, 7]
    assert request.work(3).token_ids == [3, 4, 5]


def test_an_end_id_stops_and_belongs_to_the_output() -> None:
    request = sequence()
    request.append(9)
    assert (request.finish_reason, request.output_ids) == ("stop", [9])


def test_an_end_id_before_min_tokens_does_not_stop() -> None:
    request = sequence(min_tokens=1)
    request.append(9)
    assert not request.is_finished
    request.append(9)
    assert request.finish_reason == "stop"


def test_max_tokens_ends_a_request_by_length() -> None:
    request = sequence()
    for token_id in (1, 1, 1):
        assert not request.is_finished
        request.append(token_id)
    assert request.finish_reason == "length"
    with pytest.raises(AssertionError, match="ended with length"):
        request.append(1)
