"""The calls of openai-agents with both of its models: tools, output type, handoffs.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

agents: Any = importlib.import_module("agents")
openai: Any = importlib.import_module("openai")
agents.set_tracing_disabled(True)  # otherwise it would send traces to OpenAI


def agent(server: CalledServer, name: str = "clerk", **more: Any) -> Any:
    client = openai.AsyncOpenAI(
        base_url=server.url, api_key=server.key, max_retries=0, timeout=CALL_S_MAX
    )
    kind = more.pop("kind", agents.OpenAIChatCompletionsModel)
    model = kind(model=server.model, openai_client=client)
    choice = more.pop("tool_choice", None)
    settings = agents.ModelSettings(
        max_tokens=100, tool_choice=choice, extra_body={"seed": 5}, include_usage=True
    )
    return agents.Agent(
        name=name, instructions="Answer.", model=model, model_settings=settings, **more
    )


def chat(server: CalledServer) -> str:
    found = agents.Runner.run_sync(agent(server), QUESTION)
    assert found.final_output
    return repr(found.final_output)


def chat_streamed(server: CalledServer) -> str:
    async def kinds() -> list[str]:
        stream = agents.Runner.run_streamed(agent(server), QUESTION)
        found = [event.type async for event in stream.stream_events()]
        assert stream.final_output
        return found

    events = asyncio.run(kinds())
    return f"{len(events)} events of {sorted(set(events))}"


def tools(server: CalledServer) -> str:
    """After the required call the package itself resets the choice to auto."""
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    wanted = agent(server, tools=[agents.function_tool(weather)], tool_choice="required")
    found = agents.Runner.run_sync(wanted, QUESTION)
    assert called and found.final_output
    return f"called with {called}, then {found.final_output!r}"


def output_type(server: CalledServer) -> str:
    found = agents.Runner.run_sync(agent(server, output_type=Weather), QUESTION)
    assert isinstance(found.final_output, Weather)
    return repr(found.final_output)


def handoffs(server: CalledServer) -> str:
    """A named call hands over to the second agent, which answers."""
    second = agent(server, "meteorologist", handoff_description="Knows the weather")
    first = agent(server, handoffs=[second], tool_choice="transfer_to_meteorologist")
    found = agents.Runner.run_sync(first, QUESTION)
    assert found.last_agent.name == "meteorologist" and found.final_output
    return f"{found.last_agent.name}: {found.final_output!r}"


def responses(server: CalledServer) -> str:
    """With the model for Responses: a required call, an object, and a handoff in a stream."""
    kind, called = agents.OpenAIResponsesModel, []

    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    wanted = agent(server, kind=kind, tools=[agents.function_tool(weather)], tool_choice="required")
    answer = agents.Runner.run_sync(wanted, QUESTION)
    assert called and answer.final_output
    found = agents.Runner.run_sync(agent(server, kind=kind, output_type=Weather), QUESTION)
    assert isinstance(found.final_output, Weather)
    second = agent(server, "meteorologist", kind=kind, handoff_description="Knows the weather")
    first = agent(server, kind=kind, handoffs=[second], tool_choice="transfer_to_meteorologist")

    async def handed_over() -> Any:
        stream = agents.Runner.run_streamed(first, QUESTION)
        async for _ in stream.stream_events():
            pass
        return stream

    handed = asyncio.run(handed_over())
    assert handed.last_agent.name == "meteorologist" and handed.final_output
    return f"called with {called}, {found.final_output!r}, {handed.final_output!r}"


CALLS = (chat, chat_streamed, tools, output_type, handoffs, responses)

if __name__ == "__main__":
    run_calls(f"openai-agents {version('openai-agents')}", CALLS, ())
