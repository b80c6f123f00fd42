"""The gateway as its clients see it, in front of a frontend that answers what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import http.client
import json
import time
from dataclasses import replace

import pytest
from starlette.requests import Request

from backends import launch_secret
from backends.gateway import bodies, generation
from backends.gateway.app import PATHS, UNSUPPORTED_PATHS
from backends.gateway.frontend_calls import FrontendCalls
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.gateway.tokenizing import Tokenizing
from backends.launcher.environment import free_ports
from backends.tenants import ApiKeys
from backends.tenants.proof import is_proven
from bench.harness.replayed_frontend import LOG_PROB, ReplayedFrontend
from loadtest.client import sse_client
from tests.backends.gateway.rig import BODY_BYTES_MAX, KEYS, PROMPT, SECRET, Rig, run, until

NO_REQUESTS = b'{ [] null "x" \xff {} {"prompt":NaN} {"prompt":"\\ud800"}'.split(b" ")
NO_REQUESTS += [b"", b"[" * 3000]


def test_a_chat_is_streamed_as_openais_clients_read_it() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.post(
            CHAT, stream=True, max_tokens=3, stream_options={"include_usage": True}
        )
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = answer.events
        assert done == "[DONE]"
        assert {each["object"] for each in chunks} == {"chat.completion.chunk"}
        assert len({each["id"] for each in (*chunks, usage)}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [each["choices"][0]["delta"]["content"] for each in chunks[1:]] == [" word"] * 3
        reasons = [each["choices"][0]["finish_reason"] for each in chunks]
        assert reasons == [None, None, None, "length"]
        assert [each["usage"] for each in chunks] == [None] * 4
        assert usage["choices"] == []
        assert usage["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    run(check)


def test_a_stream_has_its_counts_in_each_event_where_they_are_asked_for() -> None:
    """As vLLM has them, for load generators."""
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def check(rig: Rig) -> None:
        for path, opening in ((CHAT, 1), (COMPLETION, 0)):
            answer = await rig.post(path, stream=True, max_tokens=3, stream_options=options)
            *chunks, usage, done = answer.events
            counted = [each["usage"]["completion_tokens"] for each in chunks[opening:]]
            assert done == "[DONE]" and counted == [1, 2, 3]
            assert {each["usage"]["prompt_tokens"] for each in chunks[opening:]} == {5}
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert usage["usage"] == chunks[-1]["usage"] and usage["choices"] == []
        alone = {"continuous_usage_stats": True}
        *chunks, done = (await rig.post(CHAT, stream=True, stream_options=alone)).events
        assert all("usage" not in each for each in chunks), "as in vLLM, it wants include_usage"

    run(check)


def test_a_completion_is_streamed_without_counts_where_none_are_asked_for() -> None:
    async def check(rig: Rig) -> None:
        *chunks, done = (await rig.post(COMPLETION, stream=True, max_tokens=2)).events
        assert done == "[DONE]"
        assert [each["choices"][0]["text"] for each in chunks] == [" word", " word"]
        assert all("usage" not in each and each["object"] == "text_completion" for each in chunks)
        [sent] = rig.frontend.requests
        assert [each.name for each in sent.outputs] == ["text_output", "finish_reason"]

    run(check)


def test_a_whole_answer_has_its_counts() -> None:
    async def check(rig: Rig) -> None:
        chat = (await rig.post(CHAT, max_tokens=2)).json
        assert chat["object"] == "chat.completion" and chat["model"] == "demo"
        assert chat["choices"] == [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": " word word", "refusal": None},
            }
        ]
        assert chat["usage"]["completion_tokens"] == 2
        text = (await rig.post(COMPLETION, max_tokens=2)).json
        assert text["choices"][0]["text"] == " word word"

    run(check)


def test_logprobs_come_in_openais_shapes() -> None:
    async def check(rig: Rig) -> None:
        answer = (await rig.post(CHAT, max_tokens=2, logprobs=True, top_logprobs=1)).json
        found = answer["choices"][0]["logprobs"]["content"]
        assert len(found) == 2 and found[0] == found[1]
        best = {name: found[0][name] for name in ("token", "logprob", "bytes")}
        assert found[0]["top_logprobs"] == [best]
        assert (best["logprob"], bytes(best["bytes"]).decode()) == (LOG_PROB, best["token"])
        *chunks, _ = (await rig.post(COMPLETION, max_tokens=3, logprobs=0, stream=True)).events
        parts = [each["choices"][0]["logprobs"] for each in chunks]
        length = len(best["token"])
        assert [each["text_offset"] for each in parts] == [[0], [length], [2 * length]]
        assert all(each["token_logprobs"] == [LOG_PROB] for each in parts)
        assert all(each["top_logprobs"] == [{best["token"]: LOG_PROB}] for each in parts)
        assert (await rig.post(CHAT, max_tokens=1)).json["choices"][0]["logprobs"] is None

    run(check)


ERRORS = [
    ("rejected kind=ttft_slo retry_after_s=2.20: full", 429, "ttft_slo", "3"),
    ("rejected kind=front_full retry_after_s=0.01: full", 429, "front_full", "1"),
    ("rejected kind=too_large retry_after_s=0.00: no", 400, "too_large", None),
    ("invalid_request: top_p is 5.0; use less", 400, "invalid_request", None),
    ("forbidden: no", 403, "forbidden", None),
    ("unavailable: decode_0 died", 503, "unavailable", "1"),
    ("kv_missing: gone", 503, "kv_missing", "1"),
    ("unavailable: its timeout of 5 ms has passed", 504, "deadline", None),
    ("internal_error: KeyError: 5", 500, "internal_error", None),
    ("Request for unknown model: 'conductor' is not found", 503, "unavailable", "1"),
]


def test_an_error_before_the_first_token_is_a_status() -> None:
    async def check(rig: Rig) -> None:
        for is_stream in (False, True):
            for said, status, code, retry_after in ERRORS:
                answer = await rig.say(f"fail:{said}", stream=is_stream)
                assert (answer.status, answer.error["code"]) == (status, code)
                assert answer.headers.get("retry-after") == retry_after
                assert "x-request-id" in answer.headers
                assert (answer.error["param"] == "top_p") == ("top_p" in said)

    run(check)


def test_a_refusal_names_the_field_that_its_route_has() -> None:
    async def check(rig: Rig) -> None:
        words = "fail:invalid_request: top_logprobs is 50; use 0 to 20"
        error = (await rig.say(words, logprobs=50)).error
        assert (error["param"], error["message"]) == ("logprobs", "logprobs is 50; use 0 to 20")
        chat = {"messages": [{"role": "user", "content": words}], "logprobs": True}
        assert (await rig.post(CHAT, **chat, top_logprobs=50)).error["param"] == "top_logprobs"

    run(check)


def test_a_refusal_names_the_field_that_its_client_sent() -> None:
    async def check(rig: Rig) -> None:
        words = "fail:invalid_request: max_tokens is 0; use 1 to 8192"
        chat = {"messages": [{"role": "user", "content": words}]}
        newer = (await rig.post(CHAT, **chat, max_completion_tokens=0)).error
        assert newer["message"] == "max_completion_tokens is 0; use 1 to 8192"
        assert newer["param"] == "max_completion_tokens"
        for both in ({"max_tokens": 0}, {"max_tokens": 0, "max_completion_tokens": 0}):
            assert (await rig.post(CHAT, **chat, **both)).error["param"] == "max_tokens"
        unlike = (await rig.post(CHAT, max_tokens=1, max_completion_tokens=2)).error
        assert unlike["param"] == "max_completion_tokens"

    run(check)


def test_an_error_behind_the_first_token_is_an_event_and_the_end() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.say("break:unavailable: decode_0 died", stream=True)
        assert answer.status == 200
        *chunks, last = answer.events
        assert len(chunks) == 3 and all("choices" in each for each in chunks)
        assert last["error"]["code"] == "unavailable"
        assert "[DONE]" not in answer.events

    run(check)


def test_a_frontend_that_fails_behind_the_last_token_fails_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has all of it: nothing may follow, whether the connection breaks then or the
    frontend keeps the call open past the deadline."""
    monkeypatch.setattr(generation, "GRACE_S", 0.0)

    async def check(rig: Rig) -> None:
        gave_up = 0
        for is_stream in (False, True):
            for words in ("late:internal_error: KeyError", "abort:", "linger:"):
                # A busy machine may need longer than the shortest deadline for the answer itself.
                for timeout_s in (0.3, 2, 10):
                    answer = await rig.say(words, stream=is_stream, max_tokens=2, timeout=timeout_s)
                    if b'"deadline"' not in answer.body:
                        break
                    gave_up += 1
                assert answer.status == 200, words
                assert b"error" not in answer.body and b'"length"' in answer.body, words
                assert not is_stream or answer.events[-1] == "[DONE]"
        await until(lambda: not rig.gateway.counts.in_flight)
        page = rig.gateway.counts.page()
        refused = f'mooncake_gateway_refusals_total{{code="deadline"}} {gave_up}\n'
        assert (refused if gave_up else "mooncake_gateway_refusals_total") in page
        assert page.count("mooncake_gateway_refusals_total{") == bool(gave_up)
        assert "mooncake_gateway_clients_left_total 0\n" in page
        assert not caplog.records

    run(check)


def test_a_client_that_leaves_ends_its_call() -> None:
    """Before the first token, streamed or whole, and in the middle of a stream; and the gateway has
    nothing in hand any more."""

    async def check(rig: Rig) -> None:
        rig.frontend.interval_s = 0.02
        ways = (("silent", False), ("silent", True), ("hi", True))
        for number, (words, is_stream) in enumerate(ways, 1):
            body = {"prompt": words, "stream": is_stream, "max_tokens": 100_000}
            asking = asyncio.ensure_future(
                sse_client.ask(rig.address, PATHS[COMPLETION], body, events_max=3)
            )
            await until(lambda n=number: len(rig.frontend.requests) == n)
            if words == "silent":
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await until(lambda n=number: rig.frontend.cancelled == n)
            await until(lambda: not rig.gateway.counts.in_flight)
        assert "mooncake_gateway_clients_left_total 3\n" in rig.gateway.counts.page()

    run(check)


def test_a_client_that_leaves_in_its_body_is_no_defect() -> None:
    async def check(rig: Rig) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(
            f"POST {PATHS[CHAT]} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        await until(lambda: rig.gateway.counts.in_flight)
        writer.transport.abort()
        await until(lambda: not rig.gateway.counts.in_flight)
        page = rig.gateway.counts.page()
        assert "mooncake_gateway_clients_left_total 1\n" in page and "internal_error" not in page

    run(check)


def test_answers_that_were_read_to_their_end_count_as_no_client_that_left() -> None:
    async def check(rig: Rig) -> None:
        for is_stream in (False, True):
            assert (await rig.post(CHAT, stream=is_stream)).status == 200
        await until(lambda: not rig.gateway.counts.in_flight)
        assert rig.frontend.cancelled == 0
        page = rig.gateway.counts.page()
        assert "mooncake_gateway_clients_left_total 0\n" in page
        path = PATHS[CHAT]
        assert f'mooncake_gateway_requests_total{{path="{path}",status="200"}} 2\n' in page

    run(check)


def test_a_frontend_that_overlooks_a_deadline_does_not_keep_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "GRACE_S", 0.0)

    async def check(rig: Rig) -> None:
        answer = await rig.say("silent", timeout=0.05)
        assert (answer.status, answer.error["code"]) == (504, "deadline")
        await until(lambda: rig.frontend.cancelled == 1)
        [sent] = rig.frontend.requests
        assert sent.parameters["timeout_ms"].int64_param == 50

    run(check)


def test_a_request_id_comes_back_and_a_bad_one_does_not() -> None:
    async def check(rig: Rig) -> None:
        for given, is_kept in (("abc-1", True), ("", False), ("x" * 300, False)):
            answer = await rig.send("GET", "/health", X_Request_Id=given)
            assert (answer.headers["x-request-id"] == given) == is_kept
        sent = await rig.send("POST", PATHS[CHAT], {}, X_Request_Id="of-an-error")
        assert (sent.status, sent.headers["x-request-id"]) == (400, "of-an-error")

    run(check)


def test_too_large_a_body_is_refused_whether_its_length_is_said_or_not() -> None:
    async def check(rig: Rig) -> None:
        large = json.dumps({"prompt": "x" * BODY_BYTES_MAX}).encode()
        answer = await rig.send("POST", PATHS[COMPLETION], large)
        assert (answer.status, answer.error["code"]) == (413, "too_large_body")
        chunked = f"{len(large):x}\r\n".encode() + large + b"\r\n0\r\n\r\n"
        answer = await rig.send(
            "POST", PATHS[COMPLETION], chunked, Content_Length="", Transfer_Encoding="chunked"
        )
        assert (answer.status, answer.error["code"]) == (413, "too_large_body")

    run(check)


def test_a_body_that_is_no_request_is_400() -> None:
    async def check(rig: Rig) -> None:
        for body in NO_REQUESTS:
            for path in PATHS.values():
                answer = await rig.send("POST", path, body)
                assert answer.status == 400 and answer.error["type"] == "invalid_request_error"

    run(check)


def test_paths_and_models_that_are_not_there_are_404_and_known_ones_refused_by_name() -> None:
    async def check(rig: Rig) -> None:
        for path in ("/page", "/v1", "/v1/files", "/docs", "/v1/models/x"):
            answer = await rig.send("GET", path)
            assert (answer.status, answer.error["type"]) == (404, "not_found_error"), path
        for path in UNSUPPORTED_PATHS:
            answer = await rig.send("POST", path, {})
            assert (answer.status, answer.error["param"]) == (400, path)
        answer = await rig.send("GET", PATHS[CHAT])
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        answer = await rig.post(CHAT, model="another")
        assert (answer.status, answer.error["param"]) == (404, "model")
        assert not rig.frontend.requests

    run(check)


def test_models_and_tokens_are_listed() -> None:
    async def check(rig: Rig) -> None:
        [model] = (await rig.send("GET", "/v1/models")).json["data"]
        assert model == (await rig.send("GET", "/v1/models/demo")).json
        assert (model["id"], model["object"]) == ("demo", "model")
        text = (await rig.send("POST", "/tokenize", {"prompt": "It is a truth"})).json
        assert text["count"] == len(text["tokens"]) == 4
        chat = (await rig.send("POST", "/tokenize", {**PROMPT[CHAT], "model": "demo"})).json
        assert chat["count"] > 1
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert (await rig.send("POST", "/tokenize", {"messages": parts})).json == chat
        assert (await rig.send("POST", "/tokenize", {"prompt": "x", "model": "y"})).status == 404

    run(check)


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity", "nonsense"])
def test_an_encoded_body_is_refused_with_a_word_about_its_encoding(coding: str) -> None:
    async def check(rig: Rig) -> None:
        body = gzip.compress(json.dumps(PROMPT[CHAT]).encode())
        answer = await rig.send("POST", PATHS[CHAT], body, Content_Encoding=coding)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
        assert "Content-Encoding" in answer.error["message"]
        plain = await rig.send("POST", PATHS[CHAT], PROMPT[CHAT], Content_Encoding="identity")
        assert plain.status == 200

    run(check)


LIMITED_KEYS = {**KEYS, "tenants": {"acme": {"requests_per_minute": 1}, "other": {}}}


def test_tokenize_is_charged_before_it_reads_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)

    async def check(rig: Rig) -> None:
        rig.key = "key-of-other"
        assert (await rig.send("POST", "/tokenize", {"prompt": "a"})).status == 200
        assert not rig.frontend.requests, "a tenant without limits pays nothing"
        rig.key = "key-of-acme"
        assert (await rig.send("POST", "/tokenize", {"prompt": "a"})).status == 200
        [charge] = rig.frontend.requests
        assert charge.parameters["describe"].string_param == "charge"
        assert charge.parameters["tenant"].string_param == "acme"
        rig.frontend.charge = "rejected kind=request_rate retry_after_s=9: used up"
        monkeypatch.setattr(rig.gateway._tokenizing, "token_ids", None)
        answer = await rig.send("POST", "/tokenize", {"prompt": "a"})
        assert (answer.status, answer.error["code"]) == (429, "request_rate")

    run(check, ApiKeys(None, json.dumps(LIMITED_KEYS)))


def test_a_key_is_asked_for_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)

    async def check(rig: Rig) -> None:
        for path in ("/health", "/ready"):
            assert (await rig.send("GET", path)).status == 200
        for key in ("", "key-of-nobody", "x" * 1000):
            rig.key = key
            for path in ("/v1/models", "/metrics", "/nothing", PATHS[CHAT], "/tokenize"):
                is_post = path in (PATHS[CHAT], "/tokenize")
                answer = await rig.send("POST" if is_post else "GET", path, PROMPT[CHAT])
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert not rig.frontend.requests
        rig.key = "key-of-acme"
        assert (await rig.post(CHAT)).status == 200
        assert (await rig.post(CHAT, tenant="acme")).status == 200
        for sent in rig.frontend.requests:
            assert sent.parameters["tenant"].string_param == "acme"
            proof = sent.parameters["tenant_proof"].string_param
            assert is_proven("acme", proof, SECRET, time.time())
        answer = await rig.post(CHAT, tenant="other")
        assert (answer.status, answer.error["param"]) == (403, "tenant")
        assert len(rig.frontend.requests) == 2

    run(check, ApiKeys(None, json.dumps(KEYS)))


def test_a_key_reads_the_metrics_of_its_own_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"".join(
        b'mooncake_tenant_requests_live{tenant="%s"} 3\n' % name for name in (b"acme", b"other")
    )
    monkeypatch.setattr("backends.gateway.app.fetch_page", lambda url: page)

    async def check(rig: Rig) -> None:
        rig.gateway.options = replace(rig.gateway.options, metrics="127.0.0.1:9")
        rig.key = "key-of-other"
        assert (await rig.send("GET", "/metrics")).body == page.splitlines(keepends=True)[1]

    run(check, ApiKeys(None, json.dumps(KEYS)))


def test_a_metrics_page_that_breaks_off_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ended in the middle of it."""

    def broken(url: str) -> bytes:
        raise http.client.IncompleteRead(b"mooncake_", 100)

    monkeypatch.setattr("backends.gateway.app.fetch_page", broken)

    async def check(rig: Rig) -> None:
        rig.gateway.options = replace(rig.gateway.options, metrics="127.0.0.1:9")
        answer = await rig.send("GET", "/metrics")
        assert (answer.status, answer.error["code"]) == (503, "unavailable")

    run(check)


def test_what_tokens_add_is_looked_up_before_the_first_of_them_comes() -> None:
    """Reading the vocabulary takes a while, which the event loop must not wait for."""
    words = Tokenizing().words("demo")
    assert "token_bytes" in vars(words._tokenizer)


def test_without_keys_the_tenant_is_the_clients_word() -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.post(CHAT, tenant="acme")).status == 200
        [sent] = rig.frontend.requests
        assert sent.parameters["tenant"].string_param == "acme"
        assert "tenant_proof" not in sent.parameters

    run(check)


def test_a_process_that_drains_ends_its_streams_and_takes_nothing_new() -> None:
    async def check(rig: Rig) -> None:
        rig.frontend.interval_s = 0.02
        body = {"prompt": "hi", "stream": True, "max_tokens": 40}
        asking = asyncio.ensure_future(sse_client.ask(rig.address, PATHS[COMPLETION], body))
        await until(lambda: rig.frontend.requests)
        rig.server.handle_exit(15, None)
        ready = await rig.send("GET", "/ready")
        assert (ready.status, ready.json) == (503, {"status": "draining"})
        assert (await rig.send("GET", "/health")).status == 200
        refused = await rig.post(CHAT)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        answer = await asking
        assert len(answer.times_s) == 40 and answer.is_done
        await until(lambda: rig.server.should_exit)

    run(check)


def test_a_request_that_comes_before_the_frontend_was_found_waits_for_it() -> None:
    """gRPC waits longer and longer between attempts to connect; a request asks for one now."""

    async def check(rig: Rig) -> None:
        [port] = free_ports(1, ())
        early = FrontendCalls(f"127.0.0.1:{port}")
        for _ in range(3):
            assert not await early.probe()
        rig.gateway.calls, usual = early, rig.gateway.calls
        late = ReplayedFrontend()
        await late.start(f"127.0.0.1:{port}")
        assert (await rig.post(CHAT)).status == 200
        assert len(late.requests) == 1
        rig.gateway.calls = usual
        await late.stop()
        await early.close()

    run(check)


def test_without_a_frontend_requests_are_503_and_it_is_found_again() -> None:
    async def check(rig: Rig) -> None:
        rig.frontend.is_ready = False
        await until(lambda: not rig.gateway.calls.is_ready)
        assert (await rig.send("GET", "/ready")).status == 503
        rig.frontend.is_ready = True
        await until(lambda: rig.gateway.calls.is_ready)
        await rig.frontend.stop()
        answer = await rig.post(CHAT)
        assert (answer.status, answer.error["code"]) == (503, "unavailable")

    run(check)


@pytest.mark.slow
@pytest.mark.parametrize("long_body_bytes", [0, 1_000_000])
def test_a_body_is_not_kept_for_as_long_as_its_answer_takes(
    monkeypatch: pytest.MonkeyPatch, long_body_bytes: int
) -> None:
    monkeypatch.setattr(bodies, "LONG_BODY_BYTES", long_body_bytes)
    mark = "kept-" + "x" * 500

    def holders() -> list[object]:
        return [
            each
            for each in gc.get_objects()
            if isinstance(each, Request) and mark.encode() in getattr(each, "_body", b"")
        ]

    async def check(rig: Rig) -> None:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(rig.say("silent", metadata={"x": mark}, timeout=1.0))
            await until(lambda: rig.frontend.requests)
            assert not holders()
        assert asked.result().status == 504

    run(check)


def test_without_keys_pages_of_other_sites_ask_nothing() -> None:
    async def check(rig: Rig) -> None:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
            answer = await rig.send("GET", "/v1/models", Sec_Fetch_Site=site)
            assert answer.status == status, site
        assert (await rig.send("GET", "/", Sec_Fetch_Site="cross-site")).status == 200, "a link"

    run(check)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("rebound.example:9000", 403),
        ("rebound.example.", 403),
        ("1.2.3.4.example", 403),
        ("127.0.0.1.example:9000", 403),
        ("127.0.0.1:9000", 200),
        ("[::1]:9000", 200),
        ("10.0.0.7", 200),
        ("localhost", 200),
        ("localhost.:9000", 200),
        ("Me.LocalHost:9000", 200),
        ("gpu-box:9000", 200),
    ],
)
def test_without_keys_a_name_that_anybody_may_have_pointed_here_is_refused(
    host: str, status: int
) -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.send("GET", "/v1/models", Host=host)).status == status
        assert (await rig.send("GET", "/ready", Host=host)).status == 200, "a probe"

    run(check)


def test_with_keys_the_server_may_have_any_name() -> None:
    async def check(rig: Rig) -> None:
        rig.key = "key-of-acme"
        assert (await rig.send("GET", "/v1/models", Host="llm.acme.example")).status == 200

    run(check, ApiKeys(None, json.dumps(KEYS)))


def test_with_keys_pages_of_other_sites_may_ask_if_they_know_one() -> None:
    async def check(rig: Rig) -> None:
        rig.key = "key-of-acme"
        assert (await rig.send("GET", "/v1/models", Sec_Fetch_Site="cross-site")).status == 200

    run(check, ApiKeys(None, json.dumps(KEYS)))
