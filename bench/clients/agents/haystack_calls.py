"""The calls of haystack: a chat generator, its stream, a required tool, an object of a class.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
chats: Any = importlib.import_module("haystack.components.generators.chat")
dataclasses: Any = importlib.import_module("haystack.dataclasses")
tools: Any = importlib.import_module("haystack.tools")
utils: Any = importlib.import_module("haystack.utils")


def reply(server: CalledServer, **more: Any) -> Any:
    options = {"max_tokens": 100, "seed": 5} | more.pop("generation_kwargs", {})
    generator = chats.OpenAIChatGenerator(
        api_key=utils.Secret.from_token(server.key),
        model=server.model,
        api_base_url=server.url,
        timeout=CALL_S_MAX,
        max_retries=0,
        generation_kwargs=options,
        **more,
    )
    return generator.run([dataclasses.ChatMessage.from_user(QUESTION)])["replies"][0]


def chat(server: CalledServer) -> str:
    chunks: list[Any] = []
    whole = reply(server).text
    assert whole and reply(server, streaming_callback=chunks.append).text == whole
    return f"{whole!r}, streamed the same in {len(chunks)} chunks"


def a_required_tool(server: CalledServer) -> str:
    schema = Weather.model_json_schema()
    tool = tools.Tool("weather", "The weather of a city", schema, lambda **_: "sunny")
    found = reply(server, tools=[tool], generation_kwargs={"tool_choice": "required"})
    assert found.tool_calls and all(Weather(**each.arguments) for each in found.tool_calls)
    return repr([each.arguments for each in found.tool_calls])


def structured(server: CalledServer) -> str:
    text = reply(server, generation_kwargs={"response_format": Weather}).text
    return repr(Weather.model_validate_json(text))


CALLS = (chat, a_required_tool, structured)

if __name__ == "__main__":
    run_calls(f"haystack {version('haystack-ai')}", CALLS, ())
