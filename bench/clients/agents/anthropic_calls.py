"""The calls of Anthropic's own package: a message, its stream, and a loop of tools.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, raised, run_calls

anthropic: Any = importlib.import_module("anthropic")
WEATHER = {"name": "weather", "input_schema": Weather.model_json_schema()}


def asked(server: CalledServer, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": QUESTION}]
    greedy = {"temperature": 0}  # version 2 has no parameter for it
    return {
        "model": server.model,
        "max_tokens": 60,
        "messages": turns,
        "extra_body": greedy,
        **more,
    }


def client(server: CalledServer) -> Any:
    url = server.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=server.key, max_retries=0, timeout=CALL_S_MAX)


def message(server: CalledServer) -> str:
    found = client(server).messages.create(**asked(server, system="Answer."))
    assert found.content[0].text and found.usage.output_tokens
    return f"{found.stop_reason}: {found.content[0].text!r}"


def message_streamed(server: CalledServer) -> str:
    whole = client(server).messages.create(**asked(server)).content[0].text
    with client(server).messages.stream(**asked(server)) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        final = stream.get_final_message()
    assert final.content[0].text == whole and final.usage.output_tokens
    return f"{whole!r}: {kinds}"


def tools(server: CalledServer) -> str:
    """A forced call, its result, and an answer; then the call streamed."""
    more = asked(server, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    first = client(server).messages.create(**more)
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and Weather.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = [block.model_dump() for block in first.content]
    turns = [
        *more["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
    ]
    last = client(server).messages.create(
        **more | {"messages": turns, "tool_choice": {"type": "none"}}
    )
    with client(server).messages.stream(**more) as stream:
        again = stream.get_final_message().content[0]
    assert last.content[0].text and again.input == call.input
    return f"{call.input}, then {last.content[0].text!r}"


def wrong_fields(server: CalledServer) -> str:
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    error: Any = raised(
        anthropic.BadRequestError,
        lambda: client(server).messages.create(**asked(server, messages=image)),
    )
    return f"BadRequestError: {error.message}"


CALLS = (message, message_streamed, tools, wrong_fields)

if __name__ == "__main__":
    run_calls(f"anthropic {version('anthropic')}", CALLS, ())
