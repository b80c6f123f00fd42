"""What the answer is to be about: the `prompt` of a completion, the `messages` of a chat.

Checked here as far as the names of the fields go (`messages[1].content[0].image_url`), because the
conductor's words know its own tensors only. Pure. Not here: the chat template (backends/text),
limits of length (frontend/request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.gateway.fields import TOKENIZE_SCHEMA, as_object, bad_field, read_kind, shown
from backends.statuses import HttpRefusal
from backends.tensors import TEXT_BYTES_MAX

# Newer models of OpenAI call the system's messages the developer's; chat templates do not know it.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Chat templates have no place for them: who spoke, and what clients send back of an answer (LiteLLM
# the `provider_specific_fields`, others what a reasoning model thought).
IGNORED = ("name", "refusal", "annotations", "reasoning_content", "provider_specific_fields")
TOKEN_ID_MAX = 2**31 - 1
PROMPT_IDS_MAX = 2**20  # longer than the context of any model of today


def read_prompt(value: object) -> str | list[int]:
    """A text or token ids; HttpRefusal for anything else, several prompts among it."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise bad_field("prompt", "prompt is empty; send at least one character")
        return value
    if not isinstance(value, list):
        raise bad_field("prompt", f"prompt is {shown(value)}; send a string or a list of token ids")
    if not value:
        raise bad_field("prompt", "prompt is empty; send at least one token")
    if isinstance(value[0], str | list):
        raise bad_field(
            "prompt", f"prompt has {len(value)} prompts; a request may have 1", code="unsupported"
        )
    if len(value) > PROMPT_IDS_MAX:
        what = f"prompt has {len(value):,} token ids; send at most {PROMPT_IDS_MAX:,}"
        raise bad_field("prompt", what)
    if any(type(each) is float for each in value):  # Gson writes 42.0
        value = [int(each) if type(each) is float and each.is_integer() else each for each in value]
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= TOKEN_ID_MAX:
            raise bad_field("prompt", f"prompt[{index}] is {shown(token_id)}; send token ids")
    return value


def read_messages(value: object) -> list[dict[str, Any]]:
    """Roles and texts or parts of text, as the conductor takes them."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"messages is {shown(value)}; send at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text or messages; the other one is empty."""

    model: str  # "": whatever is served
    prompt: str
    messages: Sequence[Mapping[str, Any]]
    adds_special: bool


def read_tokenize(content: object) -> TokenizeRequest:
    said = {name: value for name, value in as_object("body", content).items() if value is not None}
    if unknown := sorted(said.keys() - TOKENIZE_SCHEMA["properties"].keys()):
        raise bad_field(unknown[0][:64], f"unknown field {shown(unknown[0])}")
    if ("prompt" in said) == ("messages" in said):
        raise bad_field("prompt", "send either prompt or messages")
    prompt = read_kind("text", "prompt", said.get("prompt", ""))
    messages = read_messages(said["messages"]) if "messages" in said else []
    name = "messages" if messages else "prompt"
    # Messages are counted as the JSON that a chat sends to the conductor.
    text = msgspec.json.encode(messages) if messages else prompt.encode("utf-8", "surrogatepass")
    if len(text) > TEXT_BYTES_MAX:
        what = f"{name} has {len(text):,} bytes of text; send at most {TEXT_BYTES_MAX:,}"
        raise bad_field(name, what)
    return TokenizeRequest(
        model=read_kind("text", "model", said.get("model", "")),
        prompt=prompt,
        messages=messages,
        adds_special=read_kind("flag", "add_special_tokens", said.get("add_special_tokens", True)),
    )


def _message(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} is {shown(value)}; send an object with role and content")
    # What a client sends back of an answer has fields that hold nothing.
    said = {key: each for key, each in value.items() if each is not None and each != []}
    role = said.pop("role", None)
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{name}.role", f"{name}.role is {shown(role)}; use {', '.join(ROLES)}")
    # An empty list of parts was taken for a field that holds nothing.
    content = said.pop("content", None)
    for key in said:
        if key not in IGNORED:
            raise _unsupported(f"{name}.{key[:64]}")
    if content is None:
        raise bad_field(f"{name}.content", f"{name} has no content; send a string")
    return {"role": ROLES[role], "content": _content(f"{name}.content", content)}


def _content(name: str, value: object) -> str | list[dict[str, str]]:
    """Parts stay parts: the chat template decides what becomes of them."""
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
