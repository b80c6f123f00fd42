"""Forced calls and closed objects: every random answer of the grammar is a valid call."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import InvalidRequest
from backends.text.closed_schema import closed
from backends.text.json_schema import read_schema
from backends.text.tool_calls.formats import FORCED
from backends.text.tool_calls.schema import arguments_schema, calls_schema
from tests.backends.text.schemas import DEFS, NESTED, objects
from tests.backends.text.test_guides import (
    END_IDS,
    GUIDES,
    SLOW,
    check_refusal,
    check_validates,
    drawn_at_random,
)
from tests.backends.text.test_tool_calls import parsed

FUNCTION_NAMES = ("get_weather", "add", "files.read")  # of the parser in test_tool_calls
PARAMETERS = objects(NESTED).map(lambda schema: {**schema, "$defs": DEFS})
FUNCTIONS = st.lists(st.none() | PARAMETERS, min_size=1, max_size=3)


def check_calls(functions: list[dict[str, Any] | None], is_parallel: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    schema = calls_schema(list(zip(FUNCTION_NAMES, functions, strict=False)), is_parallel)
    text = json.dumps(schema)
    try:
        GUIDES.guide(text, END_IDS, [])
    except InvalidRequest as error:
        check_refusal(error, schema)
        return
    answer = drawn_at_random(text, rng)
    if answer is None:
        return
    cuts = sorted(set(rng.integers(0, len(answer), 5).tolist()))
    said, calls, _ = parsed(FORCED, answer)
    assert parsed(FORCED, answer, cuts)[:2] == (said, calls)
    assert said == "" and len(calls) == len(json.loads(answer))
    assert is_parallel or len(calls) == 1
    by_name = dict(zip(FUNCTION_NAMES, functions, strict=False))
    for name, arguments in calls:
        check_validates(arguments, by_name[name] or {"type": "object", "maxProperties": 0})


def check_arguments(parameters: dict[str, Any], seed: int) -> None:
    text = json.dumps(arguments_schema(parameters))
    try:
        answer = drawn_at_random(text, np.random.default_rng(seed))
    except InvalidRequest as error:
        check_refusal(error, parameters)
        return
    if answer is not None:
        check_validates(answer, parameters)


@given(FUNCTIONS, st.booleans(), st.integers(0, 2**32))
@settings(max_examples=40, suppress_health_check=SLOW)
def test_calls_that_are_forced_validate_against_their_functions(
    functions: list[dict[str, Any] | None], is_parallel: bool, seed: int
) -> None:
    check_calls(functions, is_parallel, seed)


@pytest.mark.long
@given(FUNCTIONS, st.booleans(), PARAMETERS, st.integers(0, 2**32))
@settings(max_examples=1_000, suppress_health_check=SLOW)
def test_calls_of_a_thousand_random_functions_validate(
    functions: list[dict[str, Any] | None], is_parallel: bool, parameters: dict[str, Any], seed: int
) -> None:
    check_calls(functions, is_parallel, seed)
    check_arguments(parameters, seed)


OPEN: dict[str, Any] = {"type": "object", "properties": {"x": {}}}
CLOSED = {**OPEN, "additionalProperties": False}
TARGET = {"$defs": {"T": OPEN}}
CLOSED_TARGET = {"$defs": {"T": CLOSED}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({"items": OPEN, "prefixItems": [OPEN]}, {"items": CLOSED, "prefixItems": [CLOSED]}),
        ({"properties": {"a": OPEN}}, {"properties": {"a": CLOSED}, "additionalProperties": False}),
        ({"$ref": "#/$defs/T", **TARGET}, {"$ref": "#/$defs/T", **CLOSED_TARGET}),
        ({"default": OPEN, "enum": [OPEN]}, {"default": OPEN, "enum": [OPEN]}),
        # Inside, beside, and behind a reference from a combination.
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
        ({"anyOf": [{"items": OPEN}]}, {"anyOf": [{"items": OPEN}]}),
        ({**OPEN, "oneOf": [{}]}, {**OPEN, "oneOf": [{}]}),
        ({"not": {"$ref": "#/$defs/T"}, **TARGET}, {"not": {"$ref": "#/$defs/T"}, **TARGET}),
        ({"if": OPEN, "then": OPEN}, {"if": OPEN, "then": OPEN}),
        # The properties beside a reference, and those behind it, hold for one object.
        ({**OPEN, "$ref": "#/$defs/T", **TARGET}, {**OPEN, "$ref": "#/$defs/T", **TARGET}),
        ({**OPEN, "required": ["y"]}, {**OPEN, "required": ["y"]}),
        ({**OPEN, "required": [["x"]]}, {**OPEN, "required": [["x"]]}),
        ({**OPEN, "enum": [{"y": 1}]}, {**OPEN, "enum": [{"y": 1}]}),
        ({**OPEN, "minProperties": 2}, {**OPEN, "minProperties": 2}),
        ({"anyOf": [{}], "$ref": "#/anyOf/00"}, {"anyOf": [{}], "$ref": "#/anyOf/00"}),
        (
            {"anyOf": [{}], "$ref": f"#/anyOf/{'1' * 5000}"},
            {"anyOf": [{}], "$ref": f"#/anyOf/{'1' * 5000}"},
        ),
        ({**OPEN, "$ref": "#/nowhere"}, {**OPEN, "$ref": "#/nowhere"}),
    ],
)
def test_an_object_is_closed_unless_that_could_exclude_every_answer(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert closed(schema) == expected


def test_a_target_that_a_combination_reaches_too_stays_open() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/T"}, "b": {"anyOf": [{"$ref": "#/$defs/T"}]}},
        **TARGET,
    }
    assert closed(schema) == {**schema, "additionalProperties": False}


def test_a_schema_that_refers_to_itself_is_closed_once() -> None:
    schema = {"properties": {"next": {"$ref": "#"}}}
    assert closed(schema) == {**schema, "additionalProperties": False}


def test_references_of_each_function_stay_within_its_schema() -> None:
    def function(of: str) -> dict[str, Any]:
        return {"properties": {"v": {"$ref": "#/$defs/V"}}, "$defs": {"V": {"type": of}}}

    functions = [("f", function("string")), ("g", function("integer"))]
    schema = calls_schema(functions, True)
    assert read_schema(json.dumps(schema))[1] == []
    check_validates('[{"name": "g", "parameters": {"v": 1}}]', schema)
    with pytest.raises(Exception, match="not valid under any"):
        check_validates('[{"name": "f", "parameters": {"v": 1}}]', schema)


def test_functions_of_several_drafts_are_forced_together() -> None:
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {
        "p": {"type": "array", "items": [{"type": "integer"}]}}}  # fmt: skip
    newer = {"properties": {"p": {"type": "array", "prefixItems": [{"type": "integer"}]}}}
    schema = calls_schema([("f", older), ("g", newer)], True)
    assert read_schema(json.dumps(schema))[1] == []
    with pytest.raises(ValueError, match=r"function h: .*minimun"):
        calls_schema([("h", {"minimun": 3})], True)


def test_a_function_whose_schema_is_a_reference_is_closed() -> None:
    schema = arguments_schema({"$ref": "#/$defs/T", **TARGET})
    assert schema == {"$ref": "#/$defs/T", **CLOSED_TARGET}


def test_a_schema_with_many_spellings_of_one_part_is_walked_once() -> None:
    part = {"properties": {f"p{number}": {} for number in range(500)}}
    references = [{"$ref": f"#/anyOf/{'0' * number}"} for number in range(2, 300)]
    schema = {"anyOf": [part], "prefixItems": references}
    assert closed(schema) == schema
