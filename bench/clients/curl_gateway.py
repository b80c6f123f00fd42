"""`curl` requests to the gateway: each route, and a request for each status of a refusal.

Not here: running curl (curl.py).
"""

from __future__ import annotations

from typing import Any

from bench.clients.agreement import GATEWAY, ClientLoad, ClientReport
from bench.clients.call_matrix import LONG_ANSWER_TOKENS, CalledServer
from bench.clients.curl import PROMPT, CurlCall, timed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOO_LARGE_BYTES = 17 * 2**20


def chat(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8} | more


def calls(server: CalledServer) -> list[CurlCall]:
    """All calls; those about API keys only where keys are known."""
    key, seed = server.key, {"seed": 1}
    streamed = {"stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    foreign = chat(tenant="of-somebody-else")
    late = asked | {"max_tokens": LONG_ANSWER_TOKENS, "ignore_eos": True, "timeout": 0.2}
    found = [
        CurlCall("a chat", CHAT, chat(**seed), key=key),
        CurlCall("a chat, streamed", CHAT, chat(**seed, **streamed), key=key),
        CurlCall("a completion", COMPLETIONS, asked, key=key),
        CurlCall("a completion, streamed", COMPLETIONS, asked | streamed, key=key),
        CurlCall("what is served", "/v1/models", key=key),
        CurlCall("one model", f"/v1/models/{server.model}", key=key),
        CurlCall("tokens of a text", "/tokenize", {"prompt": PROMPT}, key=key),
        CurlCall("tokens of a chat", "/tokenize", {"messages": chat()["messages"]}, key=key),
        CurlCall("for load balancers, without a key", "/health"),
        CurlCall("would a request be served", "/ready"),
        CurlCall("for Prometheus", "/metrics", key=key),
        CurlCall("a wrong field", CHAT, chat(top_p=7), (400,), key),
        CurlCall("a field that nobody knows", CHAT, chat(max_tokns=7), (400,), key),
        CurlCall("what is not supported", CHAT, chat(n=0), (400,), key),
        CurlCall("a route that is not supported", "/v1/embeddings", {"input": "hi"}, (400,), key),
        CurlCall("no JSON", CHAT, None, (400,), key, ("-d", "{")),
        CurlCall("a path that is not there", "/v1/chat", None, (404,), key),
        CurlCall("a model that is not there", CHAT, chat(model="gpt-4"), (404,), key),
        CurlCall("the wrong method", CHAT, None, (405,), key),
        CurlCall("too large a body", CHAT, None, (413,), key, input="a" * TOO_LARGE_BYTES),
        CurlCall("a deadline", COMPLETIONS, late, (504,), key),
    ]
    if server.has_keys:
        found += [
            CurlCall("no key", "/v1/models", None, (401,)),
            CurlCall("a key that nobody has", "/v1/models", None, (401,), "mk-of-nobody"),
            CurlCall("another tenant", CHAT, foreign, (403,), key),
            CurlCall("one request a minute", CHAT, chat(), (200, 429), server.metered_key),
            CurlCall("and one more", CHAT, chat(), (429,), server.metered_key, ("-i",)),
        ]
    return found


def run(load: ClientLoad) -> ClientReport:
    """As curl.run, through the gateway, which sends nothing before the first token."""
    server = load.gateway
    assert server is not None, "no gateway was named"
    more = {"max_tokens": load.output_tokens, "ignore_eos": True, "stream": True}
    base = server.url.removesuffix("/v1")
    return timed(
        load, GATEWAY, base, lambda prompt: CurlCall("", CHAT, chat(prompt, **more), key=server.key)
    )
