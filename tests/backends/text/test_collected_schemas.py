"""Schemas as programs have them: of function calls, clusters, events, configuration files.

Those of `LIKE_REAL_ONES` are our own, one for each habit that collections of real ones have. A
collection itself is not part of this repository: where `JSONSCHEMABENCH` names the folder `data` of
a checkout of guidance-ai/jsonschemabench, all of it is tried too, and figures are printed.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling_params import GUIDE_BYTES_MAX
from backends.errors import InvalidRequest
from tests.backends.text.test_guides import (
    END_IDS,
    GUIDES,
    check_refusal,
    check_validates,
    drawn_at_random,
)

DRAFT_04 = "http://json-schema.org/draft-04/schema#"
DRAFT_07 = "http://json-schema.org/draft-07/schema#"
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,10}[a-z0-9])?$"}
LIKE_REAL_ONES: dict[str, dict[str, Any]] = {
    "function call": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where", "maxLength": 12},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
    },
    "function call with a list": {
        "type": "object",
        "properties": {
            "ingredients": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {"type": "string", "maxLength": 9},
            },
            "is_vegan": {"type": "boolean"},
            "budget": {"type": "number", "exclusiveMinimum": 0},
        },
        "required": ["ingredients", "budget"],
        "additionalProperties": False,
    },
    "cluster object": {
        "$schema": DRAFT_07,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata"],
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service"]},
            "metadata": {"$ref": "#/definitions/metadata"},
            "spec": {"type": ["object", "null"], "maxProperties": 0, "properties": {}},
            "ports": {
                "type": ["array", "null"],
                "maxItems": 2,
                "items": {"oneOf": [{"type": "integer"}, {"format": "uuid", "type": "string"}]},
            },
        },
        "definitions": {
            "metadata": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": NAME,
                    "labels": {
                        "type": "object",
                        "additionalProperties": False,
                        "patternProperties": {"^[a-z]{1,5}$": {"type": "string", "maxLength": 5}},
                    },
                },
            }
        },
        "x-kubernetes-group-version-kind": [{"kind": "Pod"}],
    },
    "event": {
        "$schema": DRAFT_04,
        "description": "Schema of an event",
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "date-time"},
            "position": {
                "type": "array",
                "items": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
                "additionalItems": False,
            },
            "share": {"type": "number", "minimum": 0, "maximum": 1, "exclusiveMaximum": True},
            "count": {"type": ["integer", "null"], "minimum": 0, "maximum": 32767},
        },
        "required": ["at", "position", "share", "count"],
        "additionalProperties": False,
    },
    "configuration with tagged cases": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.invalid/configuration",
        "type": "object",
        "minProperties": 1,
        "properties": {
            "source": {
                "oneOf": [
                    {
                        "type": "object",
                        "required": ["kind", "path"],
                        "additionalProperties": False,
                        "properties": {
                            "kind": {"const": "file"},
                            "path": {"type": "string", "maxLength": 9},
                        },
                    },
                    {
                        "type": "object",
                        "required": ["kind", "port"],
                        "additionalProperties": False,
                        "properties": {
                            "kind": {"const": "tcp"},
                            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                        },
                    },
                ]
            }
        },
        "required": ["source"],
        "additionalProperties": False,
    },
    "tree": {
        "$schema": DRAFT_07,
        "$ref": "#/definitions/node",
        "definitions": {
            "node": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string", "maxLength": 4},
                    "children": {
                        "type": "array",
                        "maxItems": 2,
                        "items": {"$ref": "#/definitions/node"},
                    },
                },
            }
        },
    },
    "composed": {
        "allOf": [{"$ref": "#/$defs/named"}, {"$ref": "#/$defs/dated"}],
        "$defs": {
            "named": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 5}},
            },
            "dated": {
                "type": "object",
                "required": ["date"],
                "properties": {"date": {"type": "string", "format": "date"}},
            },
        },
    },
    "any other keys": {
        "type": "object",
        "properties": {"version": {"type": "integer"}},
        "additionalProperties": {"anyOf": [{"type": "boolean"}, {"enum": [1, 2.5, "x", None]}]},
    },
    "names that need escapes": {
        "type": "object",
        "required": ['a"b', "c\\d", "größe", "$ref", ""],
        "properties": {name: {"type": "boolean"} for name in ('a"b', "c\\d", "größe", "$ref", "")},
        "additionalProperties": False,
    },
}
# What they have and no answer can be held to: (schema, keyword that is named).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "condition": ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, "if"),
    "unlike items": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "uniqueItems",
    ),
    "dependencies": ({"$schema": DRAFT_04, "dependencies": {"a": ["b"]}}, "dependencies"),
    "at least two keys": ({"type": "object", "minProperties": 2}, "minProperties"),
    "required as a flag": ({"properties": {"a": {"type": "string", "required": True}}}, "required"),
    "no such type": ({"type": "any"}, "type"),
    "reference to the web": ({"$ref": "http://json-schema.org/draft-04/schema#"}, "$ref"),
    "format of its own": ({"type": "string", "format": "color"}, "format"),
    "step of a cent": ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
    "negative look-ahead": ({"type": "string", "pattern": "^(?!x)"}, "pattern"),
    "key of an editor": ({"type": "string", "propertyOrder": 3}, "propertyOrder"),
}


@pytest.mark.parametrize("name", LIKE_REAL_ONES)
def test_answers_to_schemas_like_real_ones_validate(name: str) -> None:
    schema, ended = LIKE_REAL_ONES[name], 0
    for seed in range(6):
        answer = drawn_at_random(json.dumps(schema), np.random.default_rng(seed))
        if answer is not None:
            check_validates(answer, schema)
            ended += 1
    assert ended, "it proves nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_what_real_ones_have_and_no_answer_can_be_held_to_is_named(name: str) -> None:
    schema, keyword = REFUSED[name]
    with pytest.raises(InvalidRequest) as refusal:
        GUIDES.guide(json.dumps(schema), END_IDS, [])
    check_refusal(refusal.value, schema)
    assert keyword in str(refusal.value)


@pytest.mark.long
@pytest.mark.skipif("JSONSCHEMABENCH" not in os.environ, reason="JSONSCHEMABENCH names no folder")
def test_every_schema_of_a_collection_is_refused_by_name_or_its_answers_validate() -> None:
    counts, took_ms = Counter[str](), list[float]()

    def draw(seed: int) -> None:
        try:
            answer = drawn_at_random(text, np.random.default_rng(seed))
        except InvalidRequest as error:
            check_refusal(error, schema)
            counts["answers that end with a refusal"] += 1
            return
        if answer is not None:
            check_validates(answer, schema)
            counts["answers that validate"] += 1

    for path in sorted(Path(os.environ["JSONSCHEMABENCH"]).glob("*/*.json")):
        schema = json.loads(path.read_text())
        text = json.dumps(schema, separators=(",", ":"))
        if len(text) > GUIDE_BYTES_MAX:
            counts["larger than a request may have it"] += 1
            continue
        started_s = time.perf_counter()
        try:
            GUIDES.guide(text, END_IDS, [])
        except InvalidRequest as error:
            check_refusal(error, schema)
            counts["refused by name"] += 1
            continue
        took_ms.append(1e3 * (time.perf_counter() - started_s))
        counts["followed"] += 1
        for seed in range(2):
            draw(seed)
    p50, p99, most = np.percentile(took_ms, [50, 99, 100])
    print(f"{dict(counts)}; compiled in {p50:.1f} ms (p99 {p99:.1f}, at most {most:.1f})")
    assert counts["followed"]
