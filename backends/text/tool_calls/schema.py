"""The JSON schemas that force calls: of one named function, or of a list of calls.

A named call's answer is the arguments alone. A required call's answer is a list:

    [{"name": "f", "parameters": {...}}, ...]

Each function's schema becomes a definition of the list's schema. Its references are rewritten, and
its descriptions are left out, because they constrain nothing.
Pure. Not here: checking the schemas (json_schema.py), the list's parser (parser.py, FORCED).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.text.closed_schema import closed
from backends.text.json_schema import ANNOTATIONS, parts_of

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Objects are closed
    (closed_schema.py). None: the function has no arguments."""
    if not parameters:
        return dict(NO_ARGUMENTS)
    return closed({"type": "object", **parameters})


def calls_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], is_parallel: bool
) -> dict[str, Any]:
    """The schema of a list of calls. `functions`: (name, parameters) each, of the same draft of
    JSON Schema. `is_parallel`: the list may have several calls."""
    calls, definitions, draft = [], {}, {}
    for number, (name, parameters) in enumerate(functions):
        schema = arguments_schema(parameters)
        if "$schema" in schema:
            draft = {"$schema": schema.pop("$schema")}
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(schema, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    found: dict[str, Any] = {**draft, "type": "array", "items": items, "minItems": 1}
    if not is_parallel:
        found["maxItems"] = 1
    return found | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references changed as if it stood at `place`."""
    if not isinstance(schema, dict):
        return schema
    copy = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    for keyword, value in list(copy.items()):
        parts = [(name, _moved(part, place)) for name, part in parts_of(keyword, value)]
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            copy[keyword] = place + value[1:]
        elif isinstance(value, dict) and parts and parts[0][0] is not None:
            copy[keyword] = dict(parts)
        elif isinstance(value, list) and parts:
            copy[keyword] = [part for _, part in parts]
        elif parts:
            copy[keyword] = parts[0][1]
    return copy
