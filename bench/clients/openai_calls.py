"""The calls of the package `openai`, the same in each of its versions.

Run as a program in an environment of that version (call_matrix.py); the end-to-end tests call the
functions with the version that they have. Each returns its result, as the documents show it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from pydantic import BaseModel

from bench.clients.agents.weather import Weather
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

# Fields of OpenAI's interface that change nothing here, and those with a neutral value.
HARMLESS: dict[str, Any] = {
    "user": "somebody",
    "metadata": {"team": "a"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "5f2a",
    "prompt_cache_key": "chat",
    "prompt_cache_retention": "24h",
    "parallel_tool_calls": False,
    "tools": [],
    "tool_choice": "auto",
    "n": 1,
    "logit_bias": {},
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_p": 1,
    "stop": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "reasoning_effort": None,
}


def synchronous(server: CalledServer, key: str = "", **more: Any) -> openai.OpenAI:
    options = {"max_retries": 0, "timeout": CALL_S_MAX} | more
    return openai.OpenAI(base_url=server.url, api_key=key or server.key, **options)


def asked(server: CalledServer, **more: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": MESSAGES, "max_tokens": 16, "seed": 5} | more


def endless(server: CalledServer, **more: Any) -> dict[str, Any]:
    """A stream that continues until the client closes it."""
    body = {"ignore_eos": True} | more
    return {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": LONG_ANSWER_TOKENS,
        "stream": True,
        "extra_body": body,
    }


def models(server: CalledServer) -> str:
    client = synchronous(server)
    names = [model.id for model in client.models.list()]
    assert names == [server.model]
    return f"{names}\n{client.models.retrieve(server.model)!r}"


def chat(server: CalledServer) -> str:
    answer = synchronous(server).chat.completions.create(**asked(server))
    assert answer.choices[0].message.content and answer.usage is not None
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return f"{answer.choices[0].message.content!r}\n{answer.usage!r}"


def chat_streamed(server: CalledServer) -> str:
    client = synchronous(server)
    whole = client.chat.completions.create(**asked(server))
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**asked(server), stream=True, stream_options=options)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == whole.choices[0].message.content, "the seed is the same"
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    return f"{len(chunks)} chunks: {[each.choices[0].delta.content for each in chunks[:4]]} ..."


class Verdict(BaseModel):
    is_true: bool


def an_answer_as_an_object(server: CalledServer) -> str:
    """`parse` sends the class as a JSON schema."""
    more = asked(server, max_tokens=60, response_format=Verdict)
    parsed = synchronous(server).chat.completions.parse(**more).choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    return repr(parsed)


def streamed_by_its_helper(server: CalledServer) -> str:
    """The helper assembles the answer and parses it as an object of the class."""
    kinds: list[str] = []
    more = asked(server, max_tokens=60, response_format=Verdict)
    with synchronous(server).chat.completions.stream(**more) as stream:
        for event in stream:
            kinds += [event.type] if event.type not in kinds else []
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert isinstance(message.parsed, Verdict)
    return f"{kinds}: {message.content!r}"


WEATHER: dict[str, Any] = openai.pydantic_function_tool(Weather, name="weather")  # type: ignore[assignment]


def checked_calls(calls: Any) -> list[Weather]:
    assert calls, "the answer has no call"
    assert all(call.type == "function" and call.function.name == "weather" for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [Weather.model_validate_json(call.function.arguments) for call in calls]


def a_loop_of_tools(server: CalledServer) -> str:
    """A forced call, its result, and an answer; then the call of a named function, streamed."""
    client = synchronous(server)
    more = asked(server, max_tokens=100, tools=[WEATHER], parallel_tool_calls=False)
    choice = client.chat.completions.create(**more, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [wanted] = checked_calls(choice.message.tool_calls)
    [call] = choice.message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turn = [*MESSAGES, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**more | {"messages": turn, "max_tokens": 8})
    assert answer.usage is not None and answer.choices[0].finish_reason in ("stop", "length")
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**more, tool_choice=named) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
    [again] = checked_calls(final.message.tool_calls)
    return f"{wanted!r}, then {answer.choices[0].message.content!r}; streamed: {again!r}"


def completion(server: CalledServer) -> str:
    client = synchronous(server)
    more: dict[str, Any] = {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = client.completions.create(**more)
    streamed = "".join(
        each.choices[0].text for each in client.completions.create(**more, stream=True)
    )
    text = answer.choices[0].text
    assert text and streamed == text
    word = text.split()[2]
    stopped = client.completions.create(**more, stop=[word]).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", text.partition(word)[0])
    return f"{text!r}, up to {word!r}: {stopped.text!r}"


def tokens_in_and_out(server: CalledServer) -> str:
    """A prompt of token ids; logprobs of the generated tokens."""
    choice = (
        synchronous(server)
        .completions.create(
            model=server.model,
            prompt=[5, 6, 7],
            max_tokens=3,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
    )
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.top_logprobs is not None
    assert len(found.tokens) == 3 and all(len(each) == 2 for each in found.top_logprobs)
    return f"{found.tokens}: {found.token_logprobs}"


def asynchronous(server: CalledServer) -> str:
    """Four whole answers and four streams at a time."""

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**asked(server), stream=True)
        return text_of([chunk async for chunk in stream])

    async def whole(client: openai.AsyncOpenAI) -> str:
        answer = await client.chat.completions.create(**asked(server))
        return answer.choices[0].message.content or ""

    async def all_of_them() -> list[str]:
        options: dict[str, Any] = {"max_retries": 0, "timeout": CALL_S_MAX}
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, **options) as client:
            ways = [call(client) for _ in range(4) for call in (whole, streamed)]
            return list(await asyncio.gather(*ways))

    texts = asyncio.run(all_of_them())
    assert texts[0] and len(set(texts)) == 1, "one seed, one answer"
    return f"{len(texts)} times {texts[0]!r}"


def a_second_turn(server: CalledServer) -> str:
    """The message of an answer goes back as the package returned it."""
    client = synchronous(server)
    said = client.chat.completions.create(**asked(server)).choices[0].message
    turns = [*MESSAGES, said, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
    usage = client.chat.completions.create(**asked(server, messages=turns)).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return f"{usage.prompt_tokens} tokens, cached {usage.prompt_tokens_details.cached_tokens}"


def fields_that_change_nothing(server: CalledServer) -> str:
    client = synchronous(server)
    plain = client.chat.completions.create(**asked(server))
    with_all = client.chat.completions.create(**asked(server), extra_body=HARMLESS)
    assert with_all.choices[0].message.content == plain.choices[0].message.content
    return ", ".join(f"{name}={value!r}" for name, value in HARMLESS.items())


def request_id_and_headers(server: CalledServer) -> str:
    given = {"X-Request-Id": "of-a-client"}
    raw = synchronous(server).chat.completions.with_raw_response.create(
        **asked(server), extra_headers=given
    )
    answer: Any = raw.parse()
    assert raw.headers["x-request-id"] == answer._request_id == "of-a-client"
    assert raw.retries_taken == 0
    return f"{answer._request_id}, {raw.headers['content-type']}"


def wrong_fields(server: CalledServer) -> str:
    client = synchronous(server)
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias"),
        ({"top_p": 7}, openai.BadRequestError, "top_p"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "messages"),
        ({"temperature": 2.5}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"max_tokns": 5}}, openai.BadRequestError, "max_tokns"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            openai.BadRequestError,
            "messages[0].content[0].image_url",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            },
            openai.BadRequestError,
            "response_format",
        ),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ]
    said = []
    for more, kind, param in cases:
        error: Any = raised(
            kind, lambda m=more: client.chat.completions.create(**asked(server, **m))
        )
        assert error.param == param and error.code and error.type, more
        said.append(f"{kind.__name__}: {error.body['message']}")
    return "\n".join(said)


def a_response(server: CalledServer) -> str:
    """Whole, and streamed by the package's helper."""
    client = synchronous(server)
    more: dict[str, Any] = {"model": server.model, "input": PROMPT, "max_output_tokens": 16}
    whole = client.responses.create(**more, temperature=0)
    assert whole.output_text and whole.usage is not None
    with client.responses.stream(**more, temperature=0) as stream:
        events = list(stream)
    streamed = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    last: Any = events[-1]  # get_final_response knows no incomplete response
    assert streamed == whole.output_text and last.type == f"response.{whole.status}"
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    return f"{whole.status}: {streamed!r}\n{list(dict.fromkeys(each.type for each in events))}"


def a_response_as_an_object(server: CalledServer) -> str:
    parsed = synchronous(server).responses.parse(
        model=server.model, input=PROMPT, max_output_tokens=60, text_format=Verdict
    )
    assert isinstance(parsed.output_parsed, Verdict)
    return repr(parsed.output_parsed)


def a_response_with_a_call(server: CalledServer) -> str:
    """A forced call, its result, and an answer."""
    client = synchronous(server)
    function: Any = {"type": "function", **WEATHER["function"]}
    more: dict[str, Any] = {"model": server.model, "max_output_tokens": 100, "tools": [function]}
    first = client.responses.create(
        **more, input=PROMPT, tool_choice="required", parallel_tool_calls=False
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and [Weather.model_validate_json(call.arguments) for call in calls]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    said: list[Any] = [{"role": "user", "content": PROMPT}, *first.output, *results]
    answer = client.responses.create(**more, input=said, tool_choice="none")
    assert answer.output_text
    return f"{[call.arguments for call in calls]}, then {answer.output_text!r}"


def other_routes(server: CalledServer) -> str:
    client = synchronous(server)
    for call in (
        lambda: client.responses.create(model=server.model, input="hi", background=True),
        lambda: client.embeddings.create(model=server.model, input="hi"),
    ):
        error: Any = raised(openai.BadRequestError, call)
        assert error.code == "unsupported"
    raised(openai.NotFoundError, lambda: client.files.list())
    return f"BadRequestError: {error.body['message']}"


def too_large_a_body(server: CalledServer) -> str:
    more = asked(server, messages=[{"role": "user", "content": "a " * 9 * 2**20}])
    error: Any = raised(
        openai.APIStatusError, lambda: synchronous(server).chat.completions.create(**more)
    )
    assert error.status_code == 413
    return f"{type(error).__name__} {error.status_code}: {error.body['message']}"


def a_deadline(server: CalledServer) -> str:
    more = endless(server, timeout=0.2) | {"stream": False}
    error: Any = raised(
        openai.InternalServerError, lambda: synchronous(server).completions.create(**more)
    )
    assert (error.status_code, error.code) == (504, "deadline")
    return f"{type(error).__name__} {error.status_code}: {error.body['message']}"


def a_deadline_in_a_stream(server: CalledServer) -> str:
    """After the first event there is no status: the package raises the event's error."""
    for timeout_s in (3.0, 10.0):
        try:
            stream = synchronous(server).completions.create(**endless(server, timeout=timeout_s))
            break
        except openai.InternalServerError:  # a busy server: not even the first token arrived
            if timeout_s == 10.0:
                raise
    came: list[Any] = []
    error: Any = raised(openai.APIError, lambda: came.extend(stream) or next(iter(stream)))
    assert error.code == "deadline"
    return f"{type(error).__name__}, code {error.code}: {error.message}"


def its_own_timeout(server: CalledServer) -> str:
    """A client that stops waiting leaves the server too."""
    more = endless(server) | {"stream": False}
    client = synchronous(server, timeout=0.5)
    error = raised(openai.APITimeoutError, lambda: client.completions.create(**more))
    return f"{type(error).__name__}: {error}"


def nobody_there(server: CalledServer) -> str:
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        error = raised(openai.APIConnectionError, lambda: client.models.list())
    return f"{type(error).__name__}: {error}"


def keys(server: CalledServer) -> str:
    client = synchronous(server)
    nobody = synchronous(server, "mk-of-nobody")
    no_key = {"Authorization": openai.Omit()}
    foreign = asked(server, extra_body={"tenant": "of-somebody-else"})
    errors: list[Any] = [
        raised(openai.AuthenticationError, lambda: nobody.models.list()),
        raised(
            openai.AuthenticationError,
            lambda: nobody.chat.completions.create(**asked(server), stream=True),
        ),
        raised(openai.AuthenticationError, lambda: client.models.list(extra_headers=no_key)),
        raised(openai.PermissionDeniedError, lambda: client.chat.completions.create(**foreign)),
    ]
    assert [each.status_code for each in errors] == [401, 401, 401, 403]
    assert errors[-1].param == "tenant"
    return "\n".join(f"{type(each).__name__}: {each.body['message']}" for each in errors[1:])


@contextmanager
def one_in_flight(server: CalledServer) -> Iterator[Any]:
    """The one request that its tenant may have in flight."""
    client = synchronous(server, server.single_key, max_retries=RETRIES)
    stream = client.completions.create(**endless(server))
    next(iter(stream))
    try:
        yield stream
    finally:
        stream.close()


def a_rejection(server: CalledServer) -> str:
    with one_in_flight(server):
        client = synchronous(server, server.single_key)
        error: Any = raised(
            openai.RateLimitError, lambda: client.chat.completions.create(**asked(server))
        )
    assert error.code == "tenant_full"
    wait_s = error.response.headers["retry-after"]
    assert int(wait_s) >= 1
    return f"{type(error).__name__}, Retry-After {wait_s}: {error.body['message']}"


def a_quota(server: CalledServer) -> str:
    """One request a minute: of two, at least the second is one too many."""
    client = synchronous(server, server.metered_key)

    def twice() -> None:
        for _ in range(2):
            client.chat.completions.create(**asked(server, max_tokens=1))

    error: Any = raised(openai.RateLimitError, twice)
    assert error.code == "request_rate"
    wait_s = int(error.response.headers["retry-after"])
    assert 1 <= wait_s <= 61
    return f"{type(error).__name__}, Retry-After {wait_s}: {error.body['message']}"


def its_own_back_off(server: CalledServer) -> str:
    with one_in_flight(server) as first:
        noted = BackOff(first)
        hooks: Any = {"request": [noted.sent], "response": [noted.answered]}
        http_client = openai.DefaultHttpxClient(event_hooks=hooks)
        client = synchronous(
            server, server.single_key, max_retries=RETRIES, http_client=http_client
        )
        raw = client.chat.completions.with_raw_response.create(**asked(server))
    assert raw.retries_taken == noted.statuses.count(429) >= 1
    return noted.check()


def its_own_back_off_of_an_asynchronous_stream(server: CalledServer) -> str:
    async def streamed(noted: BackOff) -> str:
        hooks: Any = {"request": [noted.sent_async], "response": [noted.answered_async]}
        async with openai.AsyncOpenAI(
            base_url=server.url,
            api_key=server.single_key,
            max_retries=RETRIES,
            timeout=CALL_S_MAX,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
        ) as client:
            stream = await client.chat.completions.create(**asked(server), stream=True)
            return text_of([chunk async for chunk in stream])

    with one_in_flight(server) as first:
        noted = BackOff(first)
        assert asyncio.run(streamed(noted))
    return noted.check()


CALLS: tuple[Call, ...] = (
    models,
    chat,
    chat_streamed,
    an_answer_as_an_object,
    streamed_by_its_helper,
    a_loop_of_tools,
    completion,
    tokens_in_and_out,
    asynchronous,
    a_second_turn,
    fields_that_change_nothing,
    a_response,
    a_response_as_an_object,
    a_response_with_a_call,
    request_id_and_headers,
    wrong_fields,
    other_routes,
    too_large_a_body,
    a_deadline,
    a_deadline_in_a_stream,
    its_own_timeout,
    nobody_there,
)
CALLS_WITH_KEYS: tuple[Call, ...] = (
    keys,
    a_rejection,
    a_quota,
    its_own_back_off,
    its_own_back_off_of_an_asynchronous_stream,
)

if __name__ == "__main__":
    run_calls(f"openai {openai.__version__}", CALLS, CALLS_WITH_KEYS)
