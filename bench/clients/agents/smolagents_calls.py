"""The calls of smolagents: a model's chat, its stream, and the first step of a tool-calling agent.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

smolagents: Any = importlib.import_module("smolagents")


def model(server: CalledServer, **more: Any) -> Any:
    options = {"timeout": CALL_S_MAX, "max_retries": 0}
    return smolagents.OpenAIModel(
        server.model, server.url, server.key, client_kwargs=options, max_tokens=100, **more
    )


def chat(server: CalledServer) -> str:
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    whole = model(server).generate(messages).content
    deltas = [each.content for each in model(server).generate_stream(messages)]
    assert whole and any(deltas)
    return f"{whole!r}; streamed in {len(deltas)}"


def tool_calling_agent(server: CalledServer) -> str:
    """Every step is a required call. A weak model may call the tool until its steps are used up."""
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        called.append(city)
        return "sunny"

    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(weather)], model=model(server), max_steps=2, verbosity_level=0
    )
    result = agent.run(QUESTION, return_full_result=True)
    assert result.state in ("success", "max_steps_error")
    assert called or result.state == "success"
    return f"{result.state}, called with {called}, {result.output!r:.200}"


CALLS = (chat, tool_calling_agent)

if __name__ == "__main__":
    run_calls(f"smolagents {version('smolagents')}", CALLS, ())
