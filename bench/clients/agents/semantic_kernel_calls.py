"""The calls of semantic-kernel: chat, its stream, a required function, an object of a class.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Annotated, Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

openai: Any = importlib.import_module("openai")
kernels: Any = importlib.import_module("semantic_kernel")
functions: Any = importlib.import_module("semantic_kernel.functions")
contents: Any = importlib.import_module("semantic_kernel.contents")
connectors: Any = importlib.import_module("semantic_kernel.connectors.ai")
services: Any = importlib.import_module("semantic_kernel.connectors.ai.open_ai")


def service(server: CalledServer) -> Any:
    below = openai.AsyncOpenAI(
        base_url=server.url, api_key=server.key, max_retries=0, timeout=CALL_S_MAX
    )
    return services.OpenAIChatCompletion(ai_model_id=server.model, async_client=below)


def asked(**more: Any) -> dict[str, Any]:
    history = contents.ChatHistory()
    history.add_user_message(QUESTION)
    settings = services.OpenAIChatPromptExecutionSettings(max_tokens=100, seed=5, **more)
    return {"chat_history": history, "settings": settings}


def chat(server: CalledServer) -> str:
    async def both() -> tuple[str, str]:
        stream = service(server).get_streaming_chat_message_content(**asked())
        streamed = "".join([str(each) async for each in stream])
        return str(await service(server).get_chat_message_content(**asked())), streamed

    whole, streamed = asyncio.run(both())
    assert whole and whole == streamed
    return f"{whole!r}, streamed the same"


def a_required_function(server: CalledServer) -> str:
    called: list[str] = []

    @functions.kernel_function(name="weather", description="The weather of a city")  # type: ignore[untyped-decorator]
    def weather(city: Annotated[str, "its name"]) -> str:
        called.append(city)
        return "sunny"

    kernel = kernels.Kernel()
    kernel.add_function("town", weather)
    required = connectors.FunctionChoiceBehavior.Required()
    given = asked(function_choice_behavior=required)
    found = asyncio.run(service(server).get_chat_message_content(**given, kernel=kernel))
    assert called
    return f"called with {called}, then {str(found)!r:.200}"


def structured(server: CalledServer) -> str:
    found = asyncio.run(service(server).get_chat_message_content(**asked(response_format=Weather)))
    return repr(Weather.model_validate_json(str(found)))


CALLS = (chat, a_required_function, structured)

if __name__ == "__main__":
    run_calls(f"semantic-kernel {version('semantic-kernel')}", CALLS, ())
