"""The tools of a chat: which calls the answer may have, and how the gateway finds them. Pure.

    tool_choice   the model is guided to        the answer is
    none          nothing                       text
    auto          arguments of strict functions text and calls in the model's format
    required      a list of calls, as JSON      the list
    a function    the function's arguments      the arguments

The chat template gets the tools with each choice, so the prompts of a conversation have the same
beginning. Not here: the formats (text/tool_calls/formats.py).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.gateway.request.fields import bad_field, shown
from backends.gateway.request.structured_outputs import AnswerForm
from backends.tensors import STRUCTURAL_TAG
from backends.text.tool_calls.formats import (
    FORCED,
    FORMATS,
    ToolCallFormat,
    format_of,
    mentions_tools,
)
from backends.text.tool_calls.parser import CallParser, CallPart, CallReader, Part
from backends.text.tool_calls.schema import arguments_schema, call_schema, calls_schema

NONE, DEFAULT, REQUIRED, NAMED = "none", "auto", "required", "named"
CHOICES = (NONE, DEFAULT, REQUIRED)
ID_CHARACTERS = string.ascii_letters + string.digits
FORCED_BYTES_MAX = 256 * 1024  # of functions whose schema is made; the conductor limits the schema
BY_TEMPLATE = "auto"  # value of tool_call_parser: the chat template decides
Function = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The checked fields `tools`, `tool_choice` and `parallel_tool_calls` of one request."""

    functions: Sequence[Function]
    choice: str = DEFAULT  # one of CHOICES, or NAMED
    named: str = ""  # the function of NAMED
    is_parallel: bool = True
    earlier_calls: int = 0  # calls in the messages of the request

    def schema(self) -> str:
        """The JSON schema that the answer follows; "" if it follows none. Raises HttpRefusal for
        functions that are too long for a schema."""
        if self.choice not in (REQUIRED, NAMED):
            return ""
        functions = [(each["name"], each.get("parameters")) for each in self.functions]
        if self.choice == REQUIRED:
            schema = _checked(functions, lambda: calls_schema(functions, self.is_parallel))
        else:
            schema = _checked(functions, lambda: arguments_schema(dict(functions)[self.named]))
        return msgspec.json.encode(schema).decode()

    def strict_form(self, guided: ToolCallFormat | None) -> AnswerForm | None:
        """The form of an answer of choice `auto`, in which the arguments of strict functions follow
        their schemas. None if no function is strict. `guided`: the model's format, if a grammar can
        force it."""
        is_strict = any(each.get("strict") for each in self.functions)
        if self.choice != DEFAULT or not is_strict or guided is None or not guided.guided:
            return None
        functions = [
            (each["name"], each.get("parameters") if each.get("strict") else {"type": "object"})
            for each in self.functions
        ]
        begin, end = guided.guided
        schema = _checked(functions, lambda: call_schema(functions, "arguments"))
        tag = {
            "triggers": guided.openings,
            "structures": [{"begin": begin, "schema": schema, "end": end}],
        }
        return AnswerForm("tools", STRUCTURAL_TAG, msgspec.json.encode(tag).decode())

    def reader(self, written: ToolCallFormat | None) -> CallReader:
        """A reader for an answer that may have calls. `written`: the model's format. Raises
        HttpRefusal 400 if it is not known and the choice is `auto`."""
        assert self.choice != NONE, "such an answer is text"
        if self.choice == NAMED:
            return _OneCall(self.named, self._new_id(written, self.named, 0))
        if self.choice == DEFAULT and written is None:
            what = (
                "tools: this server does not know in which format the model writes calls; set "
                f"tool_call_parser of the conductor to one of {', '.join(sorted(FORMATS))}, or "
                "send tool_choice required, none or a function"
            )
            raise bad_field("tools", what, code="unsupported")
        read = written if self.choice == DEFAULT and written is not None else FORCED
        return CallParser(
            read,
            [each["name"] for each in self.functions],
            lambda name, index: self._new_id(written, name, index),
            None if self.is_parallel else 1,
        )

    def _new_id(self, written: ToolCallFormat | None, name: str, index: int) -> str:
        """An id that the model's chat template accepts in later requests."""
        written = written or FORCED
        if written.has_ids:
            return f"functions.{name}:{self.earlier_calls + index}"
        characters = (secrets.choice(ID_CHARACTERS) for _ in range(written.id_characters))
        return written.id_prefix + "".join(characters)


class _OneCall:
    """The reader of an answer that is the arguments of one call."""

    def __init__(self, name: str, call_id: str) -> None:
        self._name, self._id = name, call_id

    def push(self, text: str) -> Sequence[Part]:
        if not text:
            return []
        name, self._name = self._name, ""
        call_id, self._id = self._id, ""
        return [CallPart(0, name, call_id, text)]

    def finish(self) -> Sequence[Part]:
        return []


def _checked(functions: Sequence[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The schema that `make` returns. Raises HttpRefusal if no grammar can follow it."""
    size_bytes = len(msgspec.json.encode(functions))
    if size_bytes > FORCED_BYTES_MAX:
        what = (
            f"tools has {size_bytes:,} bytes; an answer can be forced to call functions of at most "
            f"{FORCED_BYTES_MAX:,} bytes. Send fewer functions, or tool_choice auto without strict"
        )
        raise bad_field("tools", what)
    try:
        return make()
    except ValueError as error:
        raise bad_field("tools", f"tools: {error}") from None


def tool_use(given: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a chat whose fields were read; None if it has none. Raises HttpRefusal."""
    functions = [each["function"] for each in given.get("tools", [])]
    choice, named = given.get("tool_choice", (DEFAULT, ""))
    if not functions:
        if choice in (REQUIRED, NAMED):
            raise bad_field("tool_choice", "tool_choice forces a call, but there are no tools")
        return None
    if choice == NAMED and named not in [each["name"] for each in functions]:
        what = f"tool_choice names {shown(named)}, which is not in tools"
        raise bad_field("tool_choice", what)
    return ToolUse(
        functions=functions,
        choice=choice,
        named=named,
        is_parallel=given.get("parallel_tool_calls", True),
        earlier_calls=sum(len(each.get("tool_calls", ())) for each in given["messages"]),
    )


def read_choice(value: object) -> tuple[str, str]:
    """(choice, name of the function for NAMED). Raises HttpRefusal."""
    if isinstance(value, str) and value in CHOICES:
        return value, ""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(name, str):
        what = (
            f"tool_choice is {shown(value)}; send {', '.join(CHOICES)} or "
            '{"type": "function", "function": {"name": NAME}}'
        )
        raise bad_field("tool_choice", what)
    return NAMED, name


def model_format(named: str, template: str) -> ToolCallFormat | None:
    """The format in which the model writes calls. `named`: parameter tool_call_parser. It has no
    effect on a template without tools, because the model then gets a description in Hermes form."""
    is_found = named == BY_TEMPLATE or not mentions_tools(template)
    return format_of(template) if is_found else FORMATS.get(named)
