"""The directory's process: it starts once, survives what arrives, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mooncake_store.directory.__main__ import main
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.server import TURN_S_MAX, DirectoryServer, TurnClock
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.framing import (
    PROTOCOL_VERSION,
    MessageKind,
    number_of,
    pack_header,
    unpack_header,
)
from mooncake_store.wire.request_reply import Failure
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info, put
from tests.mooncake_store.processes import DirectoryProcess


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DirectoryProcess]:
    with DirectoryProcess(tmp_path) as started:
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DirectoryServer]:
    """In this process, turned by hand."""
    directory = Directory(1)
    directory.register_node(node_info("s0"), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    put(directory, chain(3))
    made = DirectoryServer(directory, f"ipc://{tmp_path}/d", f"ipc://{tmp_path}/e")
    yield made
    made.close()


def failure_of(frames: list[bytes]) -> Failure:
    assert unpack_header(frames[0]).kind is MessageKind.FAILURE
    return msgspec.msgpack.decode(frames[1], type=Failure)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_removes_its_socket_files(
    process: DirectoryProcess, tmp_path: Path, how: signal.Signals
) -> None:
    assert sorted(os.listdir(tmp_path)) == ["directory", "directory.direct", "events"]
    assert process.end(how) == 0
    assert os.listdir(tmp_path) == []


def test_the_ready_line_says_where_and_which_epoch(process: DirectoryProcess) -> None:
    with DirectoryClient(process.address) as client:
        epoch = client.stats().epoch
    addresses = f"address={process.address} events={process.events_address}"
    assert process.ready == f"ready {addresses} epoch={epoch}"
    assert abs(epoch / 1000 - time.time()) < 60


def test_a_second_directory_at_one_address_is_refused(
    process: DirectoryProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = ["--address", process.address, "--events", f"ipc://{tmp_path}/other"]
    assert main(addresses) == 1
    assert "another process listens there" in capsys.readouterr().err
    with DirectoryClient(process.address) as client:
        assert client.nodes() == [], "the first one is not disturbed"


def test_the_socket_files_of_a_killed_directory_are_taken_over(process: DirectoryProcess) -> None:
    process.end(signal.SIGKILL)
    process.start()
    with DirectoryClient(process.address) as client:
        assert client.nodes() == []


def test_an_address_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "ipc:///does/not/exist", "--events", "ipc:///nor/this"]) == 1
    assert "cannot listen at ipc:///does/not/exist" in capsys.readouterr().err


def test_every_mistake_in_the_options_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--node-ttl-s", "0", "--events-max", "-1"]
    assert main(["--address", "ipc:///tmp/a", "--events", "ipc:///tmp/b", *options]) == 2
    said = capsys.readouterr().err
    assert "node_ttl_s is 0.0; it must be positive" in said
    assert "events_max is -1; it must be positive" in said


@pytest.mark.servers
def test_help_explains_every_option() -> None:
    command = [sys.executable, "-m", "mooncake_store.directory", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "--quarantine-s" in said
    assert "must outlive any transfer to it (30.0)" in " ".join(said.split())


def test_ports_may_be_chosen_by_the_system() -> None:
    any_port = "tcp://127.0.0.1:*"
    server = DirectoryServer(Directory(1), any_port, any_port)
    assert server.address.startswith("tcp://127.0.0.1:") and "*" not in server.address
    assert server.address != server.events_address
    server.close()


def test_random_bytes_are_answered_with_an_error(server: DirectoryServer, seed: int) -> None:
    rng = random.Random(seed)
    before = server.directory.snapshot(1e6)
    for _ in range(2_000):
        frames = [rng.randbytes(rng.choice([0, 1, 16, 16, 40])) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.5 and frames:
            frames[0] = pack_header(MessageKind.REQUEST, rng.randrange(2**64))
        failure = failure_of(server.answer(frames))
        assert failure.kind in {"RequestInvalid", "ProtocolMismatch"}, failure
    server.directory.check()
    assert server.directory.snapshot(1e6) == before


def test_damaged_requests_never_break_the_directory(seed: int) -> None:
    rng = random.Random(seed)
    directory = Directory(1)
    directory.register_node(node_info("s0"), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    server = DirectoryServer(directory, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    keys = chain(4)
    requests: list[protocol.AnyRequest] = [
        protocol.RegisterNode(node_info("s0")),
        protocol.Allocate("s0", keys, "r", 5.0, False),
        protocol.Commit("s0", [(keys[0], 0, 2**20, 7)], "r", 5.0),
        protocol.Lookup(keys, "r", 5.0, True),
        protocol.Attach("s0", "print", BLOCK_BYTES),
        protocol.Release("r"),
        protocol.Stats(),
    ]
    for _ in range(2_000):
        body = bytearray(msgspec.msgpack.encode(rng.choice(requests)))
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            body[rng.randrange(len(body))] = rng.randrange(256)
        header = pack_header(MessageKind.REQUEST, 7)
        reply = server.answer([header, bytes(body[: rng.choice([len(body), len(body) // 2])])])
        assert number_of(reply[0]) == 7
        if unpack_header(reply[0]).kind is MessageKind.FAILURE:
            assert "bug in the directory" not in failure_of(reply).message
        directory.check()
    server.close()


def test_a_reply_or_an_event_is_no_request(server: DirectoryServer) -> None:
    body = msgspec.msgpack.encode(protocol.Stats())
    for kind in (MessageKind.REPLY, MessageKind.FAILURE, MessageKind.EVENTS, MessageKind.HEARTBEAT):
        failure = failure_of(server.answer([pack_header(kind, 1), body]))
        assert failure.message == f"a request was expected, got {kind.name}"


def test_other_bytes_on_its_sockets_do_not_disturb_the_process(process: DirectoryProcess) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(process.address.removeprefix("ipc://"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(5_000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(process.address)
        other = PROTOCOL_VERSION + 1
        header = pack_header(MessageKind.REQUEST, 3, version=other)
        for frames in ([b""], [b"x"] * 3, [bytes(16), b"{}"], [header, b"what it would say"]):
            dealer.send_multipart(frames)
            assert dealer.poll(5_000), "it answers everything"
            reply = dealer.recv_multipart()
        assert number_of(reply[0]) == 3
        assert failure_of(reply).kind == "ProtocolMismatch"
        assert f"version {other}" in failure_of(reply).message
    with DirectoryClient(process.address) as client:
        assert client.nodes() == []


def test_time_that_the_directory_itself_slept_is_nobodys_silence() -> None:
    readings = iter([100.0, 100.5, 500.0, 500.1])
    clock = TurnClock(lambda: next(readings))
    assert clock.now_s() == 0.5
    assert clock.now_s() == 0.5 + TURN_S_MAX
    assert clock.now_s() == pytest.approx(0.6 + TURN_S_MAX)
