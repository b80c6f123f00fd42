"""The calls of langchain-openai and of an agent of langchain.

Run as a program in their environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

langchain_openai: Any = importlib.import_module("langchain_openai")
agents: Any = importlib.import_module("langchain.agents")
middlewares: Any = importlib.import_module("langchain.agents.middleware")


def model(server: CalledServer, **more: Any) -> Any:
    options = {"max_retries": 0, "timeout": CALL_S_MAX, "max_tokens": 100, "seed": 5} | more
    return langchain_openai.ChatOpenAI(
        base_url=server.url, api_key=server.key, model=server.model, **options
    )


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def invoke(server: CalledServer) -> str:
    answer = model(server).invoke(QUESTION)
    assert answer.content and answer.usage_metadata["total_tokens"]
    return repr(answer.content)


def stream(server: CalledServer) -> str:
    chunks = list(model(server, stream_usage=True).stream(QUESTION))
    assert "".join(each.content for each in chunks)
    assert any(each.usage_metadata for each in chunks)
    return f"{len(chunks)} chunks"


def bind_tools(server: CalledServer) -> str:
    """One whole, one streamed."""
    bound = model(server).bind_tools([Weather], tool_choice="Weather")
    [call] = bound.invoke(QUESTION).tool_calls
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    [streamed] = whole.tool_calls
    assert Weather(**call["args"]) and Weather(**streamed["args"])
    return f"{call['args']}, streamed: {streamed['args']}"


def structured(server: CalledServer, method: str, prompt: str = QUESTION) -> str:
    found = model(server, temperature=0).with_structured_output(Weather, method=method)
    answer = found.invoke(prompt)
    assert isinstance(answer, Weather)
    return repr(answer)


def structured_by_json_schema(server: CalledServer) -> str:
    return structured(server, "json_schema")


def structured_by_function_calling(server: CalledServer) -> str:
    return structured(server, "function_calling")


def structured_by_json_mode(server: CalledServer) -> str:
    """The server guarantees JSON only; the prompt has the object for a weak model to repeat."""
    return structured(server, "json_mode", 'Repeat exactly: {"city": "Rome", "days": 3}')


def create_agent(server: CalledServer) -> str:
    """The first call of the model must use the tool, the second may not."""

    def choice(request: Any, handler: Any) -> Any:
        called = any(each.type == "tool" for each in request.messages)
        return handler(request.override(tool_choice="none" if called else "required"))

    wrap = middlewares.wrap_model_call(choice)
    agent = agents.create_agent(model(server), tools=[weather], middleware=[wrap])
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    kinds = [each.type for each in messages]
    assert kinds[:2] == ["human", "ai"] and kinds[2] == "tool" and kinds[-1] == "ai", kinds
    return f"{kinds}: {messages[1].tool_calls[0]['args']}, {messages[-1].content!r}"


CALLS = (
    invoke,
    stream,
    bind_tools,
    structured_by_json_schema,
    structured_by_function_calling,
    structured_by_json_mode,
    create_agent,
)

if __name__ == "__main__":
    names = ("langchain-openai", "langchain")
    run_calls(", ".join(f"{name} {version(name)}" for name in names), CALLS, ())
