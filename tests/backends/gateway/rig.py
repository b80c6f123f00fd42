"""A gateway on a port, in front of a frontend that answers what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from backends.gateway.app import PATHS, Gateway, GatewaySettings
from backends.gateway.connections import BoundedListener
from backends.gateway.doors import read_origins
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.gateway.server import DrainingServer, Listening, draining_server, listening_socket
from backends.tenants import ApiKeys
from bench.harness.replayed_frontend import ReplayedFrontend

SECRET = "a-secret"
KEYS = {
    "tenants": {"acme": {}, "other": {}},
    "keys": [
        {"sha256": hashlib.sha256(f"key-of-{name}".encode()).hexdigest(), "tenant": name}
        for name in ("acme", "other")
    ],
}
BODY_BYTES_MAX = 4000
WAIT_S_MAX = 20.0
LOOPBACK = Listening("127.0.0.1", 0)


@dataclass(slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.json.keys() == {"error"}
        assert self.json["error"].keys() == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream; the text [DONE] as it is."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        said = [part.removeprefix("data: ") for part in parts]
        return [each if each == "[DONE]" else json.loads(each) for each in said]


@dataclass(slots=True)
class Rig:
    frontend: ReplayedFrontend
    gateway: Gateway
    server: DrainingServer
    listener: BoundedListener
    port: int
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def send(
        self, method: str, path: str, body: bytes | Any = b"", **headers: str
    ) -> HttpAnswer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = {"Host": self.address, "Connection": "close", "Content-Length": str(len(content))}
        said |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in said.items() if v)]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        raw = await asyncio.wait_for(reader.read(), WAIT_S_MAX)
        writer.close()
        head, _, rest = raw.partition(b"\r\n\r\n")
        first, *more = head.decode().split("\r\n")
        found = {k.lower(): v for k, _, v in (line.partition(": ") for line in more)}
        if found.get("transfer-encoding") == "chunked":
            rest = unchunked(rest)
        return HttpAnswer(int(first.split()[1]), found, rest)

    async def post(self, route: str, **fields: Any) -> HttpAnswer:
        return await self.send("POST", PATHS[route], {**PROMPT[route], **fields})

    async def say(self, words: str, **fields: Any) -> HttpAnswer:
        """A completion whose prompt tells the frontend what to do."""
        return await self.post(COMPLETION, prompt=words, **fields)


PROMPT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}


def unchunked(raw: bytes) -> bytes:
    found = b""
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        length = int(size, 16)
        found, raw = found + rest[:length], rest[length + 2 :]
        if not length:
            break
    return found


@contextlib.asynccontextmanager
async def rig(
    keys: ApiKeys | None = None, listening: Listening = LOOPBACK, origins: str = ""
) -> AsyncIterator[Rig]:
    frontend = ReplayedFrontend()
    settings = GatewaySettings(
        f"127.0.0.1:{await frontend.start()}",
        body_bytes_max=BODY_BYTES_MAX,
        allowed_origins=read_origins(origins),
    )
    gateway = Gateway(settings, keys)
    with contextlib.closing(listening_socket(listening)) as listener:
        server = draining_server(gateway, listening, WAIT_S_MAX, listener)
        serving = asyncio.ensure_future(server.serve([listener]))
        made = Rig(frontend, gateway, server, listener, listener.getsockname()[1])
        try:
            await until(lambda: server.started and gateway.calls.is_ready)
            yield made
        finally:
            server.should_exit = True
            await serving
            await frontend.stop()


async def until(condition: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < give_up_s, "waited in vain"
        await asyncio.sleep(0.01)


def run(
    test: Callable[[Rig], Awaitable[None]],
    keys: ApiKeys | None = None,
    listening: Listening = LOOPBACK,
    origins: str = "",
) -> None:
    async def within() -> None:
        async with rig(keys, listening, origins) as made:
            await test(made)

    asyncio.run(within())
