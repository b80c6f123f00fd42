"""Schemas that would keep the grammar's compiler busy, or end its process: refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from backends.errors import InvalidRequest
from backends.text.schema_size import (
    LEVELS_MAX,
    NODES_MAX,
    PATTERNS_TOGETHER_MAX,
    schema_nodes,
    size_problems,
)
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
        (
            {"type": "object", "properties": {"a": {"allOf": MANY[:9], "format": "uri"}}},
            f"pattern at #/properties/a: 10 {MEET}",
        ),
        ({"allOf": [{"properties": {"a": part}} for part in MANY]}, f"pattern at #: 38 {MEET}"),
        ({"allOf": [{"items": part} for part in MANY]}, f"pattern at #: 38 {MEET}"),
        (
            {"allOf": [{"anyOf": [{"type": "null"}, part]} for part in MANY]},
            f"pattern at #: 38 {MEET}",
        ),
        (
            {
                "allOf": [{"allOf": MANY[:5]}, {"$ref": "#/$defs/more"}],
                "$defs": {"more": {"allOf": MANY[5:10]}},
            },
            f"pattern at #: 10 {MEET}",
        ),
        (
            {
                "type": "object",
                "properties": names(3),
                "patternProperties": {f"^a{number}(b|c)*d$": {} for number in range(200)},
            },
            "patternProperties at #: one object may have 200 beside 3 properties",
        ),
        (
            {"allOf": [{"patternProperties": {f"^a{number}$": {}}} for number in range(101)]},
            "patternProperties at #: one object may have 101",
        ),
        ({"type": "object", "properties": names(1_001)}, "properties at #: one object may have"),
        (
            chain(LEVELS_MAX + 5),
            r"\$ref at #/\$defs/d\d+: parts and references are nested more than",
        ),
        (
            chain_behind_its_end(1_300),
            r"\$ref at #/\$defs/d\d+: parts and references are nested more",
        ),
        (chain(40, nested=55), r"\$ref at #/\$defs/d.*: parts and references are nested more than"),
    ],
)
def test_more_than_the_compiler_gets_through_is_refused_by_name(
    schema: dict[str, Any], words: str
) -> None:
    text = json.dumps(schema)
    assert len(text) <= 64 * 1024, "this one is refused for its bytes"
    with pytest.raises(InvalidRequest, match=words):
        GUIDES.guide(text, END_IDS, [])


def test_what_is_below_the_bounds_is_not_refused_for_its_size() -> None:
    tree: dict[str, Any] = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "a"},
                    "left": {"$ref": "#/$defs/tree"},
                    "right": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
            }
        }
    }
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


def combined(number: int, properties: int, parts: int, cases: int) -> dict[str, Any]:
    """Properties that are all of some parts, each any of some objects: the grammar has an object
    for each combination."""

    def case(part: int, index: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{part}_{index}": {"type": "integer"}}}

    defs = {
        f"d{part}": {"anyOf": [case(part, index) for index in range(cases)]}
        for part in range(parts)
    }
    every = [{"$ref": f"#/$defs/d{part}"} for part in range(parts)]
    names = {f"q{number}_{index}": {"allOf": every} for index in range(properties)}
    return {"type": "object", "$defs": defs, "properties": names}


def flat(number: int, properties: int) -> dict[str, Any]:
    names = {f"q{number}_{index}": {"type": "string"} for index in range(properties)}
    return {"type": "object", "properties": names}


def met(cases: int) -> dict[str, Any]:
    """The choices are one level down, in a property that all parts name."""
    part = {"properties": {"a": {"anyOf": [{"const": index} for index in range(cases)]}}}
    return {"allOf": [part, part, part]}


@pytest.mark.slow
def test_combinations_of_alternatives_are_counted_and_too_many_are_refused() -> None:
    assert schema_nodes(combined(0, 30, 3, 4)) >= 30 * 4**3 * 6, "an object with 3 names each"
    assert schema_nodes(met(10)) >= 10**3
    assert schema_nodes({"allOf": [met(4), met(4)]}) >= 4**6
    plain = {"anyOf": [{"properties": names(10)} for _ in range(50)]}
    assert schema_nodes(plain) <= 700, "alternatives that meet nothing are no combinations"
    both = {"items": {"anyOf": [{"properties": names(1)} for _ in range(20)]}}
    both["additionalProperties"] = {"type": "string"}
    assert schema_nodes({"allOf": [both] * 3}) >= 20**3, "items and properties are other values"
    loop = {"$defs": {"d": {"allOf": [{"$ref": "#/$defs/d"}, {"type": "integer"}]}}}
    assert schema_nodes({**loop, "$ref": "#/$defs/d"}) < 20
    shared = {
        "$defs": {"d": {"properties": names(100)}},
        "properties": {name: {"$ref": "#/$defs/d"} for name in names(100)},
    }
    assert schema_nodes(shared) <= 400, "a definition is compiled once"
    [problem] = size_problems(combined(0, 30, 3, 4))
    assert "parts, with all combinations" in problem and f"{NODES_MAX:,}" in problem
    assert size_problems(combined(0, 10**3, 10, 100)), "counted without being made"


def pairs_of(levels: int) -> dict[str, Any]:
    """Two chains of references that hold together; each level is reached over two properties."""
    targets: dict[str, Any] = {}
    for chain in ("one", "other"):
        for level in range(levels):
            below = {"$ref": f"#/$defs/{chain}{level + 1}"}
            targets[f"{chain}{level}"] = {"properties": {"a": below, "b": below}}
        targets[f"{chain}{levels}"] = {"type": "string"}
    return {"$defs": targets, "allOf": [{"$ref": "#/$defs/one0"}, {"$ref": "#/$defs/other0"}]}


def referring(number: int, properties: int, size: int) -> dict[str, Any]:
    """Each property is a reference twice, and the compiler copies the targets for each of them."""
    targets = {
        target: {"properties": {f"{target}{number}_{i}": {"type": "integer"} for i in range(size)}}
        for target in ("one", "other")
    }
    parts = [
        {"properties": {f"p{i}": {"$ref": f"#/$defs/{target}"} for i in range(properties)}}
        for target in targets
    ]
    return {"$defs": targets, "allOf": parts}


def test_merged_references_count_as_copies_of_their_targets() -> None:
    assert schema_nodes(referring(0, 60, 100)) > 60 * 2 * 100
    hidden = {"properties": {"a": {"enum": list(range(9))}}}
    one, other = pairs_of(16)["allOf"]
    either = {**pairs_of(16), "allOf": [{"anyOf": [hidden, one]}, other]}
    assert schema_nodes(either) > 2**16, "whichever alternative looks larger"


def test_a_count_ends_soon_where_pairs_of_references_double_with_each_level() -> None:
    before_s = time.process_time()
    assert size_problems(pairs_of(60))
    assert time.process_time() - before_s < 1.0


HELD = """
import json, sys
from backends.errors import InvalidRequest
from tests.backends.text.test_guides import END_IDS, GUIDES
from tests.backends.text.test_schema_size import combined, flat, referring

def own_bytes():  # without the pages of libraries, whose share depends on other processes
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

GUIDES.guide("{}", END_IDS, [])
before = own_bytes()
for number in range(64):
    schema = {made}
    try:
        GUIDES.guide(json.dumps(schema), END_IDS, [])
    except InvalidRequest as error:
        assert "combinations" in str(error)
print(own_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        pytest.param("combined(number, 30, 3, 4)", marks=pytest.mark.long),
        pytest.param("combined(number, 10, 3, 4)", marks=pytest.mark.long),
        "combined(number, 25, 2, 4)",
        pytest.param("flat(number, 300)", marks=pytest.mark.long),
        "flat(number, 450)",
        pytest.param("referring(number, 60, 100)", marks=pytest.mark.long),
        pytest.param("referring(number, 40, 100)", marks=pytest.mark.long),
    ],
)
def test_64_large_schemas_keep_at_most_200_megabytes_in_a_process(made: str) -> None:
    script = HELD.replace("{made}", made)
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 200e6
