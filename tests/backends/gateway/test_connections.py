"""What a connection may do to a gateway: come slowly, not at all, ambiguously, or never read."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.gateway import connections, frontend_calls
from backends.gateway.app import PATHS
from backends.gateway.doors import BODIES_MAX
from backends.gateway.request.fields import CHAT, COMPLETION
from tests.backends.gateway.rig import BODY_BYTES_MAX, PROMPT, WAIT_S_MAX, Rig, run, until
from tests.backends.gateway.test_tls import Authority, shown

POST = f"POST {PATHS[COMPLETION]} HTTP/1.1\r\nHost: x\r\n"
GET = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Line:
    """One connection, and what comes back on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: str) -> None:
        self.writer.write(text.encode("latin-1"))

    async def all(self) -> bytes:
        """Until the gateway closes it."""
        return await asyncio.wait_for(self.reader.read(), WAIT_S_MAX)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S_MAX)

    async def refused(self) -> tuple[int, str]:
        """Status and code of what is answered before the connection is closed."""
        raw = await self.all()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        return int(head.split()[1]), json.loads(body)["error"]["code"]


@asynccontextmanager
async def line(rig: Rig, source: str = "127.0.0.1") -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, local_addr=(source, 0))
    try:
        yield Line(reader, writer)
    finally:
        writer.close()


def body_of(fields: dict[str, Any]) -> str:
    content = json.dumps(fields)
    return f"{POST}Content-Length: {len(content)}\r\n\r\n{content}"


def test_a_head_that_does_not_come_or_trickles_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time begins with the connection, and more bytes give no more of it."""
    monkeypatch.setattr(connections, "HEAD_S_MAX", 1.0)

    async def check(rig: Rig) -> None:
        async with line(rig) as silent, line(rig) as trickling:
            for letter in "GET":
                trickling.send(letter)
                await asyncio.sleep(0)
            assert await silent.refused() == (408, "slow_request")
            assert await trickling.refused() == (408, "slow_request")
        async with line(rig) as again:
            again.send(GET)
            assert b"200" in await again.head()
            await again.reader.readexactly(len('{"status":"alive"}'))
            again.send("POST /v1/comp")  # a head over keep-alive has the same time
            assert await again.refused() == (408, "slow_request")
        await until(lambda: not rig.server.server_state.connections)

    run(check)


def test_a_connection_between_two_requests_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S_MAX", 1.0)

    async def check(rig: Rig) -> None:
        async with line(rig) as kept:
            kept.send(GET)
            await kept.head()
            async with line(rig) as slow:
                assert await slow.refused() == (408, "slow_request"), "so much time has passed"
            kept.send(GET)
            await kept.reader.readuntil(b"HTTP/1.1 200")

    run(check)


def test_a_body_that_never_comes_or_trickles_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S_MAX", 1.0)

    async def check(rig: Rig) -> None:
        for framing in ("Content-Length: 100", "Transfer-Encoding: chunked"):
            async with line(rig) as silent, line(rig) as trickling:
                silent.send(f"{POST}{framing}\r\n\r\n")
                trickling.send(f"{POST}{framing}\r\n\r\n")
                trickling.send("1\r\n{\r\n" if "chunked" in framing else "{")
                assert await silent.refused() == (408, "slow_request")
                assert await trickling.refused() == (408, "slow_request")
        async with line(rig) as refused:  # whose body nobody wants, and who keeps sending it
            refused.send("POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n{")
            assert b"404" in await refused.head()
            await refused.all()
        await until(lambda: not rig.server.server_state.connections)
        await until(lambda: not rig.gateway.counts.in_flight)
        assert not rig.frontend.requests
        assert 'refusals_total{code="slow_request"} 5\n' in rig.gateway.counts.page()

    run(check)


def test_a_slow_answer_is_no_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S_MAX", "BODY_S_MAX", "STALLED_S_MAX"):
        monkeypatch.setattr(connections, name, 1.0)

    async def check(rig: Rig) -> None:
        rig.frontend.interval_s = 1.2
        answer = await rig.say("hi", max_tokens=2, stream=True)
        assert answer.events[-1] == "[DONE]" and len(answer.events) == 3

    run(check)


def test_connections_above_the_limit_are_503_and_those_below_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)

    async def check(rig: Rig) -> None:
        async with line(rig) as first, line(rig) as second:
            for each in (first, second):
                each.send(body_of({"prompt": "silent"}))
            await until(lambda: len(rig.frontend.requests) == 2)
            async with line(rig) as third:
                assert await third.refused() == (503, "unavailable")
            assert rig.gateway.counts.in_flight == 2

    run(check)


@pytest.mark.parametrize("limit", ["OF_ADDRESS_MAX", "CONNECTIONS_MAX"])
def test_the_connection_that_is_idle_for_the_longest_makes_room(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, limit, 3)

    async def check(rig: Rig) -> None:
        async with line(rig) as busy, line(rig) as oldest, line(rig) as trickling:
            busy.send(body_of({"prompt": "silent"}))
            await until(lambda: rig.frontend.requests)
            trickling.send("GE")
            for _ in range(5):
                async with line(rig) as newest:
                    newest.send(GET)
                    assert b"200" in await newest.head()
            for gone in (oldest, trickling):
                assert await asyncio.wait_for(gone.reader.read(), WAIT_S_MAX) == b""
            assert rig.gateway.counts.in_flight == 1, "a request in hand is not ended"

    run(check)


@pytest.fixture
def two_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four connections in all."""
    monkeypatch.setattr(connections, "OF_ADDRESS_MAX", 2)
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)


@pytest.mark.usefixtures("two_for_an_address")
def test_one_address_leaves_room_for_others_though_all_of_its_connections_are_busy() -> None:
    async def check(rig: Rig) -> None:
        async with line(rig) as one, line(rig) as two:
            for each in (one, two):
                each.send(body_of({"prompt": "silent"}))
            await until(lambda: len(rig.frontend.requests) == 2)
            async with line(rig) as three:
                assert await three.refused() == (503, "unavailable")
            async with line(rig, "127.0.0.2") as other:
                other.send(GET)
                assert b"200" in await other.head()

    run(check)


@pytest.mark.usefixtures("two_for_an_address")
def test_an_address_at_its_limit_closes_no_connection_of_another() -> None:
    async def check(rig: Rig) -> None:
        async with line(rig, "127.0.0.2") as one, line(rig, "127.0.0.2") as two:
            await until(lambda: len(rig.listener.connections) == 2)
            async with AsyncExitStack() as stack:
                for _ in range(12):
                    await stack.enter_async_context(line(rig))
                for kept in (one, two):
                    kept.send(GET)
                    assert b"200" in await kept.head()

    run(check)


def test_a_flood_beyond_all_limits_gives_the_loop_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 0)
    monkeypatch.setattr(connections, "REFUSED_MAX", 0)

    async def check() -> None:
        with connections.BoundedListener() as listener:
            pairs = [socket.socketpair() for _ in range(3)]
            waiting = iter([(one.detach(), ("127.0.0.1", 1)) for one, _ in pairs])
            monkeypatch.setattr(listener, "_accept", lambda: next(waiting), raising=False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert len(list(waiting)) == 2, "one is refused in a turn"

    asyncio.run(check())


def test_silent_handshakes_are_counted_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection counts from accept on, so TLS hides none."""
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(connections, "HANDSHAKE_S_MAX", 1.0)
    ours = Authority("ours")

    async def check(rig: Rig) -> None:
        async with AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(line(rig)) for _ in range(12)]
            assert (await shown(rig, ours.trust)).version
            for each in silent:
                assert await asyncio.wait_for(each.reader.read(), WAIT_S_MAX) == b""
        await until(lambda: not rig.listener.connections)

    run(check, listening=ours.write(tmp_path))


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_of_ipv6_counts_by_its_network(host: str, network: str) -> None:
    assert connections.network_of(host) == network


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_sends_more_and_leaves_ends_its_call(is_stream: bool) -> None:
    """A second request behind the first one must not hide the end of the connection."""

    async def check(rig: Rig) -> None:
        async with line(rig) as ahead:
            ahead.send(body_of({"prompt": "silent", "stream": is_stream}))
            await until(lambda: rig.frontend.requests)
            ahead.send(GET)
            await until(lambda: _waiting(rig))
        await until(lambda: rig.frontend.cancelled == 1)
        await until(lambda: not rig.gateway.counts.in_flight)

    run(check)


def test_requests_sent_ahead_are_answered_in_their_order_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "AHEAD_BYTES_MAX", 1000)

    async def check(rig: Rig) -> None:
        async with line(rig) as ahead:
            ahead.send(body_of({"prompt": "hi"}) + GET)
            assert b"x-request-id" in await ahead.head()
            await ahead.reader.readuntil(b'"status":"alive"}')
        async with line(rig) as endless:
            endless.send(body_of({"prompt": "silent"}))
            await until(lambda: len(rig.frontend.requests) == 2)
            endless.send(GET * 100)
            with pytest.raises(ConnectionError):
                await endless.all()
                raise ConnectionResetError  # closed with or without a word
        await until(lambda: rig.frontend.cancelled == 1)

    run(check)


def _waiting(rig: Rig) -> bool:
    return any(each.conn.trailing_data[0] for each in rig.server.server_state.connections)


@pytest.mark.slow
def test_who_reads_nothing_holds_little_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend is as fast as it is read, so what waits here is bounded: some 20 MB would be."""
    monkeypatch.setattr(connections, "STALLED_S_MAX", 0.2)

    async def check(rig: Rig) -> None:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the kernel takes megabytes
        with deaf:
            deaf.connect(("127.0.0.1", rig.port))
            fields = {"prompt": "hi", "max_tokens": 100_000, "stream": True}
            deaf.sendall(body_of(fields).encode())
            await until(lambda: any(each.flow.write_paused for each in _connections(rig)))
            [connection] = _connections(rig)
            assert connection.transport.get_write_buffer_size() < 2**17
            await until(lambda: not rig.gateway.counts.in_flight)
            assert not _connections(rig)

    run(check)


def _connections(rig: Rig) -> list[Any]:
    return list(rig.server.server_state.connections)


@pytest.mark.parametrize(
    "said",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "Content-Length: 2, 3\r\n\r\n{}",
        "Content-Length: +2\r\n\r\n{}",
        "Content-Length: -2\r\n\r\n{}",
        f"Content-Length: {'9' * 30}\r\n\r\n{{}}",
        "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        "Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2\r\n\r\n{}",
        "Host: y\r\nContent-Length: 2\r\n\r\n{}",
        "A: b\rc\r\n\r\n",
        "A\x00: b\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_400_and_the_connections_end(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy before us might find another request in it."""

    async def check(rig: Rig) -> None:
        async with line(rig) as smuggler:
            smuggler.send(POST + said + GET)
            assert await smuggler.refused() == (400, "invalid_request")
        await until(lambda: not rig.gateway.counts.in_flight)
        assert not rig.frontend.requests

    caplog.set_level(logging.WARNING)
    run(check)
    assert not caplog.records, "anybody could fill the log"


def test_garbage_behind_an_answer_ends_the_connection_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(rig: Rig) -> None:
        async with line(rig) as late:
            late.send("POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert b"404" in await late.head()
            late.send("zz\r\n")
            await late.all()

    run(check)
    assert not caplog.records


def test_a_body_shorter_or_longer_than_it_says_is_no_other_request() -> None:
    async def check(rig: Rig) -> None:
        async with line(rig) as longer:  # the rest is the beginning of a request that is none
            longer.send(body_of({"prompt": "hi"}).replace('"hi"}', '"hi"} }'))
            assert b"400" in await longer.head() or rig.frontend.requests
        async with line(rig) as shorter:
            shorter.send(f"{POST}Content-Length: 50\r\n\r\n" + '{"prompt": "hi"}')
            await until(lambda: rig.gateway.counts.in_flight)
        await until(lambda: not rig.gateway.counts.in_flight)

    run(check)


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    async def check(rig: Rig) -> None:
        async with line(rig) as chunks:
            chunks.send(f"{POST}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(BODY_BYTES_MAX // 500 + 1):
                chunks.send("1f4\r\n" + " " * 500 + "\r\n")
            assert b" 413 " in await chunks.head()

    run(check)


def test_bodies_take_so_much_memory_in_all_and_those_that_came_first_go_on() -> None:
    """Until their answers begin. Each alone is within its limit."""
    part = " " * (BODY_BYTES_MAX - 100)
    whole = json.dumps({**PROMPT[COMPLETION], "max_tokens": 1})
    begun = f"{POST}Connection: close\r\nContent-Length: {len(part) + len(whole)}\r\n\r\n{part}"

    async def check(rig: Rig) -> None:
        async with AsyncExitStack() as stack:
            count = BODIES_MAX + 2  # as each is a little shorter than it may be
            lines = [await stack.enter_async_context(line(rig)) for _ in range(count)]
            for each in lines:
                each.send(begun)
            heads = {asyncio.ensure_future(each.head()): each for each in lines}
            refused, waiting = await asyncio.wait(
                heads, timeout=WAIT_S_MAX, return_when=asyncio.FIRST_COMPLETED
            )
            assert 1 <= len(refused) <= 2, "one has to be too many"
            assert all(b" 503 " in each.result() for each in refused)
            for each in waiting:
                heads[each].send(whole)
            for each in waiting:
                answered = await each
                assert b" 200 " in answered or b" 503 " in answered
            assert sum(b" 200 " in each.result() for each in heads) >= BODIES_MAX
        async with line(rig) as later:
            later.send(begun + whole)
            assert b" 200 " in await later.head(), "they hold nothing any more"

    run(check)


def test_what_is_written_is_sent_at_once_and_silent_clients_are_probed() -> None:
    async def check(rig: Rig) -> None:
        async with line(rig):
            await until(lambda: _connections(rig))
            [connection] = _connections(rig)
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            probes = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert probes == connections.PROBE_IDLE_S

    run(check)


def test_methods_that_a_path_does_not_take_are_named() -> None:
    async def check(rig: Rig) -> None:
        for method, path, allowed in (
            ("GET", PATHS[CHAT], "POST"),
            ("HEAD", PATHS[CHAT], "POST"),
            ("OPTIONS", PATHS[COMPLETION], "POST"),
            ("POST", "/health", "GET"),
            ("DELETE", "/v1/models/demo", "GET"),
            ("PUT", "/tokenize", "POST"),
        ):
            answer = await rig.send(method, path)
            assert (answer.status, answer.headers["allow"]) == (405, allowed), (method, path)
            assert bool(answer.body) == (method != "HEAD")
        head, get = [await rig.send(method, "/health") for method in ("HEAD", "GET")]
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]

    run(check)


def test_json_that_other_readers_read_otherwise() -> None:
    async def check(rig: Rig) -> None:
        twice = b'{"prompt": "hi", "max_tokens": 1, "max_tokens": 2, "tenant": "a", "tenant": "b"}'
        assert (await rig.send("POST", PATHS[COMPLETION], twice)).status == 200
        [sent] = rig.frontend.requests
        assert sent.parameters["tenant"].string_param == "b", "the last one, as in Python"
        for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000):
            for name in (b"temperature", b"max_tokens", b"seed", b"timeout", b"n"):
                body = b'{"prompt": "hi", "%s": %s}' % (name, value)
                assert (await rig.send("POST", PATHS[COMPLETION], body[:3999])).status == 400
        for text in (b"\\ud800", b"\\udc00\\ud800", b"\xed\xa0\x80", b"\xff", b"\xc0\x80"):
            for name in (b"model", b"user", b"tenant", b"prompt"):
                body = b'{"prompt": "hi", "%s": "%s"}' % (name, text)
                assert (await rig.send("POST", PATHS[COMPLETION], body)).status == 400

    run(check)


def test_deep_nesting_is_400_wherever_it_is() -> None:
    async def check(rig: Rig) -> None:
        rig.gateway.doors._body_bytes_max = 2**20
        for depth in (*range(890, 1000, 20), 5000):
            deep = "[" * depth + "]" * depth
            for field in ("temperature", "prompt", "tools", "stop", "tenant"):
                body = f'{{"prompt": "hi", "{field}": {deep}}}'.encode()
                answer = await rig.send("POST", PATHS[COMPLETION], body)
                assert answer.status == 400, (depth, field, answer.body)
        for depth in range(940, 1000, 4):  # what is read is written again here
            deep = '{"a":' * depth + "1" + "}" * depth
            schema = f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
            body = f'{{"prompt": "hi", "response_format": {schema}}}'.encode()
            answer = await rig.send("POST", PATHS[COMPLETION], body)
            assert answer.status in (200, 400), (depth, answer.body)

    run(check)


def test_the_content_type_is_not_asked_for_and_a_packed_body_is_415() -> None:
    async def check(rig: Rig) -> None:
        body = json.dumps(PROMPT[COMPLETION]).encode()
        for given in ("application/json", "text/plain", "application/x-www-form-urlencoded", ""):
            answer = await rig.send("POST", PATHS[COMPLETION], body, Content_Type=given)
            assert answer.status == 200, given
        answer = await rig.send(
            "POST", PATHS[COMPLETION], b"\x1f\x8b\x08\x00", Content_Encoding="gzip"
        )
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")

    run(check)


def test_a_whole_answer_does_not_wait_for_the_end_of_its_call() -> None:
    """The conductor's last message says that it is the last."""

    async def check(rig: Rig) -> None:
        answer = await rig.say("linger:", max_tokens=2)
        assert answer.status == 200 and rig.gateway.counts.in_flight == 1
        assert rig.frontend.cancelled == 0
        [task] = rig.server.server_state.tasks
        task.cancel()  # and not for END_S_MAX

    run(check)


def test_a_call_that_stays_open_behind_its_last_piece_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontend_calls, "END_S_MAX", 0.0)

    async def check(rig: Rig) -> None:
        for is_stream in (False, True):
            answer = await rig.say("linger:", max_tokens=2, stream=is_stream)
            assert answer.status == 200 and b'"length"' in answer.body
        await until(lambda: not rig.gateway.counts.in_flight)
        assert "mooncake_gateway_clients_left_total 0\n" in rig.gateway.counts.page()

    run(check)


def test_a_proxy_of_the_environment_is_not_asked_for_the_frontend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def check(rig: Rig) -> None:
            assert (await rig.post(CHAT)).status == 200

        run(check)


def test_a_text_with_lines_and_events_in_it_is_one_event() -> None:
    """Nothing that a model says can end an event, or begin another one."""

    async def check(rig: Rig) -> None:
        said = "data: [DONE]\n\ndata: {}\r\n\r\n\u2028event: error\n"
        answer = await rig.say(f"break:unavailable: {said}", stream=True)
        *_, last = answer.events
        assert last["error"]["message"].startswith("data: [DONE]\n\n")
        assert answer.body.count(b"data: ") - answer.body.count(b"\\ndata: ") == 5 + 0

    run(check)


def test_a_request_id_cannot_write_lines_or_headers_of_its_own() -> None:
    async def check(rig: Rig) -> None:
        for given in ("a b", "a\tb", "a\x7fb", "\xe9", "a" * 257):
            async with line(rig) as each:
                each.send(
                    f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: {given}\r\n"
                    "Connection: close\r\n\r\n"
                )
                head = await each.head()
                assert given.encode("latin-1") not in head and b"x-request-id: " in head

    run(check)
