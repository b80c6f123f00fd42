"""Several answers to one prompt: one prefill, a first token for each, and leases for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.engine.sampling_params import SEED_MAX, SamplingParams
from backends.workers.protocol import CopyToken, PrefillRequest
from tests.backends.workers.pair import Asked, Pair, pairs, prompt

BLOCK = 64
IDS = prompt(2, 2 * BLOCK + 7)
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": SEED_MAX - 1, "top_logprobs": 1}


@pytest.fixture(params=["chunks", "layers"])
def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    layered = {"layerwise": "on", "chunk_tokens": "64"} if request.param == "layers" else {}
    yield from pairs(tmp_path, monkeypatch, **layered)


def leases_of(pair: Pair, owner: str) -> int:
    """Number of copies of blocks that are leased to this request."""
    known = pair.directory.directory._copies.leases._owners.get(owner)
    return len(known.copies) if known is not None else 0


def prefill(pair: Pair, asked: Asked, copies: list[str]) -> list[CopyToken]:
    """Submit the prompt with `copies` and wait. Returns their first tokens."""
    request = PrefillRequest(
        request_id=asked.request_id,
        prompt_tokens=len(asked.prompt),
        sampling=asked.sampling,
        cache_salt="",
        fetch_blocks=0,
        decode_inbox=pair.decode.process.inbox.address,
        reply_inbox="",
        reserve_tokens=len(asked.prompt) + asked.sampling.max_tokens,
        copies=copies,
    )
    pair.prefill.submit(request, np.array(asked.prompt, np.int32), asked)
    asked.wait()
    assert asked.prefill_reply is not None
    return asked.prefill_reply.copies


def alone(pair: Pair, index: int) -> list[int]:
    """The tokens of a request of its own with the seed of this answer."""
    seed = (int(SAMPLING["seed"]) + index) % (SEED_MAX + 1)
    return pair.ask(IDS, **{**SAMPLING, "seed": seed}).wait()


def test_each_answer_has_the_tokens_of_a_request_with_its_seed(pair: Pair) -> None:
    asked = Asked(pair, "first", IDS, **SAMPLING)
    names = ["second", "third", "fourth"]
    drawn = prefill(pair, asked, names)
    answers = [asked.output_ids]
    for index, (name, copy) in enumerate(zip(names, drawn, strict=True), 1):
        other = Asked(pair, name, IDS)
        other.sampling = asked.sampling.of_answer(index)
        assert len(copy.logprobs) == 1 and asked.prefill_reply is not None
        other.prefilled(copy.token_id, asked.prefill_reply)  # decodes from the blocks of the first
        answers.append(other.wait())
    pair.wait_until_idle()
    assert answers == [alone(pair, index) for index in range(4)]
    assert len({tuple(answer) for answer in answers}) > 1, "seeds have no effect"


def test_the_blocks_stay_for_an_answer_that_begins_after_the_first_has_ended(pair: Pair) -> None:
    asked = Asked(pair, "first", IDS, **SAMPLING)
    [copy] = prefill(pair, asked, ["late"])
    assert leases_of(pair, "late") == 3, "two full blocks, and the last one, which only leases keep"
    other = Asked(pair, "late", IDS)
    other.sampling = asked.sampling.of_answer(1)
    assert asked.prefill_reply is not None
    other.prefilled(copy.token_id, asked.prefill_reply)
    other.wait()
    pair.wait_until_idle()
    assert leases_of(pair, "late") == 0


def test_an_answer_of_one_token_leases_nothing_to_the_others(pair: Pair) -> None:
    asked = Asked(pair, "first", IDS, **{**SAMPLING, "max_tokens": 1})
    request = PrefillRequest(
        request_id="first",
        prompt_tokens=len(IDS),
        sampling=asked.sampling,
        cache_salt="",
        fetch_blocks=0,
        decode_inbox="",
        reply_inbox="",
        reserve_tokens=len(IDS) + 1,
        copies=["second"],
    )
    pair.prefill.submit(request, np.array(IDS, np.int32), asked)
    asked.wait()
    assert asked.prefill_reply is not None and len(asked.prefill_reply.copies) == 1
    pair.wait_until_idle()
    assert leases_of(pair, "second") == 0


def test_answers_under_a_grammar_each_follow_it(pair: Pair) -> None:
    schema = '{"enum": ["aa", "ab", "ba", "bb"]}'
    end_id = 2
    sampling = {**SAMPLING, "guide": schema, "end_ids": (end_id,), "max_tokens": 12}
    asked = Asked(pair, "first", IDS, **sampling)
    drawn = prefill(pair, asked, ["second", "third"])
    assert [copy.token_id for copy in drawn] == [
        pair.ask(IDS, **{**sampling, "seed": (SEED_MAX - 1 + index) % (SEED_MAX + 1)}).wait()[0]
        for index in (1, 2)
    ]


def test_the_seeds_of_answers_wrap_around() -> None:
    params = SamplingParams(max_tokens=1, seed=SEED_MAX)
    assert [params.of_answer(index).seed for index in range(3)] == [SEED_MAX, 0, 1]
    assert params.of_answer(0) is params
    assert replace(params.of_answer(2), seed=SEED_MAX) == params, "nothing else differs"
