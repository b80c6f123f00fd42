"""Reads a request to /v1/messages, Anthropic's form: it becomes the request of a chat. Pure.

    block           part of a chat
    text            text of its message
    thinking        `reasoning_content` of the assistant's message
    tool_use        one of the `tool_calls` of the assistant's message
    tool_result     a message of role `tool` before the user's text

`cache_control` and signatures have no effect: cached blocks are found by their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from backends.gateway.request.fields import (
    MESSAGES,
    SHARED,
    Reader,
    as_flag,
    as_object,
    as_objects,
    as_text,
    bad_field,
    read,
    shown,
)
from backends.gateway.request.infer_request import GatewayRequest, read_as_chat
from backends.gateway.request.prompts import TokenizeRequest

SAME = (*SHARED, "chat_template_kwargs")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "disabled")
# Names in the errors of a chat -> names of this route.
RENAMED = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
# Keys of a tool that change no answer here.
TOOL_EXTRAS = (
    "cache_control", "defer_loading", "eager_input_streaming", "allowed_callers", "input_examples",
)  # fmt: skip
# Blocks that a message of the role may have.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
Block = Mapping[str, Any]


def as_tokenize(chat: GatewayRequest) -> TokenizeRequest:
    """The prompt of a chat as a request to /tokenize."""
    [prompt] = chat.prompts
    return TokenizeRequest(
        chat.model,
        "",
        msgspec.json.decode(prompt["messages"]),
        False,
        msgspec.json.decode(prompt.get("tools", b"[]")),
        msgspec.json.decode(prompt.get("chat_template_kwargs", b"{}")),
    )


def read_messages_request(
    content: object, default_seed: int, counts: bool = False
) -> GatewayRequest:
    """`counts`: the request is only to count tokens. Raises HttpRefusal."""
    given = read(MESSAGES, content, READERS)
    if counts:
        given.setdefault("max_tokens", 1)
    for name in ("max_tokens", "messages"):
        if name not in given:
            raise bad_field(name, f"{name} is missing; Anthropic's interface requires it")
    body: dict[str, Any] = {name: given[name] for name in SAME if name in given}
    body["max_completion_tokens"] = given["max_tokens"]
    system = given.get("system", "")
    body["messages"] = [{"role": "system", "content": system}] if system else []
    body["messages"] += given["messages"]
    if given.get("stop_sequences"):
        body["stop"] = given["stop_sequences"]
    if given.get("tools"):
        body["tools"] = given["tools"]
    body |= given.get("tool_choice", {})
    own = {"enable_thinking": given.get("thinking", False)}  # Anthropic's default
    body["chat_template_kwargs"] = own | dict(body.get("chat_template_kwargs", {}))
    body |= given.get("output_config", {})
    last = given["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:  # the answer continues it
        body["continue_final_message"] = True
    chat = read_as_chat(body, default_seed, _renamed)
    return replace(chat, names={**chat.names, "stop_words": "stop_sequences"})


def _renamed(path: str) -> str:
    """The path of a chat's field with the names of this route."""
    path = RENAMED.get(path, path)
    return path.replace(".function.parameters", ".input_schema").replace(".function.", ".")


def _read_turns(value: object) -> list[dict[str, Any]]:
    """The messages of a chat."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"messages is {shown(value)}; send at least one message")
    found: list[dict[str, Any]] = []
    for index, each in enumerate(value):
        name = f"messages[{index}]"
        given = as_object(name, each)
        if (role := given.get("role")) not in ("user", "assistant"):
            raise bad_field(f"{name}.role", f"{name}.role is {shown(role)}; use user or assistant")
        blocks = _blocks(f"{name}.content", given.get("content"), BLOCKS[role])
        found += _of_user(blocks) if role == "user" else [_of_assistant(blocks)]
    return found


def _blocks(name: str, value: object, kinds: Sequence[str] = ("text",)) -> list[Block]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a text or a list of blocks")
    return [_block(f"{name}[{index}]", each, kinds) for index, each in enumerate(value)]


def _block(name: str, value: object, kinds: Sequence[str]) -> Block:
    given = as_object(name, value)
    kind = given.get("type")
    if kind not in kinds:
        what = (
            f"{name} has type {shown(kind)}, which is not supported here; send {', '.join(kinds)}"
        )
        raise bad_field(f"{name}.type", what, code="unsupported")
    if kind in ("text", "thinking"):
        return {"type": kind, "text": as_text(f"{name}.{kind}", given.get(kind))}
    if kind == "redacted_thinking":
        return {"type": "thinking", "text": ""}
    if kind == "tool_use":
        called = as_object(f"{name}.input", given.get("input"))
        function = {
            "name": as_text(f"{name}.name", given.get("name")),
            "arguments": msgspec.json.encode(called).decode(),
        }
        call_id = as_text(f"{name}.id", given.get("id"))
        return {"type": kind, "call": {"id": call_id, "type": "function", "function": function}}
    blocks = _blocks(f"{name}.content", given.get("content") or "")
    call_id = as_text(f"{name}.tool_use_id", given.get("tool_use_id"))
    return {"type": kind, "call_id": call_id, "text": _text(blocks)}


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(each["text"] for each in blocks if each["type"] == "text")


def _of_user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    results = [each for each in blocks if each["type"] == "tool_result"]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": each["call_id"], "content": each["text"]}
        for each in results
    ]
    if (text := _text(blocks)) or not results:
        found.append({"role": "user", "content": text})
    return found


def _of_assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant"}
    text = _text(blocks)
    thinking = "".join(each["text"] for each in blocks if each["type"] == "thinking")
    calls = [each["call"] for each in blocks if each["type"] == "tool_use"]
    if text or not calls:
        found["content"] = text
    if thinking:
        found["reasoning_content"] = thinking
    if calls:
        found["tool_calls"] = calls
    return found


def _read_system(value: object) -> str:
    return _text(_blocks("system", value))


def _read_tools(value: object) -> list[dict[str, Any]]:
    """The functions of `tools`, in the form of a chat."""
    found = []
    for name, given in as_objects("tools", value, "tools"):
        if (kind := given.get("type")) not in (None, "custom"):
            what = f"{name}: tools of type {shown(kind)} are not supported by this server"
            raise bad_field(name, what, code="unsupported")
        function = {
            "parameters" if key == "input_schema" else key: each
            for key, each in given.items()
            if key not in ("type", *TOOL_EXTRAS) and each is not None
        }
        found.append({"type": "function", "function": function})
    return found


def _read_choice(value: object) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    given = as_object("tool_choice", value)
    kind, found = given.get("type"), dict[str, Any]()
    if kind == "tool":
        name = as_text("tool_choice.name", given.get("name"))
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        found["tool_choice"] = CHOICES[kind]
    else:
        what = f"tool_choice has type {shown(kind)}; send {', '.join(CHOICES)} or tool"
        raise bad_field("tool_choice.type", what)
    if (one := given.get("disable_parallel_tool_use")) is not None:
        found["parallel_tool_calls"] = not as_flag("tool_choice.disable_parallel_tool_use", one)
    return found


def _read_thinking(value: object) -> bool:
    """Whether the model thinks. The budget of tokens has no effect."""
    kind = as_object("thinking", value).get("type")
    if kind not in THINKING:
        what = f"thinking has type {shown(kind)}; send {', '.join(THINKING)}"
        raise bad_field("thinking.type", what)
    return kind != "disabled"


def _read_output_config(value: object) -> dict[str, Any]:
    """`reasoning_effort` and `response_format` of a chat."""
    given = {key: each for key, each in as_object("output_config", value).items() if each}
    found: dict[str, Any] = {}
    for key, each in given.items():
        if key == "effort":
            found["reasoning_effort"] = each
        elif key == "format":
            found |= _read_output_format(each)
        else:
            what = f"output_config has {shown(key)}; known: effort, format"
            raise bad_field(f"output_config.{key[:64]}", what)
    return found


def _read_output_format(value: object) -> dict[str, Any]:
    given = dict(as_object("output_config.format", value))
    if given.pop("type", None) != "json_schema":
        what = f"output_config.format is {shown(value)}; send type json_schema with a schema"
        raise bad_field("output_config.format", what)
    return {"response_format": {"type": "json_schema", "json_schema": given}}


READERS: Mapping[str, Reader] = {
    "output_config": _read_output_config,
    "turns": _read_turns,
    "system": _read_system,
    "anthropic_tools": _read_tools,
    "anthropic_choice": _read_choice,
    "thinking": _read_thinking,
}
