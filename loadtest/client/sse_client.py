"""HTTP by asyncio: a POST, and the times at which the events of its answer arrive.

It reads bytes from a socket, because a client library costs more per event than the gateway does.
So one process can take the times of many streams. Each request has a connection of its own, and
connecting counts towards its TTFT. `SseClient` sends load over any HTTP interface; `ask` only takes
times. Not here: request bodies and the meaning of events (http_interfaces.py), the `openai` package
(tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtest.client.http_interfaces import (
    EVENT_STREAM,
    INCOMPLETE,
    HttpInterface,
    PostedRequest,
    data_of,
    shown,
)
from loadtest.client.openai_server import HttpAddress
from loadtest.client.protocol import REQUEST_S_MAX, GenerateRequest, ServerError, TokenEvent

EVENT = b"data: "
DONE = b"data: [DONE]"
HEAD_BYTES_MAX = 2**16
LINE_BYTES_MAX = 2**24  # a list of log probabilities of tokens is long
READ_BYTES = 2**16


@dataclass(slots=True)
class SseAnswer:
    """The status, and the arrival time of each event except [DONE]."""

    status: int = 0
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    is_done: bool = False
    body: bytes = b""  # of a response that is no stream

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s


async def ask(
    address: str, path: str, body: Mapping[str, Any], key: str = "", events_max: int | None = None
) -> SseAnswer:
    """Reads to the end, or leaves after `events_max` events, like a client that is killed."""
    host, _, port = address.rpartition(":")
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    answer = SseAnswer(sent_s=time.perf_counter())
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            request_bytes(address, PostedRequest(path, headers, json.dumps(body).encode()))
        )
        head = await reader.readuntil(b"\r\n\r\n")
        answer.status = int(head.split(b" ", 2)[1])
        if b"text/event-stream" not in head:
            answer.body = await reader.read()
            return answer
        async for line in reader:
            if line.startswith(DONE):
                answer.is_done = True
            elif line.startswith(EVENT):
                answer.times_s.append(time.perf_counter())
                if events_max is not None and len(answer.times_s) >= events_max:
                    break
        return answer
    finally:
        writer.transport.abort() if events_max is not None else writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request_bytes(host: str, posted: PostedRequest) -> bytes:
    lines = [
        f"POST {posted.path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        f"Content-Length: {len(posted.body)}",
    ]
    lines += [f"{name}: {value}" for name, value in posted.headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + posted.body


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    headers: Mapping[str, str]  # by name in small letters

    @classmethod
    def parsed(cls, raw: bytes) -> ResponseHead:
        """ValueError for bytes that are not HTTP."""
        first, *lines = raw.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/"):
            raise ValueError(f"the server does not speak HTTP: {first[:40]!r}")
        parts = (line.partition(":") for line in lines if line)
        return cls(int(rest[:3]), {name.strip().lower(): v.strip() for name, _, v in parts})


class SseClient:
    """Sends requests. Use it inside one event loop."""

    def __init__(
        self,
        address: HttpAddress,
        interface: HttpInterface,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.address = address
        self._interface = interface
        self._now_s = now_s
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def __aenter__(self) -> SseClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close: no connection outlives its request."""

    async def generate(
        self, request: GenerateRequest, timeout_s: float = REQUEST_S_MAX
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request as they arrive. Leaving the loop early cancels the request."""
        deadline = RequestDeadline(timeout_s)
        answer = self._interface.reader()
        try:
            reader, writer = await asyncio.wait_for(self._connected(), timeout_s)
            deadline.closes(writer)
            writer.write(request_bytes(self.address.netloc, self._interface.posted(request)))
            head = ResponseHead.parsed(await reader.readuntil(b"\r\n\r\n"))
            body = body_of(reader, head)
            if head.status != 200 or EVENT_STREAM not in head.headers.get("content-type", ""):
                whole = b"".join([part async for part in body])
                retry_after = head.headers.get("retry-after", "")
                raise self._interface.refusal(head.status, retry_after, whole)
            async for line in lines_of(body):
                data = data_of(line)
                if data and (event := answer.read(data, self._now_s())) is not None:
                    yield event
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            if not deadline.is_over(error):
                raise ServerError("unreachable", f"{self.address.url}: {why(error)}") from None
        finally:
            deadline.cancel()
        if deadline.is_over():
            raise ServerError("timeout", f"{self.address.url}: no complete answer in time")
        if not answer.is_finished:
            raise ServerError("incomplete", INCOMPLETE)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.address.host, self.address.port
        return await asyncio.open_connection(host, port, ssl=self._tls, limit=HEAD_BYTES_MAX)


class RequestDeadline:
    """Closes the connection at the deadline; one timer per event would cost too much."""

    def __init__(self, timeout_s: float) -> None:
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end)
        self._writer: asyncio.StreamWriter | None = None

    def closes(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def is_over(self, error: Exception | None = None) -> bool:
        return self._is_over or isinstance(error, asyncio.TimeoutError)

    def cancel(self) -> None:
        """Close the connection without waiting for the remaining events."""
        self._timer.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    def _end(self) -> None:
        self._is_over = True
        if self._writer is not None:
            self._writer.transport.abort()


def why(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection broke off in the middle of an answer"
    return str(error) or type(error).__name__


async def body_of(reader: asyncio.StreamReader, head: ResponseHead) -> AsyncIterator[bytes]:
    """The parts of a body: chunks, a given number of bytes, or all until the connection ends."""
    if head.headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif (length := head.headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        while part := await reader.read(READ_BYTES):
            yield part


async def lines_of(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines without their ends; one line may span several parts."""
    begun = b""
    async for part in parts:
        *lines, begun = (begun + part).split(b"\n")
        if len(begun) > LINE_BYTES_MAX:
            raise ValueError(f"an event of more than {LINE_BYTES_MAX:,} bytes: {shown(begun[:40])}")
        for line in lines:
            yield line
    if begun:
        yield begun
