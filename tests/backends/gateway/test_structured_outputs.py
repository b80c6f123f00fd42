"""The form of an answer: what the conductor gets for each field, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.errors import InvalidRequest
from backends.gateway.frontend_calls import refusal_of
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.tensors import GRAMMAR, JSON_SCHEMA, REGEX
from backends.text.tokenizer import Tokenizer
from tests.backends.gateway.test_fields import as_the_conductor_reads, chat, completion, refused
from tests.backends.small_tokenizers import DEMO

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f"}}
TOKENIZER = Tokenizer.load(DEMO)


@pytest.mark.parametrize(
    ("key", "value", "kind", "text"),
    [
        ("json", SCHEMA, JSON_SCHEMA, CLOSED),
        ("json", json.dumps(SCHEMA), JSON_SCHEMA, CLOSED),
        ("regex", "[0-9]+", REGEX, "[0-9]+"),
        ("choice", ["a.b", "c d"], REGEX, r"(a\.b|c d)"),
        ("grammar", 'start: "a"', GRAMMAR, 'start: "a"'),
        ("json_object", True, JSON_SCHEMA, {"type": "object"}),
    ],
)
def test_each_form_reaches_the_conductor(key: str, value: Any, kind: str, text: Any) -> None:
    asked = [{"structured_outputs": {key: value, "regex" if key == "json" else "json": None}}]
    asked += [{f"guided_{key}": value}] if key != "json_object" else []
    for fields in asked:
        for made in (chat(**fields), completion(**fields)):
            sampling = as_the_conductor_reads(made, TOKENIZER).sampling
            assert sampling.guide_kind == kind
            guide = json.loads(sampling.guide) if kind == JSON_SCHEMA else sampling.guide
            assert guide == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": {"a": 1}}, "guided_choice"),
        ({"guided_grammar": ["a"]}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "required"},
            "structured_outputs.regex",
        ),
    ],
)
def test_a_wrong_form_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(CHAT, **fields).param == param
    if "tools" not in fields:
        assert refused(COMPLETION, **fields).param == param


def test_a_form_beside_free_calls_leaves_the_calls_out() -> None:
    made = chat(guided_regex="a", tools=[TOOL])
    assert made.tools is None and chat(tools=[TOOL]).tools is not None
    assert chat(response_format={"type": "text"}, guided_regex="a") == chat(guided_regex="a")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        ({"guided_grammar": "start: a"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "x" * 16_385}, "guided_grammar", "16,385 bytes"),
        ({"structured_outputs": {"choice": ["é" * 40_000]}}, "structured_outputs.choice", "bytes"),
        ({"guided_json": "{"}, "guided_json", "it is not valid JSON"),
        ({"guided_json": {"not": {}}}, "guided_json", "not at #"),
        ({"guided_regex": "a", "min_tokens": 2}, "guided_regex", "leave out min_tokens"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "guided_choice", "needs an end token"),
    ],
)
def test_what_the_conductor_refuses_names_the_clients_field(
    fields: dict[str, Any], param: str, words: str
) -> None:
    asked = completion(**fields)
    with pytest.raises(InvalidRequest) as caught:
        as_the_conductor_reads(asked, TOKENIZER)
    refusal = refusal_of(caught.value.wire_message(), asked.names)
    assert refusal.param == param and words in refusal.message
    assert refusal.message.startswith(param)
