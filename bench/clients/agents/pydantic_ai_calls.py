"""The calls of an agent of pydantic-ai: text, its default output type, tools, streams.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

pydantic_ai: Any = importlib.import_module("pydantic_ai")
capabilities: Any = importlib.import_module("pydantic_ai.capabilities")
models: Any = importlib.import_module("pydantic_ai.models.openai")
providers: Any = importlib.import_module("pydantic_ai.providers.openai")


def agent(server: CalledServer, **more: Any) -> Any:
    provider = providers.OpenAIProvider(base_url=server.url, api_key=server.key)
    model = more.pop("kind", models.OpenAIChatModel)(server.model, provider=provider)
    settings = {"max_tokens": 100, "seed": 5, "timeout": CALL_S_MAX}
    return pydantic_ai.Agent(model, model_settings=settings, **more)


def text(server: CalledServer) -> str:
    found = agent(server).run_sync(QUESTION)
    assert found.output
    return repr(found.output)


def output_type(server: CalledServer) -> str:
    """The default is a tool that the model must call."""
    found = agent(server, output_type=Weather).run_sync(QUESTION)
    assert isinstance(found.output, Weather)
    return repr(found.output)


def native_output(server: CalledServer) -> str:
    """As a JSON schema."""
    found = agent(server, output_type=pydantic_ai.NativeOutput(Weather)).run_sync(QUESTION)
    assert isinstance(found.output, Weather)
    return repr(found.output)


def output_type_streamed(server: CalledServer) -> str:
    async def streamed() -> Any:
        async with agent(server, output_type=Weather).run_stream(QUESTION) as stream:
            return await stream.get_output()

    found = asyncio.run(streamed())
    assert isinstance(found, Weather)
    return repr(found)


def tools(server: CalledServer) -> str:
    """The first turn must call the function; afterwards only the output tool is offered."""
    called: list[str] = []

    def forecast(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    async def once(context: Any, definition: Any) -> Any:
        return None if called else definition

    async def afterwards(context: Any, definitions: Any) -> Any:
        return definitions if called else []

    found = agent(
        server,
        output_type=Weather,
        tools=[pydantic_ai.Tool(forecast, prepare=once)],
        capabilities=[capabilities.PrepareOutputTools(afterwards)],
    ).run_sync(QUESTION)
    assert called and isinstance(found.output, Weather)
    return f"called with {called}, then {found.output!r}"


def responses(server: CalledServer) -> str:
    """With the model for Responses: a text, the default output type, and it streamed."""
    kind = models.OpenAIResponsesModel
    said = agent(server, kind=kind).run_sync(QUESTION).output
    found = agent(server, kind=kind, output_type=Weather).run_sync(QUESTION).output

    async def streamed() -> Any:
        async with agent(server, kind=kind, output_type=Weather).run_stream(QUESTION) as stream:
            return await stream.get_output()

    again = asyncio.run(streamed())
    assert said and isinstance(found, Weather) and isinstance(again, Weather)
    return f"{said!r}, {found!r}, streamed {again!r}"


CALLS = (text, output_type, native_output, output_type_streamed, tools, responses)

if __name__ == "__main__":
    run_calls(f"pydantic-ai {version('pydantic-ai-slim')}", CALLS, ())
