"""Tools and calls in the prompt of a model whose chat template does not mention tools.

The functions are described in the system message, and earlier calls and their results are written
as text, all in Hermes form. The description is the one of Qwen 2.5's template. Pure.

Not here: templates that mention tools (chat_template.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PREFACE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
RESULT = "<tool_response>"
Message = Mapping[str, Any]


def as_plain_messages(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The messages with roles and contents only. `content` stays a string or a list of parts."""
    found = _with_joined_results([_plain(message) for message in messages])
    if not tools:
        return found
    preface = PREFACE.format(functions="\n".join(map(_json, tools)))
    if found and found[0]["role"] == "system":
        first = found.pop(0)
        preface = f"{_text(first['content'])}\n\n{preface}".lstrip()
    return [{"role": "system", "content": preface}, *found]


def _with_joined_results(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user if one is a result, as in Qwen's template: many
    templates require that the roles alternate."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last["role"] == message["role"] == "user":
            texts = _text(last["content"]), _text(message["content"])
            if any(text.startswith(RESULT) for text in texts):
                found[-1] = {"role": "user", "content": "\n".join(texts)}
                continue
        found.append(message)
    return found


def _plain(message: Message) -> Message:
    role, content = message["role"], message.get("content")
    if role == "tool":
        result = f"{RESULT}\n{_text(content)}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = [_call(call) for call in message.get("tool_calls", ())]
    if calls:
        content = "\n".join([text for text in [_text(content)] if text] + calls)
    return {"role": role, "content": "" if content is None else content}


def _call(call: Message) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_json(written)}\n</tool_call>"


def _text(content: str | Sequence[Message] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
