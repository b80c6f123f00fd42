"""The calls of autogen: a model client, its stream, a required tool, an assistant agent.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

models: Any = importlib.import_module("autogen_core.models")
functions: Any = importlib.import_module("autogen_core.tools")
openai: Any = importlib.import_module("autogen_ext.models.openai")
chat_agents: Any = importlib.import_module("autogen_agentchat.agents")
MESSAGES = [models.UserMessage(content=QUESTION, source="user")]


def client(server: CalledServer) -> Any:
    abilities = {"vision": False, "function_calling": True, "json_output": True}
    return openai.OpenAIChatCompletionClient(
        model=server.model,
        base_url=server.url,
        api_key=server.key,
        model_info={**abilities, "family": "unknown", "structured_output": True},
        max_tokens=100,
        seed=5,
        max_retries=0,
        timeout=CALL_S_MAX,
    )


def chat(server: CalledServer) -> str:
    async def both() -> tuple[Any, list[Any]]:
        stream = client(server).create_stream(MESSAGES)
        return await client(server).create(MESSAGES), [each async for each in stream]

    whole, parts = asyncio.run(both())
    assert whole.content and parts[-1].content == whole.content
    return f"{whole.content!r}, streamed the same in {len(parts)} parts"


def a_required_tool(server: CalledServer) -> str:
    async def weather(city: str) -> str:
        return f"sunny in {city}"

    tool = functions.FunctionTool(weather, description="The weather of a city")
    found = asyncio.run(client(server).create(MESSAGES, tools=[tool], tool_choice="required"))
    assert found.finish_reason == "function_calls" and found.content[0].name == "weather"
    return repr([each.arguments for each in found.content])


def structured(server: CalledServer) -> str:
    found = asyncio.run(client(server).create(MESSAGES, json_output=Weather))
    return repr(Weather.model_validate_json(found.content))


def assistant(server: CalledServer) -> str:
    agent = chat_agents.AssistantAgent("clerk", model_client=client(server))
    found = asyncio.run(agent.run(task=QUESTION)).messages[-1].content
    assert found
    return repr(found)


CALLS = (chat, a_required_tool, structured, assistant)

if __name__ == "__main__":
    run_calls(f"autogen {version('autogen-agentchat')}", CALLS, ())
