"""The two syntaxes of a call: an object of JSON, read character by character, and Python. Pure.

Not here: finding calls in an answer (parser.py).
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from typing import Any

ARGUMENTS = ("arguments", "parameters")  # keys of the arguments in an object
CONSTANTS = {"true": True, "false": False, "null": None}  # of JSON, in an expression of Python


class NotACall(Exception):
    """The held text is text of the answer."""


class JsonValue:
    """Finds the end of one JSON value. Brackets are counted, and their kinds are not compared."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_begun = self._is_scalar = False

    def takes(self, character: str) -> bool:
        """Whether the character is part of the value. After the first False, the value is over."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
            return True
        if self._is_begun and self._depth == 0:
            return self._is_scalar and character not in ",}] \t\r\n"
        self._is_begun = True
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        elif self._depth == 0:
            self._is_scalar = True
        return True

    @property
    def is_over(self) -> bool:
        """Whether no further character can be part of the value."""
        is_open = self._depth > 0 or self._in_string or self._is_scalar
        return self._is_begun and not is_open


class ObjectCall:
    """Reads {"name": ..., "arguments": ...}, character by character, with the keys in any order."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: str | None = None  # of a value that is over, or of one that is streamed
        self.is_over = False
        self.streams = False  # the value of the arguments is being read, after the name
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._text = ""  # of the key or value that is being read
        self._expects = "{"

    def take(self, character: str) -> str:
        """Text of the arguments that the character adds to a stream. Raises NotACall."""
        if self._value is not None:
            if self._value.takes(character):
                self._text += character
                added = character if self.streams else ""
                if self._value.is_over:
                    self._end_value()
                return added
            self._end_value()
        if character in " \t\r\n":
            return ""
        if self._expects == "value":
            return self._begin_value(character)
        if character not in self._expects:
            raise NotACall
        if character == "{":
            self._expects = '"}'
        elif character == '"':
            self._value, self._text = JsonValue(), '"'
            self._value.takes(character)
            self._expects = "key"
        elif character == ":":
            self._expects = "value"
        elif character == ",":
            self._expects = '"'
        else:
            self.is_over = True
            if not self.name:
                raise NotACall
        return ""

    def _begin_value(self, character: str) -> str:
        self._value, self._text = JsonValue(), character
        self._value.takes(character)
        # A string is read whole: some models write the arguments as a string that holds JSON.
        is_arguments = self._key in ARGUMENTS and self.arguments is None
        self.streams = is_arguments and bool(self.name) and character in "{["
        return character if self.streams else ""

    def _end_value(self) -> None:
        text, self._value = self._text, None
        if self._expects == "key":
            self._key, self._expects = _string(text), ":"
            return
        if self._key == "name":
            self.name = _string(text)
        elif self._key in ARGUMENTS and self.arguments is None:
            self.arguments = _unquoted(text)
        self.streams, self._expects = False, ",}"


def _string(text: str) -> str:
    try:
        found = json.loads(text)
        str(found).encode()  # not with a lone surrogate
    except ValueError:
        raise NotACall from None
    if not isinstance(found, str) or not found:
        raise NotACall
    return found


def _unquoted(text: str) -> str:
    """The arguments as JSON: without quotes if they are a string that holds a JSON object."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        inner = json.loads(text)
        inner.encode()
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


class PythonList:
    """Finds the end of a list of Python: its last bracket outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""  # of the string that is being read
        self._is_escaped = False

    def ends_with(self, character: str) -> bool:
        """Whether the list ends with this next character."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = character == "\\"
            if character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False


def python_calls(text: str) -> Sequence[tuple[str, dict[str, Any]]]:
    """The calls in a list of Python. Raises NotACall if it is invalid or has other items."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown escapes in strings
            tree = ast.parse(text, mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(item) for item in items] or _not_a_call()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None


def _python_call(item: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, ast.Call) or item.args:
        raise NotACall
    arguments = {}
    for word in item.keywords:
        if word.arg is None:  # **{...}
            raise NotACall
        arguments[word.arg] = _literal(word.value)
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    return ast.unparse(item.func), arguments


def _literal(node: ast.expr) -> Any:
    """The value of an expression that JSON has too."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else _not_a_call() for key in node.keys]
        return dict(zip(map(str, keys), map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise NotACall
    return value


def _not_a_call() -> Any:
    raise NotACall
