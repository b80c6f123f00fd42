"""Our listeners as processes with keys, and their clients: what is fuzzed, and how it is asked.

A process is asked whether it serves, how many files it has open and how much memory it holds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import zmq

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.curve import PeerAccess
from mooncake_store.keys.folder import VARIABLE
from mooncake_store.keys.tls import TlsContexts
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.tcp_tls import client_handshake
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import ByteSpan
from mooncake_store.wire.mailbox import Inbox, Outbox
from mooncake_store.wire.node_protocol import NodeClient
from tests.mooncake_store.processes import StartedProcess

PATIENCE_S = 30.0
SETTLE_S_MAX = 40.0  # until connections that were refused are closed
ANY_PORT = "tcp://127.0.0.1:*"


class Listener:
    """One process and one way to it."""

    def __init__(self, name: str, pid: int, address: str, is_served: Callable[[], bool]) -> None:
        self.name, self.pid, self.address = name, pid, address
        self.is_served = is_served

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").partition("#")[0].rpartition(":")
        return host, int(port)

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def memory_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def settled_files(self, most: int) -> int:
        """As soon as they are at most so many; else how many there are in the end."""
        until_s = time.monotonic() + SETTLE_S_MAX
        while (found := self.open_files) > most and time.monotonic() < until_s:
            time.sleep(0.05)  # poll
        return found


class Site:
    """A directory, a storage node and an inbox, all on tcp:// with keys; this process has keys."""

    def __init__(self, folder: Path) -> None:
        keys = Authority.begun(folder / "keys")
        for host in ("a", "client"):
            keys.add_host(host)
        self._before = os.environ.get(VARIABLE)
        self._processes: list[StartedProcess] = []
        os.environ[VARIABLE] = str(folder / "keys" / "a")
        self.directory = self._started(
            "mooncake_store.directory",
            "--address",
            ANY_PORT,
            "--events",
            ANY_PORT,
            "--log-level",
            "ERROR",
            "--node-ttl-s",
            "60",
            log=folder / "directory.log",
        )
        self.directory_address = self.directory.ready.split("address=")[1].split()[0]
        self.events_address = self.directory.ready.split("events=")[1].split()[0]
        self.segment = f"/dev/shm/mooncake-test-doors-{os.getpid()}"
        self.node = self._started(
            "mooncake_store.node",
            "--node-id",
            "n0",
            "--directory",
            self.directory_address,
            "--events",
            self.events_address,
            "--segment-bytes",
            str(4 * 2**20),
            "--segment-path",
            self.segment,
            "--mapped-only",
            "--control",
            ANY_PORT,
            "--data",
            "127.0.0.1:0",
            "--die-with-parent",
            log=folder / "node.log",
        )
        self.inbox = self._started("tests.doors.listeners", log=folder / "inbox.log")
        self.inbox_address = self.inbox.ready.removeprefix("ready ")
        os.environ[VARIABLE] = str(folder / "keys" / "client")
        self.pongs: Inbox[str] = Inbox(ANY_PORT, _decode, self._hear)
        self._heard: set[str] = set()
        self._outbox: Outbox[str] = Outbox(_encode)
        with DirectoryClient(self.directory_address, PATIENCE_S) as client:
            (self.info,) = client.nodes()

    def _started(self, *command: str, log: Path) -> StartedProcess:
        self._processes.append(StartedProcess(list(command), log))
        return self._processes[-1]

    def _hear(self, messages: list[str]) -> None:
        self._heard.update(messages)

    @property
    def listeners(self) -> list[Listener]:
        node, directory = self.node.process.pid, self.directory.process.pid
        return [
            Listener("directory", directory, self.directory_address, self._directory_serves),
            Listener("events", directory, self.events_address, self._events_serve),
            Listener("node", node, self.info.control, self._node_serves),
            Listener("data", node, self.info.data_address, lambda: data_serves(self.info)),
            Listener("inbox", self.inbox.process.pid, self.inbox_address, self._inbox_serves),
        ]

    def _directory_serves(self) -> bool:
        with DirectoryClient(self.directory_address, PATIENCE_S) as client:
            return [info.node_id for info in client.nodes()] == ["n0"]

    def _events_serve(self) -> bool:
        with dialled(self.events_address, zmq.SUB) as stream:
            stream.subscribe(b"")
            return bool(stream.poll(PATIENCE_S * 1e3))

    def _node_serves(self) -> bool:
        with NodeClient(self.info.control) as client:
            return client.ping(PATIENCE_S) == self.info.incarnation

    def _inbox_serves(self) -> bool:
        """It sends back what it is asked with."""
        token = os.urandom(8).hex()
        until_s = time.monotonic() + PATIENCE_S
        while token not in self._heard and time.monotonic() < until_s:
            self._outbox.send(self.inbox_address, f"{self.pongs.address} {token}")
            time.sleep(0.05)  # poll: a message may be lost
        return token in self._heard

    def close(self) -> None:
        self.pongs.close()
        self._outbox.close()
        for process in reversed(self._processes):
            process.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.segment)
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before


def data_serves(info: NodeInfo) -> bool:
    """A byte of the segment is read, with the token and with TLS."""
    transport, target, span = TcpTransport(), np.zeros(1, np.uint8), ByteSpan(0, 1)
    try:
        transport.read(info, [span], [(target, span)], PATIENCE_S)
    finally:
        transport.close()
    return True


@contextmanager
def tls_connection(address: str, tls: TlsContexts) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    raw = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    with client_handshake(raw, tls, time.monotonic() + PATIENCE_S) as connection:
        yield connection


@contextmanager
def dialled(address: str, kind: int) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket with the keys of this process."""
    with zmq.Context() as context, context.socket(kind) as a_socket:
        a_socket.linger = 0
        access = PeerAccess(address)
        access.connect(a_socket)
        yield a_socket
        access.close()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(str).decode


def main() -> None:
    """An inbox that answers `ADDRESS WORD` with the word."""
    outbox: Outbox[str] = Outbox(_encode)

    def answer(messages: list[str]) -> None:
        for message in messages:
            address, _, word = message.partition(" ")
            if address.startswith("tcp://127.0.0.1:") and word:
                outbox.send(address, word)

    inbox = Inbox(ANY_PORT, _decode, answer)
    print(f"ready {inbox.address}", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)  # poll


if __name__ == "__main__":
    main()
