"""The client over sockets: a gateway with a written-down frontend, and servers that break off."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from backends import launch_secret
from backends.tenants import ApiKeys
from loadtest.client.answer import ReceivedAnswer
from loadtest.client.http_interfaces import CHAT, COMPLETIONS, HttpInterface, OpenAiInterface
from loadtest.client.metrics_page import fetch_page
from loadtest.client.openai_server import HttpAddress, http_address, served_at
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError
from loadtest.client.server import description
from loadtest.client.sse_client import SseClient
from tests.backends.gateway.rig import KEYS, rig


async def asked(
    address: str, request: GenerateRequest, interface: HttpInterface, timeout_s: float = 20.0
) -> ReceivedAnswer:
    answer = ReceivedAnswer()
    async with SseClient(http_address(address), interface) as client:
        async for event in client.generate(request, timeout_s):
            answer.add(event)
    return answer


def text(words: str, max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest("r-1", text_input=words, max_tokens=max_tokens)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_gateways_answer_arrives_token_by_token_with_its_counts(path: str) -> None:
    async def check() -> None:
        async with rig() as gateway:
            answer = await asked(gateway.address, text("hi"), OpenAiInterface(path))
            assert answer.text == " word" * 6 and answer.finish_reason == "length"
            assert len(answer.token_times_s) == 6
            assert (answer.input_tokens, answer.cached_tokens) == (5, 2)

    asyncio.run(check())


def test_a_gateway_says_its_model_and_what_a_run_has_to_know() -> None:
    async def check() -> None:
        async with rig() as gateway:
            address = http_address(gateway.address)
            served = await asyncio.to_thread(served_at, address)
            assert served.model == "demo"
            found = description(served.facts)
            assert (found.block_tokens, found.context_tokens_max) == (64, 8_192)
            assert found.vocabulary_tokens == 2_048 and not found.assumed
            with pytest.raises(ServerError, match="no model 'x'; served: demo"):
                await asyncio.to_thread(served_at, address, "x")

    asyncio.run(check())


def test_errors_of_a_gateway_are_the_kinds_that_grpc_has() -> None:
    async def check() -> None:
        async with rig() as gateway:
            for words, kind in (
                ("fail:unavailable: no worker", "unavailable"),
                ("fail:invalid_request: parameter max_tokens is 0", "invalid_request"),
                ("break:kv_missing: lost", "kv_missing"),
                ("fail:what is this", "server_error"),
            ):
                with pytest.raises(ServerError) as raised:
                    await asked(gateway.address, text(words), OpenAiInterface())
                assert (type(raised.value), raised.value.kind) == (ServerError, kind)
            with pytest.raises(Rejected) as rejected:
                words = "fail:rejected kind=ttft_slo retry_after_s=2.5: too slow"
                await asked(gateway.address, text(words), OpenAiInterface())
            assert (rejected.value.kind, rejected.value.retry_after_s) == ("ttft_slo", 3.0)

    asyncio.run(check())


def test_with_api_keys_each_tenant_asks_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, "a-secret")

    async def check() -> None:
        async with rig(ApiKeys(None, json.dumps(KEYS))) as gateway:
            keys = {name: f"key-of-{name}" for name in ("acme", "other")}
            for name in keys:
                request = GenerateRequest("r", text_input="hi", parameters={"tenant": name})
                await asked(gateway.address, request, OpenAiInterface(keys=keys))
            sent = [each.parameters["tenant"].string_param for each in gateway.frontend.requests]
            assert sent == ["acme", "other"]
            address = http_address(gateway.address)
            for key in ("", "guessed"):
                with pytest.raises(ServerError, match="OPENAI_API_KEY") as raised:
                    await asked(gateway.address, text("hi"), OpenAiInterface(key=key))
                assert raised.value.kind == "forbidden"
                with pytest.raises(ServerError, match="OPENAI_API_KEY"):
                    await asyncio.to_thread(served_at, address, "", key)
            served = await asyncio.to_thread(served_at, address, "demo", keys["acme"])
            assert served.model == "demo"

    asyncio.run(check())


def served_by(
    answers: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    request: GenerateRequest,
    timeout_s: float = 20.0,
) -> ReceivedAnswer:
    """By a server that does what a test wants after the request was read."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        await answers(reader, writer)
        writer.close()

    async def within() -> ReceivedAnswer:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await asked(f"127.0.0.1:{port}", request, OpenAiInterface(), timeout_s)

    return asyncio.run(within())


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices": [{"text": " a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": " b", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def chunked(parts: list[bytes]) -> bytes:
    found = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + found


def test_an_event_may_come_in_pieces_and_several_at_once() -> None:
    whole = EVENT + b": ping\n\n" + LAST
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked([*pieces, b""]))

    assert served_by(answer, text("x")).text == " a b"

    async def unframed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + b"\r\n" + whole)

    assert served_by(unframed, text("x")).text == " a b"


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (chunked([EVENT]), "unreachable"),  # in the middle of the body
        (chunked([EVENT])[:-20], "unreachable"),  # in the middle of an event
        (chunked([EVENT, b""]), "incomplete"),  # well ended, but the answer is not
        (STREAM + b"\r\n" + EVENT, "incomplete"),
        (b"", "unreachable"),
        (b"HTTP/1.1 200 OK\r\n", "unreachable"),
        (b"what?\r\n\r\n", "unreachable"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nno", "server_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", "server_error"),
    ],
)
def test_an_answer_that_breaks_off_is_a_failure_of_a_kind(sent: bytes, kind: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    with pytest.raises(ServerError) as raised:
        served_by(answer, text("x"))
    assert raised.value.kind == kind


def test_a_silent_server_is_waited_for_until_the_deadline_and_is_left() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked([EVENT]))
        rest.append(await reader.read())

    rest: list[bytes] = []
    with pytest.raises(ServerError) as raised:
        served_by(answer, text("x"), timeout_s=0.3)
    assert raised.value.kind == "timeout" and "in time" in raised.value.message
    assert rest in ([], [b""]), "it asks for nothing more"


def test_nobody_there_is_unreachable_and_the_message_says_what_to_do() -> None:
    with pytest.raises(ServerError) as raised:
        asyncio.run(asked("127.0.0.1:1", text("x"), OpenAiInterface()))
    assert raised.value.kind == "unreachable" and "127.0.0.1:1" in raised.value.message
    with pytest.raises(ServerError, match="mooncake serve --openai-port") as unasked:
        served_at(http_address("127.0.0.1:1"))
    assert unasked.value.kind == "unreachable"


def test_a_redirect_and_a_proxy_do_not_get_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", "none"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"mooncake_a 1")

        def log_message(self, *_: object) -> None:
            pass

    class Gateway(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", other)
            self.end_headers()

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), each) for each in (Elsewhere, Gateway)]
    other, asked = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(OSError, match="302"):
            fetch_page(f"{asked}/metrics", "mk-secret")
        with pytest.raises(ServerError):
            served_at(http_address(asked), key="mk-secret")
        monkeypatch.setenv("http_proxy", other)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(OSError):
            fetch_page("http://127.0.0.1:1/metrics", "mk-secret")
        assert seen == []
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_a_key_is_for_the_gateways_own_page_however_that_is_written() -> None:
    gateway = http_address("https://LLM.example.org/v1")
    for own in (gateway.metrics_url, "https://llm.example.org/metrics"):
        assert gateway.key_for(own, "mk-secret") == "mk-secret"
    for other in (
        "http://llm.example.org/metrics",
        "https://llm.example.org:444/metrics",
        "",
        "x",
        "https://llm.example.org@a/metrics",
        "https://llm.example.org/other",
        "https://[/metrics",
    ):
        assert gateway.key_for(other, "mk-secret") == "", other


def test_addresses_of_openais_interface() -> None:
    assert http_address("127.0.0.1:9000") == HttpAddress("127.0.0.1", 9000)
    assert http_address("http://a:1/v1") == HttpAddress("a", 1)
    assert http_address("https://llm.example.org/v1/").url == "https://llm.example.org:443"
    assert http_address("[::1]:90").netloc == "[::1]:90"
    for wrong in ("a", "ftp://a:1", "a:b", "http://a:1/v2", "", "a:99999"):
        with pytest.raises(ValueError, match="no address of OpenAI's interface"):
            http_address(wrong)
