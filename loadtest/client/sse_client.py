"""HTTP to OpenAI's interface, and the times at which its events arrive: a connection for a request.

Bytes over a socket, because a client library costs more for each event than the gateway does; so
one process can take the times of many streams. Not here: what clients of people do
(the package `openai` in tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVENT = b"data: "
DONE = b"data: [DONE]"


@dataclass(slots=True)
class SseAnswer:
    """What came: the status, and when each event came, [DONE] left out."""

    status: int = 0
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    is_done: bool = False
    body: bytes = b""  # of an answer that is no stream

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s


async def ask(
    address: str, path: str, body: Mapping[str, Any], key: str = "", events_max: int | None = None
) -> SseAnswer:
    """Reads to the end, or leaves after `events_max` events, as a client that is killed does."""
    host, _, port = address.rpartition(":")
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(content)}",
             "Content-Type: application/json", "Connection: close"]  # fmt: skip
    lines += [f"Authorization: Bearer {key}"] if key else []
    answer = SseAnswer(sent_s=time.perf_counter())
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
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
