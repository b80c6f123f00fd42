"""One process of the gateway: it listens, serves, and drains when it is asked to end.

At SIGTERM (or SIGINT) `/ready` says 503 at once, new requests are refused, and what streams goes
on to its end, for `drain_s_max` at most; then the process ends. Several processes may listen on
one port, and the kernel gives each some of the connections.

Not here: routes (app.py), who starts the processes (backends/launcher).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import sys
from dataclasses import dataclass
from types import FrameType

import uvicorn

from backends.gateway.app import Gateway

BACKLOG = 2048
KEEP_ALIVE_S = 75  # clients keep connections between requests
POLL_S = 0.05
CUT_OFF_S = 1  # what still streams when draining takes too long


@dataclass(frozen=True, slots=True)
class Listening:
    host: str
    port: int
    is_shared: bool = False  # with the gateway's other processes
    certificate: str = ""  # PEM file; "": plain HTTP
    private_key: str = ""


class DrainingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gateway: Gateway, drain_s_max: float) -> None:
        super().__init__(config)
        self._gateway, self._drain_s_max = gateway, drain_s_max
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would close the port first; a load balancer has to hear of it before."""
        if self._gateway.doors.is_draining or self._loop is None:
            self.should_exit = True  # asked twice: now
            return
        self._gateway.doors.is_draining = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._until_drained())

    async def _until_drained(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._drain_s_max
        while self._gateway.counts.in_flight and loop.time() < give_up_s:
            await asyncio.sleep(POLL_S)
        self.should_exit = True


def listening_socket(listening: Listening) -> socket.socket:
    """OSError when somebody else has the port."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listening.is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((listening.host, listening.port))
    listener.set_inheritable(True)
    return listener


async def answer_own_page(
    gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """What this process counted, whatever is asked: for the launcher, on loopback."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        await reader.readuntil(b"\r\n\r\n")
        page = gateway.counts.page().encode()
        head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(page)}\r\n\r\n"
        writer.write(head.encode() + page)
        await writer.drain()
    writer.close()


def draining_server(gateway: Gateway, listening: Listening, drain_s_max: float) -> DrainingServer:
    config = uvicorn.Config(
        gateway.app, log_level="warning", access_log=False, server_header=False, lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CUT_OFF_S, backlog=BACKLOG,
        ws="none", proxy_headers=False,
        ssl_certfile=listening.certificate or None, ssl_keyfile=listening.private_key or None,
    )  # fmt: skip
    if listening.certificate:
        config.load()
        assert config.ssl is not None
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return DrainingServer(config, gateway, drain_s_max)


def serve(
    gateway: Gateway, listening: Listening, drain_s_max: float, own_metrics_port: int = 0
) -> None:
    """Until it is asked to end. `own_metrics_port`: on loopback, for the launcher; 0: none."""
    listener = listening_socket(listening)
    server = draining_server(gateway, listening, drain_s_max)
    scheme = "https" if listening.certificate else "http"

    async def run() -> None:
        if own_metrics_port:
            await asyncio.start_server(
                functools.partial(answer_own_page, gateway), "127.0.0.1", own_metrics_port
            )
        serving = asyncio.ensure_future(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        if not serving.done():
            print(f"ready: {scheme}://{listening.host}:{listening.port}/v1", flush=True)
        await serving

    try:
        asyncio.run(run())
    finally:
        listener.close()
        sys.stdout.flush()
