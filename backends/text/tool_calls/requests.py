"""Checks the functions of a request, and the calls in its messages. Pure.

Both the gateway and the conductor receive them, so each problem is returned as text, with the path
of its field first: (value, "") or (None, problem).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

FUNCTIONS_MAX = 1024
NAME = re.compile(r"[^\s\"\\{}<>\[\]|]{1,256}")  # characters that no format uses as marks
FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


def read_functions(name: str, value: object) -> tuple[list[dict[str, Any]] | None, str]:
    """The `tools` of a chat: {"type": "function", "function": {...}} each, without null values."""
    if not isinstance(value, list):
        return None, f"{name} is not a list of functions"
    if len(value) > FUNCTIONS_MAX:
        return None, f"{name} has {len(value)} functions; send at most {FUNCTIONS_MAX}"
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(value):
        place = f"{name}[{index}]"
        function, problem = _function(place, tool)
        if function is None:
            return None, problem
        if any(function["name"] == each["function"]["name"] for each in found):
            return None, f"{place}.function.name is {function['name']!r} for the second time"
        found.append({"type": "function", "function": function})
    return found, ""


def _function(name: str, tool: object) -> tuple[dict[str, Any] | None, str]:
    if not isinstance(tool, Mapping):
        return None, f"{name} is not an object with type and function"
    if tool.get("type", "function") != "function":
        return None, f"{name}.type is not supported by this server; send tools of type function"
    given = tool.get("function")
    if not isinstance(given, Mapping):
        return None, f"{name}.function is not an object with name and parameters"
    unknown = sorted(given.keys() - FUNCTION_KEYS, key=str)
    if unknown:
        return None, f"{name}.function.{unknown[0]!s:.64} is unknown; leave it out"
    function = {key: each for key, each in given.items() if each is not None}
    called = function.get("name")
    if not isinstance(called, str) or not NAME.fullmatch(called):
        return None, f"{name}.function.name must be 1 to 256 characters without space or brackets"
    if not isinstance(function.get("description", ""), str):
        return None, f"{name}.function.description is not a string"
    if not isinstance(function.get("strict", False), bool):
        return None, f"{name}.function.strict is not true or false"
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        return None, f"{name}.function.parameters is not a JSON schema of type object"
    return function, ""


def read_calls(name: str, value: object) -> tuple[list[dict[str, Any]] | None, str]:
    """The `tool_calls` of an earlier answer. Arguments that are a JSON object become that object,
    as chat templates expect them."""
    if not isinstance(value, list) or not value:
        return None, f"{name} is not a list of calls"
    found: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return None, f"{place} is not an object with id, type and function"
        if call.get("type", "function") != "function":
            return None, f"{place}.type is not supported by this server; send calls of functions"
        function = call["function"]
        if not isinstance(function.get("name"), str):
            return None, f"{place}.function.name is not a string"
        if not isinstance(call.get("id", ""), str):
            return None, f"{place}.id is not a string"
        arguments, problem = _arguments(f"{place}.function", function.get("arguments"))
        if problem:
            return None, problem
        called = {"name": function["name"], "arguments": arguments}
        found.append({"id": call.get("id", ""), "type": "function", "function": called})
    return found, ""


def _arguments(name: str, value: object) -> tuple[Any, str]:
    if value is None or value == "":
        return {}, ""
    if isinstance(value, Mapping):  # of the conductor's own clients
        return value, ""
    if not isinstance(value, str):
        return None, f"{name}.arguments is not a string"
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False).encode()  # not with a lone surrogate
    except (ValueError, RecursionError):
        return value, ""  # a call may be cut off at max_tokens
    return (parsed, "") if isinstance(parsed, dict) else (value, "")
