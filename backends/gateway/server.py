"""One gateway process: listens, serves, and drains at SIGTERM.

After SIGTERM or SIGINT, `/ready` returns 503 and new requests are rejected. The process exits when
its requests have ended, at a second signal, or after `drain_s_max`. Several processes may listen on
one port, and the kernel distributes the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from backends.gateway.app import Gateway
from backends.gateway.connections import (
    CONNECTIONS_MAX,
    HANDSHAKE_S_MAX,
    KEEP_ALIVE_S,
    BoundedConnection,
    BoundedListener,
    probe_clients,
)
from mooncake_store.keys.folder import LiveFiles

BACKLOG = 2048
POLL_S = 0.05
OWN_READERS_MAX = 64  # limit of open connections to this process's metrics page
CUT_OFF_S = 1  # seconds from the end of the drain until remaining streams are cut off


@dataclass(frozen=True, slots=True)
class Listening:
    host: str
    port: int
    is_shared: bool = False  # True if other gateway processes listen on the port too
    certificate: str = ""  # PEM file; "": plain HTTP
    private_key: str = ""  # PEM file of the certificate's key


class DrainingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gateway: Gateway, drain_s_max: float) -> None:
        super().__init__(config)
        self._gateway, self._drain_s_max = gateway, drain_s_max
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain. The port stays open, so that load balancers can read /ready."""
        if self._gateway.doors.is_draining or self._loop is None:
            self.should_exit = True  # a second signal ends the drain
            return
        self._gateway.doors.is_draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._until_drained(), self._loop)

    async def _until_drained(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._drain_s_max
        while self._gateway.counts.in_flight and loop.time() < give_up_s:
            await asyncio.sleep(POLL_S)
        self.should_exit = True


def listening_socket(listening: Listening) -> BoundedListener:
    """A bound socket. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without TCP_NODELAY, an
    # event of a stream waits 40 ms for the client's delayed acknowledgement of the event before.
    listener = BoundedListener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.has_tls = bool(listening.certificate)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listening.is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    probe_clients(listener)
    listener.bind((listening.host, listening.port))
    listener.set_inheritable(True)
    return listener


def allow_descriptors(wanted: int) -> None:
    """Raise the limit of open files to `wanted`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def answer_own_page(
    gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer any request with this process's metrics. The launcher reads them on loopback."""
    if len(gateway.own_readers) >= OWN_READERS_MAX:
        writer.close()
        return
    gateway.own_readers.add(writer)
    gone = OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError
    with contextlib.suppress(*gone):
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANDSHAKE_S_MAX)
        page = gateway.counts.page().encode()
        head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(page)}\r\n\r\n"
        writer.write(head.encode() + page)
        await writer.drain()
    gateway.own_readers.discard(writer)
    writer.close()


def tls_context(listening: Listening) -> ssl.SSLContext:
    """A TLS context. New connections use a certificate that was renewed on disk, unless it is
    invalid. Raises KeysInvalid if the certificate is invalid at the start."""

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(listening.certificate, listening.private_key)
        return context

    live = LiveFiles([Path(listening.certificate), Path(listening.private_key)], read)
    context = live.get()

    def newest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = live.get()

    context.sni_callback = newest  # called at each handshake, also for clients without SNI
    return context


def draining_server(
    gateway: Gateway, listening: Listening, drain_s_max: float, listener: BoundedListener
) -> DrainingServer:
    config = uvicorn.Config(
        gateway.app,
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_OFF_S,
        backlog=BACKLOG,
        ws="none",
        proxy_headers=False,
        http=functools.partial(  # type: ignore[arg-type]
            BoundedConnection, gateway.counts, listener
        ),
    )
    config.load()
    if listening.certificate:
        config.ssl = tls_context(listening)
    return DrainingServer(config, gateway, drain_s_max)


def serve(
    gateway: Gateway, listening: Listening, drain_s_max: float, own_metrics_port: int = 0
) -> None:
    """Serve until a signal. `own_metrics_port`: loopback port of the metrics page; 0: no page."""
    allow_descriptors(2 * CONNECTIONS_MAX)
    listener = listening_socket(listening)
    server = draining_server(gateway, listening, drain_s_max, listener)
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
