"""A request's sampling parameters as vLLM gets them, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.vllm.given_tokens import GIVEN
from backends.engine.vllm.guided import special_ids
from backends.engine.vllm.sampling import VLLM_SEED_MAX, vllm_sampling
from backends.errors import InvalidRequest
from backends.tensors import AFTER_THINKING, GRAMMAR, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, TAGS

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
TAG = json.dumps({
    "triggers": ["<call>"],
    "structures": [{"begin": "<call>", "schema": {"type": "object"}, "end": "</call>"}],
})  # fmt: skip
THEN_PATTERN = json.dumps({"begin": "", "end": "<call>", "pattern": "[a-c]+"})
GUIDES = {
    JSON_SCHEMA: SCHEMA,
    REGEX: "[a-c]+",
    GRAMMAR: 'root ::= "a"',
    STRUCTURAL_TAG: TAG,
    AFTER_THINKING: THEN_PATTERN,
}


def mapped(position: int = 0, tokens: int = 9, **changes: Any) -> dict[str, Any]:
    params = SamplingParams(max_tokens=99, end_ids=(3,), **changes)
    return vllm_sampling(params, position, tokens, {"<call>": 7})


def test_a_plain_greedy_request_has_nothing_further() -> None:
    plain = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [3], "temperature": 0.0}
    assert mapped() == plain
    assert mapped(position=5) == plain


def test_numbers_of_drawn_tokens_are_passed_on() -> None:
    found = mapped(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 1)
    wanted = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert found.items() >= wanted.items()
    assert 0 <= found["seed"] <= VLLM_SEED_MAX
    assert found["seed"] != mapped(1, temperature=0.7, seed=2**64 - 1)["seed"]


def test_min_tokens_counts_the_tokens_that_the_answer_has() -> None:
    assert mapped(min_tokens=6)["min_tokens"] == 6
    assert mapped(4, min_tokens=6)["min_tokens"] == 2
    assert "min_tokens" not in mapped(6, min_tokens=6)


def test_logit_bias_is_passed_on() -> None:
    assert mapped(logit_bias=((5, -1.5),))["logit_bias"] == {5: -1.5}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_of_generated_tokens_names_the_tokens_that_the_answer_has(name: str) -> None:
    assert mapped(**{name: 0.5})[name] == 0.5
    assert "extra_args" not in mapped(**{name: 0.5})
    assert mapped(4, **{name: 0.5})["extra_args"] == {GIVEN: 4}


def test_a_repetition_penalty_counts_prompts_by_itself() -> None:
    found = mapped(4, repetition_penalty=1.2)
    assert found["repetition_penalty"] == 1.2
    assert "extra_args" not in found


@pytest.mark.parametrize("kind", GUIDES)
def test_a_grammar_is_passed_on_with_the_number_of_tokens_to_follow(kind: str) -> None:
    found = mapped(4, guide=GUIDES[kind], guide_kind=kind)
    assert found["extra_args"] == {GIVEN: 4}
    ((name, text),) = found["structured_outputs"].items()
    if kind == JSON_SCHEMA:
        assert name == "json"
        assert json.loads(text).items() >= json.loads(SCHEMA).items()
        assert "whitespace_pattern" in json.loads(text)["x-guidance"]
    elif kind in TAGS:
        assert name == "grammar"
        assert "<[7]>" in text
    else:
        assert (name, text) == ("regex" if kind == REGEX else "grammar", GUIDES[kind])


@pytest.mark.parametrize(
    ("kind", "text"), [(JSON_SCHEMA, '{"$dynamicRef": "#"}'), (GRAMMAR, "start: %json {}")]
)
def test_a_grammar_that_cannot_be_checked_is_refused(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="guided"):
        mapped(guide=text, guide_kind=kind)


def test_logprobs_are_asked_for_each_token() -> None:
    assert mapped(top_logprobs=0)["logprobs"] == 0
    assert mapped(top_logprobs=20)["logprobs"] == 20


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"guide": "a+", "guide_kind": REGEX, "top_logprobs": 1}, "return_log_probs together with"),
    ],
)
def test_other_parameters_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        mapped(**changes)


def test_a_structural_tag_is_left_out_beside_logprobs() -> None:
    found = mapped(3, guide=TAG, guide_kind=STRUCTURAL_TAG, top_logprobs=2)
    assert found["logprobs"] == 2
    assert not {"structured_outputs", "extra_args"} & found.keys()


def test_added_tokens_are_special_and_end_tokens_are_not(tmp_path: Path) -> None:
    assert special_ids(tmp_path, (0,)) == {}
    added = [{"id": 0, "content": "<end>"}, {"id": 9, "content": "<call>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert special_ids(tmp_path, (0,)) == {"<call>": 9}
