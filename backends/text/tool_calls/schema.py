"""The JSON schemas of calls: arguments of one function, a list of calls, a call of any function.

A named call's answer is the arguments alone. A required call's answer is a list:

    [{"name": "f", "parameters": {...}}, ...]

Each function's schema is checked, translated to the newest draft without its annotations, and
becomes a definition of the list's schema. Its references are rewritten. Pure. Not here: checking a
schema (json_schema.py), the list's parser (parser.py, FORCED).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from backends.text.closed_schema import closed
from backends.text.json_schema import constraints_of, parts_of, read_schema

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
    is_typed = parameters.keys() & {"type", "$ref"}
    return closed(parameters if is_typed else {"type": "object", **parameters})


def calls_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], is_parallel: bool
) -> dict[str, Any]:
    """The schema of a list of calls, in the newest draft of JSON Schema. `is_parallel`: the list
    may have several calls. Raises ValueError as `call_schema` does."""
    found = call_schema(functions, "parameters")
    definitions = found.pop("$defs")
    found = {"type": "array", "items": found, "minItems": 1}
    if not is_parallel:
        found["maxItems"] = 1
    return found | {"$defs": definitions}


def call_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], key: str
) -> dict[str, Any]:
    """The schema of a call of one of the functions. `functions`: (name, parameters) each. `key`:
    name of the arguments in a call. Raises ValueError with the problems of a function whose
    parameters no guide can follow."""
    calls, definitions = [], {}
    for number, (name, parameters) in enumerate(functions):
        schema, problems = read_schema(json.dumps(arguments_schema(parameters)))
        if problems:
            raise ValueError(f"function {name}: {'; '.join(problems)}")
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(constraints_of(schema), place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, key: {"$ref": place}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references changed as if it stood at `place`."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for keyword, value in schema.items():
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
