"""The calls of LiteLLM as a library: `completion`, `acompletion` and their exceptions.

Run as a program in LiteLLM's environment (call_matrix.py): the project's own has no LiteLLM.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.clients.call_matrix import (
    CALL_S_MAX,
    LONG_ANSWER_TOKENS,
    MESSAGES,
    PROMPT,
    RETRIES,
    BackOff,
    Call,
    CalledServer,
    raised,
    run_calls,
    text_of,
)

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it would fetch prices from GitHub
litellm: Any = importlib.import_module("litellm")
httpx: Any = importlib.import_module("httpx")
litellm.suppress_debug_info = True


def asked(server: CalledServer, **more: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.url,
        "api_key": server.key,
        "messages": MESSAGES,
        "max_tokens": 16,
        "seed": 5,
        "max_retries": 0,
        "timeout": CALL_S_MAX,
    } | more


def completion(server: CalledServer) -> str:
    answer = litellm.completion(**asked(server))
    text = answer.choices[0].message.content
    assert text and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return f"{text!r}, {answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens"


def completion_streamed(server: CalledServer) -> str:
    whole = litellm.completion(**asked(server))
    options = {"include_usage": True}
    chunks = list(litellm.completion(**asked(server, stream=True, stream_options=options)))
    assert text_of(chunks) == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    return f"{len(chunks)} chunks, {usage.prompt_tokens} + {usage.completion_tokens} tokens"


def asynchronous(server: CalledServer) -> str:
    async def streamed() -> str:
        stream = await litellm.acompletion(**asked(server, stream=True))
        return text_of([chunk async for chunk in stream])

    async def whole() -> str:
        answer = await litellm.acompletion(**asked(server))
        return str(answer.choices[0].message.content)

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*(way() for _ in range(4) for way in (whole, streamed))))

    texts = asyncio.run(all_of_them())
    assert texts[0] and len(set(texts)) == 1, "one seed, one answer"
    return f"{len(texts)} times {texts[0]!r}"


def text_completion(server: CalledServer) -> str:
    more = {key: value for key, value in asked(server).items() if key != "messages"}
    more |= {"model": f"text-completion-openai/{server.model}", "prompt": PROMPT}
    return repr(litellm.text_completion(**more).choices[0].text)


def a_second_turn(server: CalledServer) -> str:
    """A returned message has additional fields."""
    said = litellm.completion(**asked(server)).choices[0].message
    turns = [*MESSAGES, said, {"role": "user", "content": "Go on."}]
    as_objects = litellm.completion(**asked(server, messages=turns))
    turns[1] = said.model_dump()
    as_dictionaries = litellm.completion(**asked(server, messages=turns))
    texts = {each.choices[0].message.content for each in (as_objects, as_dictionaries)}
    assert len(texts) == 1
    return f"{sorted(said.model_dump())}: {texts.pop()!r}"


def a_schema(server: CalledServer) -> str:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["is_so"],
        "properties": {"is_so": {"type": "boolean"}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "so", "schema": schema}}
    answer = litellm.completion(**asked(server, max_tokens=60, response_format=wanted))
    assert answer.choices[0].finish_reason == "stop"
    return repr(answer.choices[0].message.content)


def fields_that_change_nothing(server: CalledServer) -> str:
    more = {
        "user": "somebody",
        "n": 1,
        "logit_bias": {},
        "parallel_tool_calls": False,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_p": 1,
        "stop": None,
        "service_tier": "auto",
        "store": True,
        "metadata": {"team": "a"},
    }
    plain, with_all = (litellm.completion(**asked(server, **each)) for each in ({}, more))
    assert plain.choices[0].message.content == with_all.choices[0].message.content
    return ", ".join(more)


def wrong_fields(server: CalledServer) -> str:
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"n": 0}, litellm.BadRequestError),
        ({"top_p": 7}, litellm.BadRequestError),
        ({"max_tokens": 10**6}, litellm.ContextWindowExceededError),
        ({"model": "openai/gpt-4"}, litellm.NotFoundError),
    ]
    said = []
    for more, kind in cases:
        error = raised(kind, lambda m=more: litellm.completion(**asked(server, **m)))
        said.append(f"{kind.__name__}: {error}")
    return "\n".join(said)


def a_deadline(server: CalledServer) -> str:
    """The client's own deadline, which the server notices only as a client that left; and the
    server's."""
    body = {"ignore_eos": True}
    own = asked(server, max_tokens=LONG_ANSWER_TOKENS, timeout=0.5, extra_body=body)
    late = raised(litellm.Timeout, lambda: litellm.completion(**own))
    of_server = asked(server, max_tokens=LONG_ANSWER_TOKENS, extra_body={**body, "timeout": 0.2})
    error: Any = raised(litellm.Timeout, lambda: litellm.completion(**of_server))
    return f"{type(late).__name__}: {late}\n{type(error).__name__} {error.status_code}: {error}"


def keys(server: CalledServer) -> str:
    wrong = asked(server, api_key="mk-of-nobody")
    foreign = asked(server, extra_body={"tenant": "of-somebody-else"})
    errors: list[Any] = [
        raised(litellm.AuthenticationError, lambda: litellm.completion(**wrong)),
        # LiteLLM has no exception for 403
        raised(litellm.APIError, lambda: litellm.completion(**foreign)),
    ]
    assert [each.status_code for each in errors] == [401, 403]
    return "\n".join(f"{type(each).__name__}: {each}" for each in errors)


@contextmanager
def one_in_flight(server: CalledServer) -> Iterator[Any]:
    """The one request that its tenant may have in flight."""
    stream = litellm.completion(
        **asked(
            server,
            api_key=server.single_key,
            max_tokens=LONG_ANSWER_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
            max_retries=RETRIES,
        )
    )
    next(iter(stream))
    try:
        yield stream
    finally:
        stream.completion_stream.close()


def a_rejection(server: CalledServer) -> str:
    with one_in_flight(server):
        more = asked(server, api_key=server.single_key)
        error: Any = raised(litellm.RateLimitError, lambda: litellm.completion(**more))
    assert error.status_code == 429
    return f"{type(error).__name__}: {error}"


def its_own_back_off(server: CalledServer) -> str:
    """`max_retries` is for the package `openai` below it, which obeys Retry-After."""
    # LiteLLM keeps a client for each key and number of retries: this number makes one with the
    # hooks.
    more = asked(server, api_key=server.single_key, max_retries=RETRIES + 1)
    with one_in_flight(server) as first:
        noted = BackOff(first.completion_stream)
        hooks: Any = {"request": [noted.sent], "response": [noted.answered]}
        litellm.client_session = httpx.Client(event_hooks=hooks)
        try:
            assert litellm.completion(**more).choices[0].message.content
        finally:
            litellm.client_session = None
    return noted.check()


CALLS: tuple[Call, ...] = (
    completion,
    completion_streamed,
    asynchronous,
    text_completion,
    a_second_turn,
    a_schema,
    fields_that_change_nothing,
    wrong_fields,
    a_deadline,
)
CALLS_WITH_KEYS: tuple[Call, ...] = (keys, a_rejection, its_own_back_off)

if __name__ == "__main__":
    run_calls(f"litellm {importlib.metadata.version('litellm')}", CALLS, CALLS_WITH_KEYS)
