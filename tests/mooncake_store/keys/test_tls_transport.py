"""KV over TCP with mutual TLS: whole transfers, refusals that both sides understand, renewal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from mooncake_store.errors import AccessRefused, TransferFailed, TransferTimeout
from mooncake_store.keys.curve import AddressUnguarded
from mooncake_store.keys.tls import contexts_of_process
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports import tcp_server
from mooncake_store.transports.nixl_lane import is_reached
from mooncake_store.transports.tcp_frames import FrameKind
from mooncake_store.transports.tcp_server import TcpServer
from mooncake_store.transports.tcp_tls import TransferRefused
from mooncake_store.transports.tcp_transport import ConnectionsFull, TcpTransport
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


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


def wait_for_connections(server: TcpServer, count: int) -> None:
    wait_until(lambda: server.connections == count)


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
    ("who", "causes"), [("stranger", "another cluster"), ("", "uses plain TCP: set MOONCAKE_KEYS")]
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
    with pytest.raises(TransferRefused, match="uses plain TCP, and this process has keys"):
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


def silent(server: TcpServer, begin: bytes, source: str) -> socket.socket:
    """A connection that says this much and no more. It may have been refused already."""
    host, _, port = server.address.rpartition(":")
    made = socket.create_connection((host, int(port)), PATIENCE_S, (source, 0))
    with contextlib.suppress(OSError):
        made.sendall(begin)
    return made


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01"], ids=["silent", "half a handshake"])
@pytest.mark.parametrize("hosts_of_strangers", [1, 5])
def test_strangers_that_say_nothing_keep_no_member_out(
    server: TcpServer,
    memory: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    begin: bytes,
    hosts_of_strangers: int,
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_S", 10 * PATIENCE_S)  # nobody goes by himself
    threads = threading.active_count()
    known = TcpTransport()
    assert np.array_equal(read_all(known, server), memory)
    strangers = [
        silent(server, begin, f"127.0.0.{1 + number % hosts_of_strangers}") for number in range(300)
    ]
    try:
        assert np.array_equal(read_all(known, server), memory), "whose connection was open before"
        for _ in range(3):
            fresh = TcpTransport()
            assert np.array_equal(read_all(fresh, server), memory)
            fresh.close()
        limit = min(
            hosts_of_strangers * tcp_server.UNAUTHENTICATED_HOST_MAX, tcp_server.UNAUTHENTICATED_MAX
        )
        wait_until(lambda: server.connections <= limit + 1)
    finally:
        for stranger in strangers:
            stranger.close()
    wait_for_connections(server, 1)
    known.close()
    wait_for_connections(server, 0)
    wait_until(lambda: threading.active_count() == threads)


def test_strangers_that_say_nothing_are_let_go(
    hosts: Hosts, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_S", 0.2)
    hosts.be("a")
    server = TcpServer(memory, "127.0.0.1", token=b"n1")
    contexts = contexts_of_process()
    assert contexts is not None
    strangers = [silent(server, begin, "127.0.0.1") for begin in (b"", b"\x16\x03\x01")]
    raw = silent(server, b"", "127.0.0.1")
    with contexts.client.wrap_socket(raw, server_hostname="member.mooncake"):  # and no request
        wait_for_connections(server, 0)
    for stranger in strangers:
        stranger.close()
    server.close()


def test_who_is_not_let_in_for_the_limit_reads_the_limit(
    server: TcpServer, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "UNAUTHENTICATED_HOST_MAX", 3)
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 1)
    with monkeypatch.context() as patch:
        patch.setattr(tcp_server, "CLOSABLE_AGE_S_MIN", PATIENCE_S)  # they came a moment ago
        strangers = [silent(server, b"", "127.0.0.1") for _ in range(3)]
        wait_for_connections(server, 3)
        transport = TcpTransport()
        with pytest.raises(
            ConnectionsFull, match=rf"{server.address}.* limit of 3 .*not authenticated"
        ):
            read_all(transport, server)
    for stranger in strangers:
        stranger.close()
    wait_for_connections(server, 0)
    assert np.array_equal(read_all(transport, server), memory)
    other = TcpTransport()
    with pytest.raises(ConnectionsFull, match=rf"{server.address}.* limit of 1 .*members"):
        read_all(other, server)
    assert np.array_equal(read_all(transport, server), memory)
    transport.close()
    other.close()


def test_a_look_whether_the_node_answers_is_no_failure(
    server: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert is_reached(server.address)
    wait_for_connections(server, 0)
    assert not caplog.records and server.counters.failures == 0


def test_refusals_name_the_peer_and_do_not_fill_the_log(
    hosts: Hosts, server: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    for who in ("stranger", "", "stranger", ""):
        with hosts.being(who, "b"):
            transport = TcpTransport()
            with pytest.raises(TransferRefused):
                read_all(transport, server)
            transport.close()
    wait_for_connections(server, 0)
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == 1 and "refused 127.0.0.1" in said[0], said
    assert server.counters.failures == 4
