"""Reads a request to /v1/responses: it becomes the request of a chat. Pure.

OpenAI's defaults are those of a chat, and `store` is false. Built-in tools of OpenAI's servers are
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from backends.gateway.request.fields import (
    RESPONSES,
    SHARED,
    Reader,
    as_object,
    as_objects,
    as_text,
    bad_field,
    read,
    shown,
)
from backends.gateway.request.infer_request import GatewayRequest, read_as_chat
from backends.gateway.request.schemas import EFFORTS
from backends.gateway.responses.items import (
    ITEMS_MAX,
    REFERENCE,
    Item,
    messages_of,
    read_input,
    text_bytes,
    unsupported,
)
from backends.tensors import TEXT_BYTES_MAX

# Fields of a chat that a request to /v1/responses has too, with the same meaning.
SAME = (*SHARED, "parallel_tool_calls", "chat_template_kwargs")
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
CONTEXTS = ("auto", "current_turn", "all_turns")
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITY = "medium"
# Keys of a function that change no answer here.
TOOL_EXTRAS = ("defer_loading", "allowed_callers", "async", "output_schema")
METADATA_MAX = 16  # pairs, each of at most 64 and 512 characters, as in OpenAI's interface
# Names in the errors of a chat -> names of this route. The longer ones come first.
RENAMED = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    ".function.": ".",
}
# Tensors of the conductor -> fields of this route.
NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
    "tools": "tools", "top_logprobs": "top_logprobs", "chat_template_kwargs": "reasoning",
}  # fmt: skip


class EarlierItems(Protocol):
    """The items of stored responses. Its methods raise HttpRefusal."""

    def conversation(self, response_id: str) -> Sequence[Item]: ...

    def item(self, reference: str) -> Item: ...


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: GatewayRequest
    given: Mapping[str, Any]  # the checked fields, as the response repeats them
    items: Sequence[Item]  # of the whole conversation
    previous_id: str  # "": none
    is_stored: bool


def read_responses(content: object, default_seed: int, earlier: EarlierItems) -> ResponsesRequest:
    """Raises HttpRefusal."""
    given = read(RESPONSES, content, READERS)
    if "input" not in given:
        raise bad_field("input", "input is missing; send a text or a list of items")
    previous_id = given.get("previous_response_id", "")
    items = _conversation(given["input"], previous_id, earlier)
    body: dict[str, Any] = {name: given[name] for name in SAME if name in given}
    body["messages"] = messages_of(given.get("instructions", ""), items)
    if "max_output_tokens" in given:
        body["max_completion_tokens"] = given["max_output_tokens"]
    body |= {name: given[name] for name in ("tools", "tool_choice") if name in given}
    if effort := given.get("reasoning", {}).get("effort"):
        body["reasoning_effort"] = effort
    if "format" in given.get("text", {}):
        body["response_format"] = _chat_format(given["text"]["format"])
    if LOGPROBS in given.get("include", ()):
        body |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    elif given.get("top_logprobs"):
        raise bad_field("top_logprobs", f"top_logprobs requires include: [{LOGPROBS!r}]")
    chat = read_as_chat(body, default_seed, _renamed)
    chat = replace(chat, names={**NAMES, **chat.names})
    return ResponsesRequest(chat, given, items, previous_id, given.get("store", False))


def _conversation(given: Sequence[Item], previous_id: str, earlier: EarlierItems) -> list[Item]:
    """All items of the conversation. Raises HttpRefusal if they are too many or too long."""
    found = list(earlier.conversation(previous_id)) if previous_id else []
    size_bytes = sum(map(text_bytes, found))
    for each in given:
        found.append(earlier.item(each["id"]) if each["type"] == REFERENCE else each)
        size_bytes += text_bytes(found[-1])
        if len(found) > ITEMS_MAX or size_bytes > TEXT_BYTES_MAX:
            what = (
                f"the conversation has more than {ITEMS_MAX:,} items or {TEXT_BYTES_MAX:,} bytes "
                "of text; send less"
            )
            raise bad_field("input", what)
    return found


def _renamed(path: str) -> str:
    """The path of a chat's field with the names of this route."""
    for name, own in RENAMED.items():
        if name.startswith(".") or path.startswith(name):
            path = path.replace(name, own, 1)
    return path


def _read_tools(value: object) -> list[dict[str, Any]]:
    """The functions of `tools`, in the form of a chat."""
    found = []
    for name, given in as_objects("tools", value, "functions"):
        function = {key: value for key, value in given.items() if key not in TOOL_EXTRAS}
        if (kind := function.pop("type", None)) != "function":
            what = f"tools of type {shown(kind)} are not supported by this server; send functions"
            raise unsupported(name, what)
        found.append({"type": "function", "function": function})
    return found


def _read_choice(value: object) -> object:
    """`tool_choice`, in the form of a chat."""
    if not isinstance(value, dict):
        return value
    if (kind := value.get("type")) != "function":
        raise unsupported("tool_choice", f"type {shown(kind)} is not supported; send a function")
    return {"type": "function", "function": {"name": value.get("name")}}


def _read_text(value: object) -> Mapping[str, Any]:
    given = {key: each for key, each in as_object("text", value).items() if each is not None}
    for key in given:
        if key not in ("format", "verbosity"):
            raise bad_field(f"text.{key[:64]}", f"text has {shown(key)}; known: format, verbosity")
    if given.get("verbosity", VERBOSITY) != VERBOSITY:
        raise unsupported("text.verbosity", f"it is not supported; leave it out or {VERBOSITY}")
    if "format" in given:
        as_object("text.format", given["format"])
    return given


def _chat_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format` of a chat, where a schema is one level deeper."""
    rest = {key: each for key, each in given.items() if each is not None}
    if rest.get("type") != "json_schema":
        return rest
    del rest["type"]
    return {"type": "json_schema", "json_schema": rest}


def _read_reasoning(value: object) -> Mapping[str, Any]:
    given = {key: each for key, each in as_object("reasoning", value).items() if each is not None}
    known = {
        "effort": EFFORTS,
        "summary": SUMMARIES,
        "generate_summary": SUMMARIES,
        "context": CONTEXTS,
    }
    for key, each in given.items():
        if key not in known:
            what = f"reasoning has {shown(key)}; known: {', '.join(known)}"
            raise bad_field(f"reasoning.{key[:64]}", what)
        if each not in known[key]:
            what = f"reasoning.{key} is {shown(each)}; send {', '.join(known[key])}"
            raise bad_field(f"reasoning.{key}", what)
    return given


def _read_include(value: object) -> list[str]:
    if not isinstance(value, list):
        raise bad_field("include", f"include is {shown(value)}; send a list")
    for each in value:
        if each not in INCLUDED:
            raise bad_field("include", f"include has {shown(each)}; known: {', '.join(INCLUDED)}")
    return value


def _read_metadata(value: object) -> Mapping[str, str]:
    given = as_object("metadata", value)
    if len(given) > METADATA_MAX:
        raise bad_field("metadata", f"metadata has {len(given)} pairs; send at most {METADATA_MAX}")
    for key, each in given.items():
        if len(key) > 64 or len(as_text(f"metadata.{key[:64]}", each)) > 512:
            what = "metadata has a key over 64 or a value over 512 characters; send shorter ones"
            raise bad_field("metadata", what)
    return given


READERS: Mapping[str, Reader] = {
    "input": read_input,
    "response_tools": _read_tools,
    "response_choice": _read_choice,
    "response_text": _read_text,
    "reasoning": _read_reasoning,
    "include": _read_include,
    "metadata": _read_metadata,
}
