"""Closes the objects of a JSON schema, as OpenAI's strict mode and vLLM do.

JSON Schema allows further properties unless `additionalProperties` is false. A small model that may
write further properties writes them until `max_tokens`. So an object with `properties` and without
`additionalProperties` is closed. These objects stay open, because a closed one could make the
schema unsatisfiable:

* An object inside, beside, or behind a reference from one of COMBINATIONS. Two closed branches of
  an `allOf`, for example, allow no common object.
* An object that requires a property which `properties` does not name.
* An object that requires more properties than `properties` names (`minProperties`).
* An object that is one of given values (`enum`, `const`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from backends.text.json_schema import ANNOTATIONS, DEFINITIONS, parts_of
from backends.text.schema_size import steps_of

CLOSED_BYTES_MAX = 64 * 1024  # a longer schema stays as it is, because the conductor refuses it
COMBINATIONS = {"allOf", "anyOf", "oneOf", "if", "then", "else", "not"}
INDEX = re.compile(r"0|[1-9][0-9]{0,5}")  # one spelling each, so no part is walked twice
Path = tuple[str, ...]


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema with its objects closed. The schema need not be valid."""
    try:
        return _with_closed_objects(schema)
    except (RecursionError, TypeError, ValueError):  # the conductor refuses such a schema by name
        return dict(schema)


def _with_closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    reached: set[tuple[Path, bool]] = set()
    waiting: list[tuple[Path, Any, bool]] = [((), schema, False)]
    while waiting:
        path, part, is_combined = waiting.pop()
        if not isinstance(part, dict) or (path, is_combined) in reached:
            continue
        reached.add((path, is_combined))
        is_combined = is_combined or _is_combination(part)
        if is_combined:
            reached.add((path, True))
        for below, each in _below(part):
            waiting.append(((*path, *below), each, is_combined))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            steps = tuple(steps_of(reference))
            waiting.append((steps, _at(schema, steps), is_combined))
    whole = {path for path, is_combined in reached if not is_combined}
    combined = {path for path, is_combined in reached if is_combined}
    return dict(_closed(schema, (), whole - combined))


def _is_combination(part: Mapping[str, Any]) -> bool:
    """Whether other schemas apply to the same object as the part's own keywords."""
    others = part.keys() - ANNOTATIONS - DEFINITIONS - {"$ref", "$schema"}
    return bool(part.keys() & COMBINATIONS) or ("$ref" in part and bool(others))


def _below(part: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Path and schema of each part directly below. Definitions are reached by references only."""
    for keyword, value in part.items():
        if keyword not in DEFINITIONS:
            for name, each in parts_of(keyword, value):
                yield (keyword, *([] if name is None else [str(name)])), each


def _at(schema: Any, steps: Path) -> Any:
    for step in steps:
        if isinstance(schema, list):
            if not INDEX.fullmatch(step) or int(step) >= len(schema):
                return None
            schema = schema[int(step)]
        elif isinstance(schema, dict) and step in schema:
            schema = schema[step]
        else:
            return None
    return schema


def _closed(value: Any, path: Path, closes: set[Path]) -> Any:
    """A copy of the value, in which the objects at the paths `closes` are closed."""
    if isinstance(value, list):
        return [_closed(each, (*path, str(index)), closes) for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    copy = {name: _closed(each, (*path, name), closes) for name, each in value.items()}
    if path in closes and _closes(value):
        copy["additionalProperties"] = False
    return copy


def _closes(part: Mapping[str, Any]) -> bool:
    names, required = part.get("properties"), part.get("required", [])
    if not isinstance(names, dict) or part.keys() & {"additionalProperties", "enum", "const"}:
        return False
    if part.get("minProperties", 0) > len(names) or not isinstance(required, list):
        return False
    return all(name in names for name in required)
