"""Reads the `prompt` of a completion and the `messages` of a chat. Pure.

Errors of this module name the path of a field, for example `messages[1].content[0].image_url`. The
conductor's errors name only the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.gateway.request.fields import as_flag, as_object, as_text, bad_field, shown
from backends.gateway.request.schemas import DETOKENIZE_SCHEMA, TOKENIZE_SCHEMA
from backends.statuses import HttpRefusal
from backends.tensors import TEXT_BYTES_MAX
from backends.text.chat_template import OWN_VARIABLES
from backends.text.tool_calls.requests import read_calls, read_functions

# OpenAI's newer role `developer` becomes `system`, because chat templates have only `system`.
ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Fields of a message that chat templates do not use: the speaker's `name`, and fields of answers
# that clients send back. LiteLLM for example sends `provider_specific_fields`.
IGNORED = ("name", "refusal", "annotations", "provider_specific_fields")
TOKEN_ID_MAX = 2**31 - 1
CHOICES_MAX = 128  # answers of one request, to all of its prompts
PROMPT_IDS_MAX = 2**20  # limit of token ids in a prompt; the model's own limit may be lower


def read_prompts(value: object) -> list[str | list[int]]:
    """The prompts of a completion: each a text or a list of token ids. Raises HttpRefusal."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return [_read_prompt("prompt", value)]
    if len(value) > CHOICES_MAX:
        what = f"prompt is a list of {len(value):,} prompts; send at most {CHOICES_MAX}"
        raise bad_field("prompt", what)
    return [_read_prompt(f"prompt[{index}]", each) for index, each in enumerate(value)]


def _read_prompt(name: str, value: object) -> str | list[int]:
    if isinstance(value, str):
        if not value:
            raise bad_field(name, f"{name} is empty; send at least one character")
        return value
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a string or a list of token ids")
    if not value:
        raise bad_field(name, f"{name} is empty; send at least one token")
    return _token_ids(name, value)


def _token_ids(name: str, value: list[Any]) -> list[int]:
    if len(value) > PROMPT_IDS_MAX:
        what = f"{name} has {len(value):,} token ids; send at most {PROMPT_IDS_MAX:,}"
        raise bad_field(name, what)
    if any(type(each) is float for each in value):  # the JSON library Gson writes 42 as 42.0
        value = [int(each) if type(each) is float and each.is_integer() else each for each in value]
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= TOKEN_ID_MAX:
            raise bad_field(name, f"{name}[{index}] is {shown(token_id)}; send token ids")
    return value


def read_messages(value: object) -> list[dict[str, Any]]:
    """The messages in the conductor's format: {"role", "content"} each, with `tool_calls` or
    `tool_call_id`. Raises HttpRefusal."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"messages is {shown(value)}; send at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A request to /tokenize. Either `prompt` or `messages` is given; the other is empty."""

    model: str  # "": any model
    prompt: str
    messages: Sequence[Mapping[str, Any]]
    adds_special: bool
    tools: Sequence[Mapping[str, Any]] = ()  # of a chat
    template_options: Mapping[str, Any] = field(default_factory=dict)


def read_tokenize(content: object) -> TokenizeRequest:
    body = _known_fields(content, TOKENIZE_SCHEMA)
    if ("prompt" in body) == ("messages" in body):
        raise bad_field("prompt", "send either prompt or messages")
    prompt = as_text("prompt", body.get("prompt", ""))
    messages = read_messages(body["messages"]) if "messages" in body else []
    name = "messages" if messages else "prompt"
    # The size of messages is the size of their JSON, which a chat request sends to the conductor.
    text = msgspec.json.encode(messages) if messages else prompt.encode("utf-8", "surrogatepass")
    if len(text) > TEXT_BYTES_MAX:
        what = f"{name} has {len(text):,} bytes of text; send at most {TEXT_BYTES_MAX:,}"
        raise bad_field(name, what)
    return TokenizeRequest(
        model=as_text("model", body.get("model", "")),
        prompt=prompt,
        messages=messages,
        adds_special=as_flag("add_special_tokens", body.get("add_special_tokens", not messages)),
        tools=read_tools(body.get("tools", [])),
        template_options=read_template_options(body),
    )


def read_detokenize(content: object) -> tuple[str, list[int]]:
    """(model, token ids) of a request to /detokenize. Raises HttpRefusal."""
    body = _known_fields(content, DETOKENIZE_SCHEMA)
    token_ids = body.get("tokens")
    if not isinstance(token_ids, list):
        raise bad_field("tokens", f"tokens is {shown(token_ids)}; send a list of token ids")
    return as_text("model", body.get("model", "")), _token_ids("tokens", token_ids)


def _known_fields(content: object, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, without null. Raises HttpRefusal for one that the schema has not."""
    body = {name: value for name, value in as_object("body", content).items() if value is not None}
    if unknown := sorted(body.keys() - schema["properties"].keys()):
        raise bad_field(unknown[0][:64], f"unknown field {shown(unknown[0])}")
    return body


def read_template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template that the request sets. Raises HttpRefusal."""
    found = dict(as_object("chat_template_kwargs", given.get("chat_template_kwargs", {})))
    for name in OWN_VARIABLES:
        if name in found:
            what = f"chat_template_kwargs has {name}, which the request itself has"
            raise bad_field("chat_template_kwargs", what)
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in given:
            found[name] = as_flag(name, given[name])
    if (effort := given.get("reasoning_effort")) is not None:
        found.setdefault("reasoning_effort", effort)
        if effort == "none":
            found.setdefault("enable_thinking", False)
    if found.get("continue_final_message") and given.get("add_generation_prompt"):
        what = "add_generation_prompt and continue_final_message exclude each other; send one"
        raise bad_field("continue_final_message", what)
    return found


def read_tools(value: object) -> list[dict[str, Any]]:
    """The `tools` of a chat in the conductor's format. Raises HttpRefusal."""
    found, problem = read_functions("tools", value)
    if found is None:
        place = problem.split(" ", 1)[0]
        raise bad_field(place[:64], problem)
    return found


def _message(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} is {shown(value)}; send an object with role and content")
    # Clients send earlier answers back with empty fields, which are removed here.
    rest = {key: each for key, each in value.items() if each is not None and each != []}
    role = rest.pop("role", None)
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{name}.role", f"{name}.role is {shown(role)}; use {', '.join(ROLES)}")
    content = rest.pop("content", None)
    found: dict[str, Any] = {"role": ROLES[role]}
    if role == "assistant" and "tool_calls" in rest:
        calls, problem = read_calls(f"{name}.tool_calls", rest.pop("tool_calls"))
        if calls is None:
            raise bad_field(f"{name}.tool_calls", problem)
        found["tool_calls"] = calls
    thinking = rest.pop("reasoning_content", None)
    if role == "assistant" and thinking is not None:
        found["reasoning_content"] = as_text(f"{name}.reasoning_content", thinking)
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if key in rest:
                found[key] = as_text(f"{name}.{key}", rest.pop(key))
    for key in rest:
        if key not in IGNORED:
            raise _unsupported(f"{name}.{key[:64]}")
    if content is not None:
        found["content"] = _content(f"{name}.content", content)
    elif role in ("assistant", "tool"):
        found["content"] = None if "tool_calls" in found else ""
    else:
        raise bad_field(f"{name}.content", f"{name} has no content; send a string")
    return found


def _content(name: str, value: object) -> str | list[dict[str, str]]:
    """The content of a message. A list of parts stays a list, which the chat template joins."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a string or a list of text parts")
    texts = [_part(f"{name}[{index}]", part) for index, part in enumerate(value)]
    return [{"type": "text", "text": text} for text in texts]


def _part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        if isinstance(kind, str) and kind:
            raise _unsupported(f"{name}.{kind[:64]}")
        raise bad_field(name, f"{name} is {shown(part)}; send a part of type text")
    if not isinstance(part.get("text"), str):
        raise bad_field(f"{name}.text", f"{name}.text is {shown(part.get('text'))}; send a string")
    return part["text"]


def _unsupported(name: str) -> HttpRefusal:
    return bad_field(name, f"{name} is not supported by this server", code="unsupported")
