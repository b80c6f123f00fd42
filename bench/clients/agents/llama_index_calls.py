"""The calls of llama-index: chat, its stream, a required tool, an object of a class.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

llms: Any = importlib.import_module("llama_index.llms.openai_like")
tools: Any = importlib.import_module("llama_index.core.tools")
core: Any = importlib.import_module("llama_index.core.llms")


def model(server: CalledServer) -> Any:
    return llms.OpenAILike(
        model=server.model,
        api_base=server.url,
        api_key=server.key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8_192,
        max_tokens=60,
        max_retries=0,
        timeout=CALL_S_MAX,
    )


def chat(server: CalledServer) -> str:
    messages = [core.ChatMessage(role="user", content=QUESTION)]
    whole = model(server).chat(messages).message.content
    deltas = [each.delta for each in model(server).stream_chat(messages)]
    assert whole and any(deltas)
    return f"{whole!r}; streamed in {len(deltas)}"


def predict_and_call(server: CalledServer) -> str:
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    tool = tools.FunctionTool.from_defaults(weather)
    answer = model(server).chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    for each in model(server).get_tool_calls_from_response(answer):
        tool(**each.tool_kwargs)
    assert called
    return f"called with {called}"


def structured(server: CalledServer) -> str:
    messages = [core.ChatMessage(role="user", content=QUESTION)]
    found = model(server).as_structured_llm(Weather).chat(messages).raw
    assert isinstance(found, Weather)
    return repr(found)


CALLS = (chat, predict_and_call, structured)

if __name__ == "__main__":
    run_calls(f"llama-index {version('llama-index-core')}", CALLS, ())
