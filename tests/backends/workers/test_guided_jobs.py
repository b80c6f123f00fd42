"""Guided jobs of both workers: the tokens of the model held to a schema, whoever else is there, and
nobody waits for the schema of another."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.guides import Guides, guides_of
from backends.text.tokenizer import Tokenizer
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import WAIT_S, Pair, pairs

TOKENIZER = Tokenizer.load(DEMO)
END_IDS = TOKENIZER.eos_ids
PROMPT = [20 + 7 * index % 1900 for index in range(90)]
SLOW = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
NAMES = {"enum": ["größe", "日本", "🙂🙂", "naïve"]}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(DEMO, pages_max=16, block_tokens=64)


def expected(engine: TorchEngine, schema: str, **params: Any) -> list[int]:
    guide = guides_of(TOKENIZER).guide(schema, END_IDS, [])
    sampling = SamplingParams(**{"max_tokens": 100, "end_ids": END_IDS, **params})
    return generate(engine, [PROMPT], sampling, guides=[guide])[0]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_while_a_worker_compiles_a_schema_it_takes_and_serves_other_requests(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, engine: TorchEngine, role: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    guides: Guides = getattr(pair, role)._guides
    compiled = guides._compiled

    def slowly(kind: str, text: str, vocabulary: Any) -> Any:
        if text == SLOW:
            begun.set()
            assert may_end.wait(WAIT_S)
        return compiled(kind, text, vocabulary)

    monkeypatch.setattr(guides, "_compiled", slowly)
    before = pair.ask(PROMPT, max_tokens=300)
    try:
        held = pair.ask(PROMPT, max_tokens=100, end_ids=END_IDS, guide=SLOW)
        assert begun.wait(WAIT_S)
        names = json.dumps(NAMES)
        beside = pair.ask(PROMPT, max_tokens=100, end_ids=END_IDS, guide=names)
        assert beside.wait() == expected(engine, names)
        assert len(before.wait()) == 300
        assert held.error is None and held.decode_reply is None
    finally:
        may_end.set()
    assert held.wait() == expected(engine, SLOW)
    pair.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [NAMES, {"type": "object", "additionalProperties": False}, {"const": {"é": ["ß", None]}}],
    ids=["whole characters", "empty object", "constant"],
)
def test_short_answers_are_the_model_s_choice_among_what_validates(
    pair: Pair, engine: TorchEngine, schema: dict[str, Any]
) -> None:
    text = json.dumps(schema)
    for sampling in ({}, {"temperature": 2.0, "seed": 5}, {"temperature": 2.0, "seed": 6}):
        output = pair.ask(PROMPT, max_tokens=100, end_ids=END_IDS, guide=text, **sampling)
        assert output.wait() == expected(engine, text, **sampling)
        assert output.output_ids[-1] in END_IDS
        jsonschema.validate(json.loads(TOKENIZER.decode(output.output_ids[:-1])), schema)
    for count in (1, 2):
        cut = pair.ask(PROMPT, max_tokens=count, end_ids=END_IDS, guide=text)
        assert cut.wait() == expected(engine, text)[:count]
    pair.wait_until_idle()


def test_the_words_of_an_enum_come_in_tokens_that_are_no_whole_characters() -> None:
    """Otherwise the test above would not try them."""
    pieces = [TOKENIZER.decode([token_id]) for token_id in TOKENIZER.encode('"🙂日"')]
    assert "\N{REPLACEMENT CHARACTER}" in "".join(pieces)


def test_a_stop_word_ends_a_guided_answer_where_it_comes(pair: Pair, engine: TorchEngine) -> None:
    text = json.dumps({"enum": ["one two three four"]})
    asked: dict[str, Any] = {"max_tokens": 100, "end_ids": END_IDS, "guide": text}
    whole = expected(engine, text)
    stopped = pair.ask(PROMPT, stop_words=("three",), **asked)
    output = stopped.wait()
    assert output == whole[: len(output)] and len(output) < len(whole)
    assert stopped.decode_reply is not None
    assert stopped.decode_reply.finish_reason == "stop_word"
    pair.wait_until_idle()


def test_logprobs_of_a_guided_token_are_of_the_logits_before_the_grammar(pair: Pair) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "end_ids": END_IDS, "top_logprobs": 3}
    free, guided = pair.ask(PROMPT, **asked), pair.ask(PROMPT, guide="{}", **asked)
    assert free.wait() != guided.wait()
    assert free.prefill_reply is not None and guided.prefill_reply is not None
    [of_free], [of_guided] = free.prefill_reply.logprobs, guided.prefill_reply.logprobs
    assert of_guided.top_ids == of_free.top_ids
    assert of_guided.top_log_probs == pytest.approx(of_free.top_log_probs, abs=1e-5)
    assert of_guided.log_prob < of_free.log_prob == of_free.top_log_probs[0]
    pair.wait_until_idle()


def test_a_schema_that_the_worker_cannot_follow_is_the_request_s_fault_and_leaves_nothing(
    pair: Pair,
) -> None:
    wrong = pair.ask(PROMPT, end_ids=END_IDS, guide='{"type": "null", "const": 1}')
    assert "incompatible types" in str(wrong.wait_failed())
    pair.wait_until_idle()
