"""Calls through a LiteLLM proxy that has this server as its backend.

Run as a program in its environment (call_matrix.py), which starts the proxy and ends it.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.clients.agents.weather import QUESTION, Weather
from bench.clients.call_matrix import CALL_S_MAX, CalledServer, run_calls, text_of

openai: Any = importlib.import_module("openai")
READY_S_MAX, STOP_S_MAX = 120.0, 20.0
PROXY_KEY = "sk-of-the-proxy"  # no secret: only for a proxy on loopback
PARAMETERS: dict[str, Any] = Weather.model_json_schema()
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@contextmanager
def proxy(server: CalledServer) -> Iterator[CalledServer]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    below = {"model": f"openai/{server.model}", "api_base": server.url, "api_key": server.key}
    config = {"model_list": [{"model_name": server.model, "litellm_params": below}]}
    path = Path("proxy.yaml").resolve()
    path.write_text(json.dumps(config))
    program = str(Path(sys.executable).parent / "litellm")
    command = [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": PROXY_KEY}
    with Path("proxy.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables
        )
    try:
        wait_ready(f"127.0.0.1:{port}", process)
        yield replace(server, url=f"http://127.0.0.1:{port}/v1", key=PROXY_KEY)
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)


def wait_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + READY_S_MAX
    while process.poll() is None and time.monotonic() < give_up_s:
        connection = http.client.HTTPConnection(address, timeout=CALL_S_MAX)
        try:
            connection.request("GET", "/health/readiness")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    last_lines = Path("proxy.log").read_text(encoding="utf-8")[-800:]
    raise RuntimeError(f"the proxy is not ready: {last_lines}")


def created(server: CalledServer, **more: Any) -> Any:
    client = openai.OpenAI(
        base_url=server.url, api_key=server.key, max_retries=0, timeout=CALL_S_MAX
    )
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "seed": 5}
    return client.chat.completions.create(model=server.model, **asked | more)


def chat(server: CalledServer) -> str:
    with proxy(server) as at:
        whole = created(at).choices[0].message.content
        chunks = list(created(at, stream=True, stream_options={"include_usage": True}))
    assert whole and text_of(chunks) == whole
    assert chunks[-1].usage.completion_tokens
    return f"{whole!r}, streamed the same in {len(chunks)} chunks"


def tools(server: CalledServer) -> str:
    """A required call, its result and an answer; then a named call, streamed."""
    with proxy(server) as at:
        said = created(at, tools=[WEATHER], tool_choice="required").choices[0].message
        calls = [each.function.arguments for each in said.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": "sunny"}
            for each in said.tool_calls
        ]
        turns = [{"role": "user", "content": QUESTION}, said, *results]
        answer = created(at, tools=[WEATHER], messages=turns).choices[0]
        named = {"type": "function", "function": {"name": "weather"}}
        chunks = list(created(at, tools=[WEATHER], tool_choice=named, stream=True))
    deltas = [
        call for each in chunks if each.choices for call in each.choices[0].delta.tool_calls or ()
    ]
    streamed = "".join(each.function.arguments or "" for each in deltas)
    assert [Weather.model_validate_json(each) for each in (*calls, streamed)]
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    return f"{calls}, then {answer.message.content!r}; streamed: {streamed}"


def responses(server: CalledServer) -> str:
    with proxy(server) as at:
        client = openai.OpenAI(base_url=at.url, api_key=at.key, max_retries=0, timeout=CALL_S_MAX)
        more: dict[str, Any] = {"model": at.model, "input": QUESTION, "max_output_tokens": 40}
        whole = client.responses.create(**more, temperature=0).output_text
        events = list(client.responses.create(**more, temperature=0, stream=True))
        deltas = [each for each in events if each.type == "response.output_text.delta"]
        streamed = "".join(each.delta for each in deltas)
    assert whole and streamed == whole
    return f"{whole!r}, streamed the same"


def messages(server: CalledServer) -> str:
    """Anthropic's form, which the proxy translates."""
    body = {
        "model": server.model,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    with proxy(server) as at:
        address = at.url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(address, timeout=CALL_S_MAX)
        headers = {"x-api-key": at.key, "Content-Type": "application/json"}
        connection.request("POST", "/v1/messages", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
    text = answer["content"][0]["text"]
    assert text and answer["usage"]["output_tokens"]
    return repr(text)


CALLS = (chat, tools, responses, messages)

if __name__ == "__main__":
    run_calls(f"litellm proxy {version('litellm')}", CALLS, ())
