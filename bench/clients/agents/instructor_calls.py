"""The calls of instructor in its default mode, which is a named call.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls

instructor: Any = importlib.import_module("instructor")
openai: Any = importlib.import_module("openai")


def client(server: CalledServer, **more: Any) -> Any:
    options = {"max_retries": 0, "timeout": CALL_S_MAX}
    below = openai.OpenAI(base_url=server.url, api_key=server.key, **options)
    return instructor.from_openai(below, **more)


def asked(server: CalledServer) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": server.model, "messages": messages, "max_tokens": 100, "seed": 5}


def default_mode(server: CalledServer) -> str:
    found = client(server).chat.completions.create(
        **asked(server), response_model=Weather, max_retries=1
    )
    assert isinstance(found, Weather)
    return repr(found)


def partial_stream(server: CalledServer) -> str:
    """The object while it grows."""
    made = client(server).chat.completions.create_partial
    found = list(made(**asked(server), response_model=Weather, max_retries=1))
    assert found and Weather(**found[-1].model_dump())
    return f"{len(found)} objects, the last {found[-1]!r}"


def json_schema_mode(server: CalledServer) -> str:
    mode = instructor.Mode.JSON_SCHEMA
    found = client(server, mode=mode).chat.completions.create(
        **asked(server), response_model=Weather, max_retries=1
    )
    assert isinstance(found, Weather)
    return repr(found)


CALLS = (default_mode, partial_stream, json_schema_mode)

if __name__ == "__main__":
    run_calls(f"instructor {version('instructor')}", CALLS, ())
