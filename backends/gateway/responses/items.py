"""The items of a request to /v1/responses, and the chat messages that they become. Pure.

    item                          part of a chat
    message                       a message of its role; an assistant's goes on with its calls
    reasoning                     `reasoning_content` of the assistant's next message
    function_call                 one of the `tool_calls` of an assistant's message
    function_call_output          a message of role `tool`
    item_reference                as the item of a stored response with this id

Items that tools of OpenAI's own servers make are refused by name. Clients send earlier items of a
response back, so fields that have no effect on the prompt (`id`, `status`, `annotations`,
`encrypted_content`) are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.gateway.request.fields import as_object, as_text, bad_field, shown
from backends.statuses import HttpRefusal

ROLES = ("user", "assistant", "system", "developer")
FIRST = ("system", "developer")  # roles of messages that join the instructions
TEXT_PARTS = ("input_text", "output_text", "text")
KNOWN = "message, reasoning, function_call or function_call_output"
ITEMS_MAX = 10_000  # of one request, with those of the response that it continues
INDEX_DIGITS_MAX = 5  # of ITEMS_MAX
RESPONSE = "resp_"  # beginning of the id of a response
INPUT = "in"  # beginning of the id of an item of an input
REFERENCE = "item_reference"
Item = dict[str, Any]


def read_input(value: object) -> list[Item]:
    """The items of a request. A text is the message of a user. Raises HttpRefusal."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad_field("input", f"input is {shown(value)}; send a text or a list of items")
    if len(value) > ITEMS_MAX:
        raise bad_field("input", f"input has {len(value):,} items; send at most {ITEMS_MAX:,}")
    return [_item(f"input[{index}]", each) for index, each in enumerate(value)]


def _item(name: str, value: object) -> Item:
    given = dict(as_object(name, value))
    kind = given.get("type") or ("message" if "role" in given else None)
    if kind is None and given.keys() == {"id"}:
        kind = REFERENCE
    reader = _ITEMS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        what = f"{name} has type {shown(kind)}, which is not supported; send {KNOWN}"
        raise bad_field(f"{name}.type", what, code="unsupported")
    return {"type": kind, **reader(name, given)}


def _message(name: str, given: Mapping[str, Any]) -> Item:
    role = given.get("role")
    if role not in ROLES:
        what = f"{name}.role is {shown(role)}; use {', '.join(ROLES)}"
        raise bad_field(f"{name}.role", what)
    return {"role": role, "content": _texts(f"{name}.content", given.get("content"))}


def _call(name: str, given: Mapping[str, Any]) -> Item:
    return {
        key: as_text(f"{name}.{key}", given.get(key)) for key in ("call_id", "name", "arguments")
    }


def _output(name: str, given: Mapping[str, Any]) -> Item:
    return {
        "call_id": as_text(f"{name}.call_id", given.get("call_id")),
        "output": _texts(f"{name}.output", given.get("output")),
    }


def _reasoning(name: str, given: Mapping[str, Any]) -> Item:
    parts = given.get("content") or []
    if not isinstance(parts, list):
        raise bad_field(f"{name}.content", f"{name}.content is {shown(parts)}; send a list")
    texts = []
    for index, each in enumerate(parts):
        place = f"{name}.content[{index}]"
        texts.append(as_text(f"{place}.text", as_object(place, each).get("text")))
    return {"content": "".join(texts)}


def _reference(name: str, given: Mapping[str, Any]) -> Item:
    return {"id": as_text(f"{name}.id", given.get("id"))}


_ITEMS = {
    REFERENCE: _reference,
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _texts(name: str, value: object) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a text or a list of text parts")
    return "\n".join(_part(f"{name}[{index}]", each) for index, each in enumerate(value))


def _part(name: str, value: object) -> str:
    given = as_object(name, value)
    kind = given.get("type")
    if kind == "refusal":
        return as_text(f"{name}.refusal", given.get("refusal"))
    if kind not in TEXT_PARTS:
        what = f"{name} has type {shown(kind)}, which is not supported; send parts of input_text"
        raise bad_field(f"{name}.type", what, code="unsupported")
    return as_text(f"{name}.text", given.get("text"))


def text_bytes(item: Item) -> int:
    return sum(len(each.encode("utf-8", "surrogatepass")) for each in item.values())


def messages_of(instructions: str, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat that these items are. The instructions and the system messages at the beginning are
    one message, because many templates know only one. Raises HttpRefusal without a message."""
    begin = 0
    while begin < len(items) and items[begin].get("role") in FIRST:
        begin += 1
    first = [instructions, *(each["content"] for each in items[:begin])]
    system = "\n\n".join(each for each in first if each)
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for item in items[begin:]:
        _ADDERS[item["type"]](found, item)
    for message in found:
        if message["role"] == "assistant" and "content" not in message:
            message["content"] = None if "tool_calls" in message else ""
    if not found:
        raise bad_field("input", "input has no text; send at least one message")
    return found


def _add_message(found: list[dict[str, Any]], item: Item) -> None:
    if item["role"] != "assistant":
        found.append({"role": item["role"], "content": item["content"]})
        return
    _assistant(found, "content", "tool_calls")["content"] = item["content"]


def _add_reasoning(found: list[dict[str, Any]], item: Item) -> None:
    if item["content"]:
        message = _assistant(found, "content", "tool_calls", "reasoning_content")
        message["reasoning_content"] = item["content"]


def _add_call(found: list[dict[str, Any]], item: Item) -> None:
    function = {"name": item["name"], "arguments": item["arguments"] or "{}"}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _assistant(found).setdefault("tool_calls", []).append(call)


def _add_output(found: list[dict[str, Any]], item: Item) -> None:
    found.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})


_ADDERS = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _assistant(found: list[dict[str, Any]], *absent: str) -> dict[str, Any]:
    """The assistant's last message, if it ends the chat and lacks these fields; or a new one."""
    last = found[-1] if found else {"role": ""}
    if last["role"] != "assistant" or any(name in last for name in absent):
        last = {"role": "assistant"}
        found.append(last)
    return last


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item of a response's output; `response_of` finds the response."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE)}_{index}"


def response_of(reference: str) -> tuple[str, int]:
    """(response id, index) of the id of an item. The response id is "" if it is no such id."""
    _, _, rest = reference.partition("_")
    key, _, index = rest.rpartition("_")
    is_number = index.isascii() and index.isdecimal() and len(index) <= INDEX_DIGITS_MAX
    return (RESPONSE + key, int(index)) if key and is_number else ("", 0)


def listed(item: Item, item_id: str) -> Item:
    """An item of the input, as `GET /v1/responses/ID/input_items` lists it."""
    if item["type"] == "message":
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part: Item = {"type": kind, "text": item["content"]}
        if kind == "output_text":
            part["annotations"] = []
        return {**item, "content": [part], "id": item_id, "status": "completed"}
    if item["type"] == "reasoning":
        content = [{"type": "reasoning_text", "text": item["content"]}]
        return {"type": "reasoning", "summary": [], "content": content, "id": item_id}
    return {**item, "id": item_id, "status": "completed"}


def items_of_output(output: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The items of a response, as those of a later request."""
    return [_item(f"output[{index}]", each) for index, each in enumerate(output)]


def unsupported(name: str, what: str) -> HttpRefusal:
    return bad_field(name, f"{name}: {what}", code="unsupported")
