"""What only plain TCP has: tokens, versions, pooled connections, and writes that were given up.

Not here: the contract that it shares with the other transports (test_transport_contract.py).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.segment import Segment
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports import tcp_server
from mooncake_store.transports.tcp_frames import FrameKind
from mooncake_store.transports.tcp_server import TcpServer, TcpServerRefused
from mooncake_store.transports.tcp_transport import ConnectionsFull, TcpTransport
from mooncake_store.transports.transport import ByteSpan
from tests.mooncake_store.makers import node_info
from tests.mooncake_store.targets import TARGET_BYTES, Target, TargetPool

SIZE = 1024**2
ESTABLISHED, CLOSE_WAIT = "01", "08"  # in /proc/net/tcp


@pytest.fixture
def target(targets: TargetPool) -> Iterator[Target]:
    taken = targets.take("t0")
    yield taken
    targets.give_back(taken)


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = TcpTransport()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[TcpServer]:
    made = TcpServer(
        np.arange(SIZE, dtype=np.uint32).view(np.uint8)[:SIZE], "127.0.0.1", token=b"n1"
    )
    yield made
    made.close()


def node_of(server: TcpServer) -> NodeInfo:
    return replace(node_info(), segment_bytes=SIZE, data_address=server.address)


def open_files(target: Target) -> int:
    return len(os.listdir(f"/proc/{target.process.pid}/fd"))


def files_when_idle(target: Target) -> int:
    """Once the node has seen that the clients of earlier tests are gone."""
    port = f":{int(target.info.data_address.rpartition(':')[2]):04X}"
    until_s = time.monotonic() + 20.0
    while any(
        fields[1].endswith(port) and fields[3] in (ESTABLISHED, CLOSE_WAIT)
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    ):
        assert time.monotonic() < until_s, "the node keeps a connection of nobody"
        time.sleep(0.01)  # poll
    return open_files(target)


def wait_until_equal(target: Target, files: int) -> None:
    until_s = time.monotonic() + 20.0
    while open_files(target) != files:
        assert time.monotonic() < until_s, "the node keeps a connection that was given up"
        time.sleep(0.01)  # poll


def test_a_frozen_node_is_a_timeout_after_which_nothing_arrives(
    target: Target, transport: TcpTransport, seed: int
) -> None:
    buffer = np.zeros(2 * SIZE, np.uint8)
    with Segment.open(target.path) as segment:
        chance = np.random.default_rng(seed)
        segment.view[:] = chance.integers(1, 256, TARGET_BYTES, dtype=np.uint8)
        before = files_when_idle(target)
        transport.read(target.info, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(0, SIZE))], 10.0)
        target.freeze()
        try:
            with pytest.raises(TransferTimeout, match="frozen"):
                transport.read(
                    target.info, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(SIZE, SIZE))], 0.3
                )
            with pytest.raises(TransferTimeout, match="frozen"):  # and so is a new connection
                transport.read(
                    target.info, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(SIZE, SIZE))], 0.1
                )
        finally:
            target.thaw()
        assert transport.pending_targets() == []
        wait_until_equal(target, before)
        assert not buffer[SIZE:].any()
        transport.read(target.info, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(SIZE, SIZE))], 10.0)
        assert np.array_equal(buffer[SIZE:], segment.view[:SIZE])
    assert (transport.counters.timeouts, transport.counters.failures) == (2, 0)


def test_a_write_that_was_given_up_does_not_land_when_the_node_thaws(
    target: Target, transport: TcpTransport
) -> None:
    buffer = np.full(SIZE, 255, np.uint8)
    with Segment.open(target.path) as segment:
        segment.view[:] = 7
        before = files_when_idle(target)
        transport.connect(target.info)
        wait_until_equal(target, before + 1)
        target.freeze()
        try:
            with pytest.raises(TransferTimeout):
                transport.write(
                    target.info, [(buffer, ByteSpan(0, SIZE))], [ByteSpan(0, SIZE)], 0.3
                )
        finally:
            target.thaw()
        wait_until_equal(target, before)
        assert (segment.view[:] == 7).all()


def test_a_slow_reader_does_not_hold_a_node_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "SILENCE_S", 0.2)
    server = TcpServer(np.zeros(64 * SIZE, np.uint8), "127.0.0.1", token=b"n1")
    try:
        with greeted(server) as connection:  # asks for 64 MiB and never reads them
            connection.sendall(frames.pack(FrameKind.READ, 1) + frames.pack_spans([(0, 64 * SIZE)]))
            wait_for_connections(server, 0)
    finally:
        server.close()


def wait_for_connections(server: TcpServer, count: int) -> None:
    until_s = time.monotonic() + 20.0
    while server.connections != count:
        assert time.monotonic() < until_s, f"{server.connections} connections"
        time.sleep(0.005)  # poll


def greeted(server: TcpServer, token: bytes = b"n1") -> socket.socket:
    host, _, port = server.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10.0)
    connection.sendall(frames.pack(FrameKind.HELLO, len(token)) + token)
    header = frames.receive_bytes(connection, frames.HEADER.size, time.monotonic() + 10.0)
    assert frames.unpack(header) == (FrameKind.DONE, 0)
    return connection


def answer_to(server: TcpServer, raw: bytes) -> tuple[FrameKind, str]:
    """What a stranger is told who says this first."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(raw)
        until_s = time.monotonic() + 10.0
        header = frames.receive_bytes(connection, frames.HEADER.size, until_s)
        kind, count = frames.unpack(header)
        return kind, frames.receive_bytes(connection, count, until_s).decode()


def test_a_wrong_token_is_refused_and_says_what_to_do(
    server: TcpServer, transport: TcpTransport
) -> None:
    buffer, span = np.zeros(SIZE, np.uint8), ByteSpan(0, 4096)
    stranger = replace(node_of(server), incarnation="n0")
    for _ in range(2):
        with pytest.raises(TransferFailed, match=r"restarted, or another node .* in the directory"):
            transport.read(stranger, [span], [(buffer, span)], 10.0)
        with pytest.raises(TransferFailed, match="restarted"):
            transport.write(stranger, [(buffer, span)], [span], 10.0)
    transport.read(node_of(server), [span], [(buffer, span)], 10.0)
    assert buffer.any()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (frames.pack(FrameKind.HELLO, 2, version=9) + b"n1", "has version 9 .* one release"),
        (b"GET / HTTP/1.1\r\n\r\n", "not the start of a MKTB frame"),
        (frames.pack(FrameKind.READ, 1), "must begin with its token"),
        (frames.pack(FrameKind.HELLO, 10**6), "must begin with its token"),
        (frames.HEADER.pack(frames.MAGIC, frames.VERSION, 77, 0), "kind 77 of frame is unknown"),
    ],
)
def test_what_is_no_hello_of_this_version_is_refused_by_name(
    server: TcpServer, raw: bytes, says: str
) -> None:
    kind, text = answer_to(server, raw)
    assert kind is FrameKind.REFUSED
    assert re.search(says, text), text
    wait_for_connections(server, 0)


@pytest.mark.parametrize("span", [(SIZE, 1), (0, SIZE + 1), (2**64 - 1, 2**64 - 1)])
def test_a_node_believes_no_client_about_the_size_of_its_segment(
    server: TcpServer, span: tuple[int, int]
) -> None:
    for kind in (FrameKind.READ, FrameKind.WRITE):
        with greeted(server) as connection:
            connection.sendall(frames.pack(kind, 1) + frames.pack_spans([span]))
            until_s = time.monotonic() + 10.0
            header = frames.receive_bytes(connection, frames.HEADER.size, until_s)
            answer, count = frames.unpack(header)
            text = frames.receive_bytes(connection, count, until_s).decode()
            assert answer is FrameKind.REFUSED and "outside a segment" in text


def test_a_pooled_connection_that_broke_is_replaced_once(transport: TcpTransport) -> None:
    memory = np.ones(SIZE, np.uint8)
    first = TcpServer(memory, "127.0.0.1", token=b"n1")
    port = int(first.address.rpartition(":")[2])
    buffer, span = np.zeros(SIZE, np.uint8), ByteSpan(0, SIZE)
    transport.read(node_of(first), [span], [(buffer, span)], 10.0)
    first.close()
    assert first.connections == 0
    with pytest.raises(TransferFailed, match="gone or cut off"):
        transport.read(node_of(first), [span], [(buffer, span)], 10.0)
    second = TcpServer(memory, "127.0.0.1", port, token=b"n1")  # the network came back, say
    try:
        transport.read(node_of(second), [span], [(buffer, span)], 10.0)
        [pooled] = transport._pools["s0"].idle
        pooled.shutdown(socket.SHUT_RDWR)
        transport.read(node_of(second), [span], [(buffer, span)], 10.0)
        assert (transport.counters.reads, transport.counters.failures) == (3, 1)
    finally:
        second.close()


def test_more_spans_than_one_request_takes_still_arrive(
    server: TcpServer, transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SPANS_MAX", 1_000)
    buffer = np.zeros(SIZE, np.uint8)
    spans = [ByteSpan(index * 16, 16) for index in range(4_321)]
    transport.read(node_of(server), spans, [(buffer, span) for span in spans], 10.0)
    wanted = np.arange(SIZE, dtype=np.uint32).view(np.uint8)[: 4_321 * 16]
    assert np.array_equal(buffer[: 4_321 * 16], wanted)


def test_threads_get_a_connection_each_and_they_are_kept(
    server: TcpServer, transport: TcpTransport
) -> None:
    barrier, node = threading.Barrier(3), node_of(server)
    problems: list[Exception] = []

    def work() -> None:
        buffer, span = np.zeros(SIZE, np.uint8), ByteSpan(0, SIZE)
        try:
            for _ in range(5):
                barrier.wait(20.0)
                transport.read(node, [span], [(buffer, span)], 10.0)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert 1 <= server.connections <= 3
    transport.disconnect("s0")
    wait_for_connections(server, 0)


def test_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch, server: TcpServer, transport: TcpTransport
) -> None:
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 2)
    with greeted(server), greeted(server), pytest.raises(ConnectionsFull, match="limit of 2 "):
        transport.connect(node_of(server))
    wait_for_connections(server, 0)
    transport.connect(node_of(server))


def test_a_server_without_room_for_threads_serves_when_it_has_some(
    server: TcpServer, transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferFailed):
            transport.connect(node_of(server))
    transport.connect(node_of(server))
    wait_for_connections(server, 1)


def test_strangers_that_say_nothing_keep_no_client_out(
    server: TcpServer, transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_S", 300.0)  # nobody goes by himself
    monkeypatch.setattr(tcp_server, "UNAUTHENTICATED_HOST_MAX", 3)
    host, _, port = server.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(8)]
    transport.connect(node_of(server))
    for stranger in strangers:
        stranger.close()
    wait_for_connections(server, 1)


def test_an_address_that_cannot_be_had_is_an_error_with_a_remedy(
    server: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_INSECURE", "1")
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(TcpServerRefused, match="choose an address of this host and a free port"):
        TcpServer(np.zeros(8, np.uint8), "127.0.0.1", port, token=b"x")
    with pytest.raises(TcpServerRefused):
        TcpServer(np.zeros(8, np.uint8), "203.0.113.1", token=b"x")
    everywhere = TcpServer(np.zeros(8, np.uint8), "0.0.0.0", token=b"x", is_advertised=True)
    assert everywhere.address.startswith("0.0.0.0:"), "clients are given another one"
    everywhere.close()
    for wildcard in ("", "0.0.0.0", "::"):
        with pytest.raises(TcpServerRefused, match="to which clients can connect"):
            TcpServer(np.zeros(8, np.uint8), wildcard, token=b"x")
