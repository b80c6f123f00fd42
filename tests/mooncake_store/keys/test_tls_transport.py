"""KV over TCP with mutual TLS: whole transfers, refusals that both sides understand, renewal."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mooncake_store.errors import AccessRefused, TransferFailed, TransferTimeout
from mooncake_store.keys.curve import AddressUnguarded
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports.tcp_frames import FrameKind
from mooncake_store.transports.tcp_server import TcpServer
from mooncake_store.transports.tcp_tls import TransferRefused, contexts_of_process
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import ByteSpan
from tests.mooncake_store.keys.hosts import Hosts
from tests.mooncake_store.makers import node_info

SIZE = 3 * 2**20 + 7
PATIENCE_S = 30.0


@pytest.fixture
def memory(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def server(hosts: Hosts, memory: np.ndarray) -> Iterator[TcpServer]:
    """Of host a; this process is host b from here on."""
    hosts.be("a")
    made = TcpServer(memory, "127.0.0.1", token=b"n1")
    hosts.be("b")
    yield made
    made.close()


def node_of(server: TcpServer) -> NodeInfo:
    return replace(node_info(), segment_bytes=SIZE, data_address=server.address)


def read_all(transport: TcpTransport, server: TcpServer) -> np.ndarray:
    target = np.zeros(SIZE, np.uint8)
    whole = ByteSpan(0, SIZE)
    transport.read(node_of(server), [whole], [(target, whole)], PATIENCE_S)
    return target


def wait_for_connections(server: TcpServer, count: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while server.connections != count:
        assert time.monotonic() < until_s, f"{server.connections} connections are open"
        threading.Event().wait(0.01)


def test_bytes_are_read_and_written_in_spans_of_any_size(
    server: TcpServer, memory: np.ndarray, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    transport = TcpTransport()
    assert np.array_equal(read_all(transport, server), memory)
    cuts = np.sort(rng.choice(SIZE, 600, replace=False)).tolist()
    spans = [ByteSpan(a, b - a) for a, b in itertools.pairwise(cuts)]
    source = rng.integers(0, 256, SIZE, np.uint8)
    transport.write(node_of(server), [(source, span) for span in spans], spans, PATIENCE_S)
    low, high = cuts[0], cuts[-1]
    assert np.array_equal(memory[low:high], source[low:high])
    assert np.array_equal(read_all(transport, server), memory)
    assert server.connections == 1, "one connection for all of it"
    transport.close()


def test_nothing_goes_in_plain(server: TcpServer, memory: np.ndarray) -> None:
    """What passes between the two is looked at by a relay in between."""
    seen = bytearray()
    relay = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65_536):
            seen.extend(data)
            sink.sendall(data)

    def serve() -> None:
        client, _ = relay.accept()
        host, _, port = server.address.rpartition(":")
        upstream = socket.create_connection((host, int(port)))
        threading.Thread(target=pump, args=(client, upstream), daemon=True).start()
        pump(upstream, client)

    threading.Thread(target=serve, daemon=True).start()
    memory[:] = np.frombuffer(b"the secret of a prompt " * (SIZE // 23 + 1), np.uint8)[:SIZE]
    transport = TcpTransport()
    node = replace(node_of(server), data_address=f"127.0.0.1:{relay.getsockname()[1]}")
    target = np.zeros(SIZE, np.uint8)
    whole = ByteSpan(0, SIZE)
    transport.read(node, [whole], [(target, whole)], PATIENCE_S)
    assert np.array_equal(target, memory) and len(seen) > SIZE
    assert b"secret of a prompt" not in seen and b"MKTB" not in seen
    transport.close()
    relay.close()


@pytest.mark.parametrize(
    ("who", "causes"),
    [("stranger", "another cluster"), ("", "speaks plain TCP: set MOONCAKE_KEYS")],
)
def test_a_stranger_is_refused_by_name_and_others_are_served_on(
    hosts: Hosts, server: TcpServer, memory: np.ndarray, who: str, causes: str
) -> None:
    before = memory.copy()
    with hosts.being(who, "b"):
        transport = TcpTransport()
        with pytest.raises(TransferRefused, match=causes) as refusal:
            read_all(transport, server)
        assert isinstance(refusal.value, AccessRefused | TransferFailed)
        assert server.address in str(refusal.value)
        transport.close()
    wait_for_connections(server, 0)
    transport = TcpTransport()
    assert np.array_equal(read_all(transport, server), before)
    transport.close()


def test_a_stranger_that_is_believed_by_mistake_still_learns_nothing(
    hosts: Hosts, server: TcpServer
) -> None:
    """A client that does not check the server at all: the server refuses its certificate."""
    with hosts.being("stranger", "b"):
        contexts = contexts_of_process()
        assert contexts is not None
        careless = contexts.client
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        transport = TcpTransport()
        transport._tls = contexts
        with pytest.raises(
            TransferRefused, match=r"refuses this host's certificate \(.*unknown ca"
        ):
            read_all(transport, server)
        transport.close()


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_expired_certificate_is_named(hosts: Hosts, memory: np.ndarray, side: str) -> None:
    hosts.authority.add_host("b" if side == "client" else "a", days=-1)
    hosts.be("a")
    server = TcpServer(memory, "127.0.0.1", token=b"n1")
    hosts.be("b")
    transport = TcpTransport()
    with pytest.raises(TransferRefused, match="expired"):
        read_all(transport, server)
    hosts.authority.add_host("b" if side == "client" else "a")
    assert np.array_equal(read_all(transport, server), memory), "read again, without a restart"
    transport.close()
    server.close()


def test_a_server_in_plain_is_not_believed(hosts: Hosts, memory: np.ndarray) -> None:
    hosts.be("")
    server = TcpServer(memory, "127.0.0.1", token=b"n1")
    hosts.be("b")
    transport = TcpTransport()
    with pytest.raises(TransferRefused, match="speaks plain TCP, and this process has keys"):
        read_all(transport, server)
    transport.close()
    server.close()


def test_another_version_of_frames_is_refused_inside_of_tls_too(server: TcpServer) -> None:
    contexts = contexts_of_process()
    assert contexts is not None
    host, _, port = server.address.rpartition(":")
    raw = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    with contexts.client.wrap_socket(raw, server_hostname="member.mooncake") as connection:
        connection.sendall(frames.pack(FrameKind.HELLO, 2, version=9) + b"n1")
        until_s = time.monotonic() + PATIENCE_S
        kind, count = frames.unpack(frames.receive_bytes(connection, frames.HEADER.size, until_s))
        assert kind is FrameKind.REFUSED
        text = frames.receive_bytes(connection, count, until_s).decode()
        assert "version 9" in text and f"this one {frames.VERSION}" in text


def test_keys_are_renewed_under_open_connections(
    hosts: Hosts, server: TcpServer, memory: np.ndarray
) -> None:
    transport = TcpTransport()
    for _ in range(4):
        assert np.array_equal(read_all(transport, server), memory)
        fresh = TcpTransport()
        assert np.array_equal(read_all(fresh, server), memory)
        fresh.close()
        hosts.authority.rotate()
    transport.close()


def test_who_says_nothing_is_let_go_and_a_close_waits_for_nobody(
    hosts: Hosts, memory: np.ndarray
) -> None:
    hosts.be("a")
    server = TcpServer(memory, "127.0.0.1", token=b"n1")
    host, _, port = server.address.rpartition(":")
    silent = socket.create_connection((host, int(port)))
    half = socket.create_connection((host, int(port)))
    half.sendall(b"\x16\x03\x01")  # the begin of a handshake
    wait_for_connections(server, 2)
    server.close()
    assert server.connections == 0
    silent.close()
    half.close()


def test_a_write_that_was_given_up_does_not_go_on(server: TcpServer, memory: np.ndarray) -> None:
    memory[:] = 7
    transport = TcpTransport()
    transport.connect(node_of(server))
    source = np.full(SIZE, 255, np.uint8)
    whole = ByteSpan(0, SIZE)
    with pytest.raises(TransferTimeout):
        transport.write(node_of(server), [(source, whole)], [whole], 1e-4)
    wait_for_connections(server, 0)
    landed = int((memory == 255).sum())
    transport.write(node_of(server), [(source[:1], ByteSpan(0, 1))], [ByteSpan(0, 1)], PATIENCE_S)
    assert int((memory[1:] == 255).sum()) <= landed, "nothing lands after the connection is gone"
    transport.close()


def test_an_address_of_other_hosts_needs_keys(hosts: Hosts, memory: np.ndarray) -> None:
    hosts.be("")
    with pytest.raises(AddressUnguarded, match="there are no keys"):
        TcpServer(memory, "203.0.113.1", token=b"x")
