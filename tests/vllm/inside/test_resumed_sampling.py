"""Greedy answers with penalties, grammars or logprobs are those of our own definition, also if they
are cut and continued with the generated tokens as the end of the prompt."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling import draw
from backends.engine.sampling_params import SamplingParams
from backends.engine.vllm import messages as m
from backends.engine.vllm.process import token_logprobs
from backends.engine.vllm.sampling import vllm_sampling
from backends.tensors import AFTER_THINKING, GRAMMAR, JSON_SCHEMA, REGEX, STRUCTURAL_TAG
from backends.text.guides import Guides
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import token_logprobs as defined_logprobs
from tests.backends.engine.connected.connected import prompt_of
from tests.vllm.inside.conftest import DEMO, Engines
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled_to_end

PROMPT = prompt_of(50)
TOKENS, GUIDED_TOKENS = 40, 120
CUTS = (1, 2, 13, 14, 15, 39)  # around the border of a page of 32 tokens, too
EOS, OTHER_END = 0, 77
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 1.5, "presence_penalty": 2.0},
    "bias": {"presence_penalty": 2.0, "logit_bias": ((5, 9.0), (6, 9.0))},
}
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}, "b": {"enum": ["no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
})  # fmt: skip
TAG = json.dumps({
    "triggers": ["<|user|>"],
    "structures": [{"begin": "<|user|>", "schema": {"type": "null"}, "end": "."}],
})  # fmt: skip
THEN_SCHEMA = json.dumps({"begin": "<|user|>", "end": "e", "schema": json.loads(SCHEMA)})
GUIDES = {
    "schema": (SCHEMA, JSON_SCHEMA),
    "regex": ("[a-f]{4,20}-[0-9]{3}", REGEX),
    "choice": ('start: "first answer" | "second answer"', GRAMMAR),
    "tag": (TAG, STRUCTURAL_TAG),
    "thinking": (THEN_SCHEMA, AFTER_THINKING),
}


class Definition:
    """Our own sampling over the logits of transformers."""

    def __init__(self, engines: Engines) -> None:
        _, self._plain = engines.family("llama")
        self._guides = Guides(lambda: Tokenizer.load(DEMO), 2048)

    def answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        guide = None
        if params.guide:
            guide = self._guides.guide(params.guide, params.end_ids, [], params.guide_kind)
        output: list[int] = []
        while len(output) < params.max_tokens and not (set(output[-1:]) & set(params.end_ids)):
            logits = self._plain.logits([*prompt, *output])
            drawn = draw(logits, params, len(output), prompt, output, guide)
            output.append(drawn.token_id)
        return output


@pytest.fixture(scope="module")
def definition(engines: Engines) -> Definition:
    return Definition(engines)


def continued(
    engine: RealVllm, params: SamplingParams, given: list[int], name: str | None = None
) -> list[int]:
    """The tokens after the given ones, as a decode worker asks for them."""
    sampling = vllm_sampling(params, len(given), params.max_tokens - len(given), {"<|user|>": 1})
    request = engine.generate(1, [*PROMPT, *given], 0, sampling=sampling, name=name)
    assert request.finish_reason in ("stop", "length"), request
    return engine.output(request)


def check_cuts(engine: RealVllm, params: SamplingParams, whole: list[int]) -> None:
    assert continued(engine, params, []) == whole
    for cut in CUTS:
        if cut < len(whole):
            assert continued(engine, params, whole[:cut]) == whole[cut:], cut
    engine.check_clean()


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_count_the_tokens_that_the_answer_has(
    engine: RealVllm, definition: Definition, name: str
) -> None:
    params = SamplingParams(max_tokens=TOKENS, **PENALTIES[name])
    whole = definition.answer(PROMPT, params)
    check_cuts(engine, params, whole)
    assert whole != engine.expected(PROMPT, TOKENS), "the penalty has no effect"


def test_penalties_of_many_requests_at_once(engine: RealVllm, definition: Definition) -> None:
    asked = []
    for number, (name, cut) in enumerate((name, cut) for name in PENALTIES for cut in (2, 15)):
        params = SamplingParams(max_tokens=TOKENS - number, **PENALTIES[name])
        whole = definition.answer(PROMPT, params)
        sampling = vllm_sampling(params, cut, len(whole) - cut, {})
        request = engine.submit(number, [*PROMPT, *whole[:cut]], 0, sampling=sampling)
        asked.append((request, whole[cut:]))
        engine.executor.step()
    engine.executor.run_until_idle()
    for request, expected in asked:
        assert engine.output(request) == expected
    engine.check_clean()


@pytest.mark.parametrize("end_id", [EOS, OTHER_END])
@pytest.mark.parametrize("name", GUIDES)
def test_an_answer_follows_its_grammar_from_its_first_token(
    engine: RealVllm, definition: Definition, name: str, end_id: int
) -> None:
    text, kind = GUIDES[name]
    params = SamplingParams(
        max_tokens=GUIDED_TOKENS, guide=text, guide_kind=kind, end_ids=(end_id,)
    )
    whole = definition.answer(PROMPT, params)
    if name != "tag":
        assert whole[-1] == end_id and end_id not in whole[:-1]
    check_cuts(engine, params, whole)


def test_a_grammar_and_a_penalty_are_both_followed(
    engine: RealVllm, definition: Definition
) -> None:
    text, kind = GUIDES["regex"]
    params = SamplingParams(
        max_tokens=GUIDED_TOKENS, guide=text, guide_kind=kind, end_ids=(EOS,), **PENALTIES["all"]
    )
    check_cuts(engine, params, definition.answer(PROMPT, params))


def test_an_answer_whose_kv_is_loaded_follows_its_grammar(
    engine: RealVllm, definition: Definition
) -> None:
    text, kind = GUIDES["schema"]
    params = SamplingParams(
        max_tokens=GUIDED_TOKENS, guide=text, guide_kind=kind, end_ids=(EOS,), presence_penalty=1.0
    )
    whole = definition.answer(PROMPT, params)
    given = whole[:5]
    prompt = [*PROMPT, *given]
    store = filled_to_end(engine, prompt)
    pages = engine.stage_to_end("b", prompt, store, loaded_tokens=len(prompt))
    assert continued(engine, params, given, name="b") == whole[5:]
    assert engine.news("b")[0] == ("claimed", 0, len(prompt) - 1)
    engine.unstage("b", pages)
    engine.check_clean()


def test_a_preempted_answer_continues_with_the_same_tokens(
    engine: RealVllm, definition: Definition
) -> None:
    text, kind = GUIDES["regex"]
    for params in (
        SamplingParams(max_tokens=GUIDED_TOKENS, guide=text, guide_kind=kind, end_ids=(EOS,)),
        SamplingParams(max_tokens=TOKENS, **PENALTIES["all"]),
    ):
        whole = definition.answer(PROMPT, params)
        sampling = vllm_sampling(params, 2, params.max_tokens - 2, {})
        request = engine.submit(1, [*PROMPT, *whole[:2]], 0, sampling=sampling)
        while len(engine.output(request)) < 3:
            engine.executor.step()
        assert engine.executor.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.executor.run_until_idle()
        assert engine.output(request) == whole[2:]
    engine.check_clean()


def test_given_tokens_that_the_grammar_rejects_end_their_request_only(
    engine: RealVllm, definition: Definition
) -> None:
    text, kind = GUIDES["regex"]
    params = SamplingParams(max_tokens=GUIDED_TOKENS, guide=text, guide_kind=kind, end_ids=(EOS,))
    sampling = vllm_sampling(params, 3, 9, {})
    bad = engine.submit(1, [*PROMPT, 5, 6, 7], 0, sampling=sampling)
    good = engine.submit(2, PROMPT, TOKENS)
    engine.executor.run_until_idle()
    assert bad.finish_reason == "error"
    assert engine.output(good) == engine.expected(PROMPT, TOKENS)
    engine.check_clean()


def test_a_grammar_that_vllm_cannot_compile_ends_its_request_only(engine: RealVllm) -> None:
    sampling = {
        "max_tokens": 9,
        "temperature": 0.0,
        "structured_outputs": {"grammar": "start: <[4000]>"},  # outside the vocabulary
    }
    bad = engine.submit(1, PROMPT, 0, sampling=sampling)
    good = engine.submit(2, PROMPT, TOKENS)
    engine.executor.run_until_idle()
    assert bad.finish_reason == "error"
    assert engine.output(good) == engine.expected(PROMPT, TOKENS)
    engine.check_clean()


@pytest.mark.parametrize("top", [0, 5])
def test_logprobs_are_those_of_our_definition(
    engine: RealVllm, definition: Definition, top: int
) -> None:
    params = SamplingParams(max_tokens=9, top_logprobs=top, **PENALTIES["all"])
    whole = definition.answer(PROMPT, params)
    sampling = vllm_sampling(params, 3, 6, {})
    request = engine.generate(1, [*PROMPT, *whole[:3]], 0, sampling=sampling)
    assert engine.output(request) == whole[3:]
    found = token_logprobs(m.Generate(1, "", b"", sampling), request.news)
    for index, logprobs in enumerate(found, start=3):
        logits = definition._plain.logits([*PROMPT, *whole[:index]])
        wanted = defined_logprobs(logits, whole[index], top)
        assert logprobs.top_ids == wanted.top_ids
        np.testing.assert_allclose(logprobs.log_prob, wanted.log_prob, atol=1e-3)
        np.testing.assert_allclose(logprobs.top_log_probs, wanted.top_log_probs, atol=1e-3)
    assert len(found) == 6
