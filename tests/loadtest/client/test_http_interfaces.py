"""Requests and answers over HTTP without a connection: Triton's interface and OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from loadtest.client.answer import ReceivedAnswer
from loadtest.client.http_interfaces import (
    CHAT,
    OpenAiInterface,
    OpenAiReader,
    PostedRequest,
    TritonInterface,
    data_of,
)
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError, TokenEvent
from loadtest.results.metrics import tbt_s

ROW = GenerateRequest(
    "row-1", input_ids=np.arange(5, 8, dtype=np.int32), max_tokens=4, min_tokens=4, end_id=-1
)


def body_of(posted: PostedRequest) -> dict[str, Any]:
    return dict(json.loads(posted.body))


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return json.dumps({"id": "cmpl-1", "choices": [choice], "usage": None}).encode()


def chat_event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def usage_event(prompt: int, output: int, cached: int | None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }
    return json.dumps({"choices": [], "usage": counts}).encode()


def heard(*events: tuple[float, bytes]) -> tuple[ReceivedAnswer, OpenAiReader]:
    answer, reader = ReceivedAnswer(), OpenAiReader()
    for time_s, data in events:
        if (event := reader.read(data, time_s)) is not None:
            answer.add(event)
    return answer, reader


def test_token_ids_go_to_completions_exactly_and_ask_for_what_triton_would_do() -> None:
    posted = OpenAiInterface(model="demo").posted(ROW)
    assert posted.path == "/v1/completions" and "Authorization" not in posted.headers
    assert posted.headers["X-Request-Id"] == "row-1"
    assert body_of(posted) == {
        "model": "demo",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "min_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_text_is_a_prompt_of_completions_and_a_message_of_a_chat() -> None:
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    text = GenerateRequest("r", text_input="It is", messages=turns, priority=-2)
    said = body_of(OpenAiInterface().posted(text))
    assert said["prompt"] == "It is" and said["priority"] == -2
    assert "messages" not in said and "model" not in said
    chat = OpenAiInterface(CHAT).posted(text)
    assert chat.path == "/v1/chat/completions"
    assert body_of(chat)["messages"] == list(turns) and "prompt" not in body_of(chat)
    alone = body_of(OpenAiInterface(CHAT).posted(GenerateRequest("r", text_input="It is")))
    assert alone["messages"] == [{"role": "user", "content": "It is"}]


def test_a_tenant_is_named_by_its_key_or_else_in_the_request() -> None:
    interface = OpenAiInterface(key="mk-all", keys={"acme": "mk-acme"})
    for tenant, key in (("acme", "mk-acme"), ("other", "mk-all")):
        posted = interface.posted(GenerateRequest("r", parameters={"tenant": tenant}))
        assert posted.headers["Authorization"] == f"Bearer {key}"
        assert "tenant" not in body_of(posted)
    keyless = OpenAiInterface().posted(GenerateRequest("r", parameters={"tenant": "acme"}))
    assert "Authorization" not in keyless.headers and body_of(keyless)["tenant"] == "acme"
    assert "mk-" not in repr(interface)


def test_an_answer_has_a_token_an_event_and_the_counts_of_its_end() -> None:
    answer, reader = heard(
        (1.0, text_event(" a")),
        (1.2, text_event(" b")),
        (1.5, text_event("", "length")),
        (1.5, usage_event(70, 3, 64)),
        (1.5, b"[DONE]"),
    )
    assert reader.is_finished and answer.finish_reason == "length" and answer.text == " a b"
    assert (answer.input_tokens, answer.cached_tokens) == (70, 64)
    assert answer.token_times_s == [1.0, 1.2, 1.2], "the third had no text of its own"
    assert heard((1.0, text_event("a", "stop")), (1.0, usage_event(1, 1, None)))[
        0
    ].token_times_s == [1.0]


def test_tokens_that_came_together_are_counted_and_tbt_is_that_of_grpc() -> None:
    """Two messages of three tokens each: which of the two had them is not said, and no matter."""
    answer, _ = heard(
        (1.0, text_event(" a b c")),
        (1.4, text_event(" d e f", "length")),
        (1.4, usage_event(9, 6, 0)),
        (1.4, b"[DONE]"),
    )
    grpc = [1.0, 1.0, 1.0, 1.4, 1.4, 1.4]
    assert len(answer.token_times_s) == 6 and answer.token_times_s[0] == grpc[0]
    assert tbt_s(answer.token_times_s) == pytest.approx(tbt_s(grpc))


def test_who_speaks_in_a_chat_is_no_token() -> None:
    answer, reader = heard(
        (1.0, chat_event({"role": "assistant", "content": ""})),
        (1.1, chat_event({"content": "x"})),
        (1.2, chat_event({}, "stop")),
        (1.2, usage_event(4, 1, 0)),
        (1.2, b"[DONE]"),
    )
    assert answer.token_times_s == [1.1] and answer.finish_reason == "stop" and reader.is_finished


def test_half_a_character_is_a_token_without_text() -> None:
    answer, _ = heard((1.0, text_event("")), (1.1, text_event("é")))
    assert answer.token_times_s == [1.0, 1.1]


@pytest.mark.parametrize(
    "events",
    [
        [text_event(" a"), b"[DONE]"],  # no reason for its end
        [text_event(" a", "length")],  # no [DONE]
        [],
    ],
)
def test_an_answer_that_lacks_its_end_is_not_finished(events: list[bytes]) -> None:
    assert not heard(*((1.0, event) for event in events))[1].is_finished


def test_an_error_in_the_middle_of_a_stream_is_raised_with_its_kind() -> None:
    said = {"message": "no decode worker", "type": "unavailable_error", "code": "unavailable"}
    with pytest.raises(ServerError, match="no decode worker") as raised:
        heard((1.0, text_event(" a")), (1.1, json.dumps({"error": said}).encode()))
    assert raised.value.kind == "unavailable"
    with pytest.raises(ServerError, match="no JSON"):
        heard((1.0, b"<html>"))


def refused(status: int, code: str, retry_after: str = "", **more: Any) -> ServerError:
    error = {"message": "why", "type": "x", "param": None, "code": code} | more
    return OpenAiInterface().refusal(status, retry_after, json.dumps({"error": error}).encode())


def test_429_is_a_rejection_with_its_reason_and_when_to_come_back() -> None:
    rejected = refused(429, "ttft_slo", "7")
    assert isinstance(rejected, Rejected)
    assert (rejected.kind, rejected.message, rejected.retry_after_s) == ("ttft_slo", "why", 7.0)
    unsaid = refused(429, "", "Wed, 21 Oct 2026 07:28:00 GMT")
    assert isinstance(unsaid, Rejected)
    assert (unsaid.kind, unsaid.retry_after_s) == ("rate_limit", 1.0)
    never = refused(400, "too_large")
    assert isinstance(never, Rejected) and never.retry_after_s == 0.0, "as over gRPC"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", "invalid_request"),
        (400, "unsupported", "invalid_request"),
        (401, "invalid_api_key", "forbidden"),
        (403, "forbidden", "forbidden"),
        (404, "model_not_found", "invalid_request"),
        (413, "too_large_body", "invalid_request"),
        (500, "internal_error", "server_error"),
        (503, "unavailable", "unavailable"),
        (503, "kv_missing", "kv_missing"),
        (503, "", "server_error"),
        (504, "deadline", "timeout"),
    ],
)
def test_every_other_status_is_a_failure_of_the_kind_that_triton_would_name(
    status: int, code: str, kind: str
) -> None:
    error = refused(status, code)
    assert type(error) is ServerError and error.kind == kind


def test_a_refused_key_says_where_one_is_named() -> None:
    assert "--tenant-keys" in refused(401, "invalid_api_key").message


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b'{"error": "unknown"}', b"", b"[]"])
def test_what_is_no_openai_interface_is_said_to_be_none(body: bytes) -> None:
    error = OpenAiInterface().refusal(502, "", body)
    assert error.kind == "server_error" and "HTTP status 502" in error.message


def test_tritons_interface_is_read_as_its_grpc() -> None:
    interface = TritonInterface("conductor")
    posted = interface.posted(GenerateRequest("r", text_input="a"))
    assert posted.path == "/v2/models/conductor/generate_stream"
    reader = interface.reader()
    assert reader.read(b'{"output_ids": 7, "finish_reason": "length"}', 1.0) == TokenEvent(
        1.0, (7,), finish_reason="length"
    )
    assert reader.is_finished
    rejected = interface.refusal(
        400, "", b'{"error": "rejected kind=ttft_slo retry_after_s=2.5: too slow"}'
    )
    assert isinstance(rejected, Rejected) and rejected.retry_after_s == 2.5
    assert "status 502" in interface.refusal(502, "", b"<html>").message
    with pytest.raises(ServerError, match="<html>"):
        reader.read(b"<html>", 1.0)


def test_only_data_lines_of_a_stream_are_data() -> None:
    lines = [b"data: {}\r", b"data:{}", b": ping", b"event: x", b"", b"\r", b"data:"]
    assert [data_of(line) for line in lines] == [b"{}", b"{}", None, None, None, None, b""]
