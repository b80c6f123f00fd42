"""Schemas that would keep the grammar's compiler busy, or end its process: refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from backends.errors import InvalidRequest
from backends.text.schema_size import LEVELS_MAX, PATTERNS_TOGETHER_MAX, size_problems
from tests.backends.text.test_guides import END_IDS, GUIDES


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}"}


def chain(links: int, nested: int = 0) -> dict[str, Any]:
    """Each definition leads to the next one, from so many arrays down."""

    def link(number: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{number}"}
        for _ in range(nested):
            schema = {"items": schema}
        return schema

    defs = {f"d{number}": link(number + 1) for number in range(links)}
    return {"$defs": {**defs, f"d{links}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def names(count: int) -> dict[str, Any]:
    return {f"n{number}": {"type": "integer"} for number in range(count)}


def chain_behind_its_end(links: int, stride: int = 70) -> dict[str, Any]:
    """The links that are far down are named first, so none is many levels from one looked at."""
    schema = chain(links)
    defs = {name: {"items": link} for name, link in schema["$defs"].items()}
    named = range(links - stride, 0, -stride)
    first = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in named}
    return {"$ref": schema["$ref"], "properties": first, "$defs": defs}


MANY = [pattern(number) for number in range(38)]
MEET = "patterns and formats may hold for one string"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"allOf": MANY}, f"pattern at #: 38 {MEET}"),
        ({"type": "object", "properties": {"a": {"allOf": MANY[:9], "format": "uri"}}},
         f"pattern at #/properties/a: 10 {MEET}"),
        ({"allOf": [{"properties": {"a": part}} for part in MANY]}, f"pattern at #: 38 {MEET}"),
        ({"allOf": [{"items": part} for part in MANY]}, f"pattern at #: 38 {MEET}"),
        ({"allOf": [{"anyOf": [{"type": "null"}, part]} for part in MANY]},
         f"pattern at #: 38 {MEET}"),
        ({"allOf": [{"allOf": MANY[:5]}, {"$ref": "#/$defs/more"}],
          "$defs": {"more": {"allOf": MANY[5:10]}}}, f"pattern at #: 10 {MEET}"),
        ({"type": "object", "properties": names(3), "patternProperties":
          {f"^a{number}(b|c)*d$": {} for number in range(200)}},
         "patternProperties at #: 200 of them may stand beside 3 properties"),
        ({"allOf": [{"patternProperties": {f"^a{number}$": {}}} for number in range(101)]},
         "patternProperties at #: 101 of them"),
        ({"type": "object", "properties": names(1_001)}, "properties at #: one object may have"),
        (chain(LEVELS_MAX + 5), r"\$ref at #/\$defs/d\d+: parts and references lead more than"),
        (chain_behind_its_end(1_300), r"\$ref at #/\$defs/d\d+: parts and references lead more"),
        (chain(40, nested=55), r"\$ref at #/\$defs/d.*: parts and references lead more than"),
    ],
)  # fmt: skip
def test_more_than_the_compiler_gets_through_is_refused_by_name(
    schema: dict[str, Any], words: str
) -> None:
    text = json.dumps(schema)
    assert len(text) <= 64 * 1024, "this one is refused for its bytes"
    with pytest.raises(InvalidRequest, match=words):
        GUIDES.guide(text, END_IDS, [])


def test_what_is_below_the_bounds_is_not_refused_for_its_size() -> None:
    tree: dict[str, Any] = {"$defs": {"tree": {"type": "object", "properties": {
        "name": {"type": "string", "pattern": "a"}, "left": {"$ref": "#/$defs/tree"},
        "right": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}}}  # fmt: skip
    for schema in (
        {"allOf": MANY[:PATTERNS_TOGETHER_MAX]},
        {"anyOf": MANY},
        {"type": "object", "properties": {f"p{number}": part for number, part in enumerate(MANY)}},
        {"prefixItems": MANY},
        {**tree, "$ref": "#/$defs/tree"},
        {**tree, "allOf": [{"$ref": "#/$defs/tree"}] * 8},
        {"type": "object", "properties": names(1_000)},
        chain(LEVELS_MAX - 5),
    ):
        assert size_problems(schema) == []


def test_the_deepest_schemas_that_pass_do_not_end_the_process() -> None:
    for schema in (chain(LEVELS_MAX - 5), chain(3, nested=LEVELS_MAX // 4)):
        assert GUIDES.guide(json.dumps(schema), END_IDS, []).allowed().any()


def test_a_compiler_that_goes_deep_has_the_stack_for_it() -> None:
    """In a process of its own, as it would end there: what bounds the levels is left out."""
    script = """
import json, sys
from backends.text import json_schema
json_schema.size_problems = lambda schema: []
from backends.errors import InvalidRequest
from tests.backends.text.test_guides import END_IDS, GUIDES
from tests.backends.text.test_schema_size import chain_behind_its_end
try:
    GUIDES.guide(json.dumps(chain_behind_its_end(1_300)), END_IDS, [])
except InvalidRequest as error:
    print(error)
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), done.stderr[-500:]
