"""Request and reply over both transports: numbers, deadlines, what is refused, what is dropped."""

from __future__ import annotations

import itertools
import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mooncake_store.errors import NodeUnknown, RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.wire import unix_socket
from mooncake_store.wire.framing import (
    REQUEST_BYTES_MAX,
    MessageKind,
    from_stream,
    pack_header,
    to_stream,
)
from mooncake_store.wire.request_reply import (
    Connection,
    Requester,
    Responder,
    Verb,
    ZeroMqConnection,
    listening,
)
from mooncake_store.wire.unix_socket import UnixConnection, UnixListener

WAIT_S = 30.0


class Double(Verb[int], tag="double", frozen=True):
    number: int


class Misread(Verb[str], tag="double", frozen=True):
    number: int


class Fail(Verb[int], tag="fail", frozen=True):
    is_bug: bool


def carry_out(request: Double | Fail) -> int:
    if isinstance(request, Double):
        return 2 * request.number
    if request.is_bug:
        raise ZeroDivisionError("a bug")
    raise NodeUnknown("no such node")


class Server:
    """Answers in a thread, over a Unix socket and over ZeroMQ, unless it is told to be silent."""

    def __init__(self, folder: Path) -> None:
        self.path, self.address = f"{folder}/direct", f"ipc://{folder}/zeromq"
        self.is_silent = False
        self._responder: Responder[Double | Fail] = Responder([Double, Fail], "test")
        self._listener = UnixListener(self.path, self.reply)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, _ = listening(self._context, zmq.ROUTER, self.address)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reply(self, frames: list[bytes]) -> list[bytes]:
        return self._responder.reply(frames, carry_out)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            files = self._listener.files()
            polled = [(fd, zmq.POLLIN | (zmq.POLLOUT * writes)) for fd, writes in files.items()]
            ready = zmq.zmq_poll([(self._socket, zmq.POLLIN), *polled], 20)
            if self.is_silent:
                continue
            self._listener.serve([fd for fd, _ in ready if isinstance(fd, int)])
            if any(fd is self._socket for fd, _ in ready):
                sender, *frames = self._socket.recv_multipart()
                self._socket.send_multipart([sender, *self.reply(frames)])

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._listener.close()
        self._context.destroy(linger=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["unix", "zeromq"])
def connect(request: pytest.FixtureRequest, server: Server) -> Callable[..., Connection]:
    if request.param == "unix":
        return lambda context: UnixConnection(server.path)
    return lambda context: ZeroMqConnection(context, server.address)


@pytest.fixture(params=[True, False], ids=["in order", "side by side"])
def requester(
    request: pytest.FixtureRequest, connect: Callable[..., Connection]
) -> Iterator[Requester]:
    made = Requester("the test", "is it running?", connect, is_in_order=request.param)
    yield made
    made.close()
    made.close()


def test_each_thread_gets_its_own_reply(requester: Requester) -> None:
    wrong: list[int] = []

    def ask(first: int) -> None:
        for number in range(first, first + 50):
            if requester.ask(Double(number), WAIT_S) != 2 * number:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(1_000 * count,)) for count in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_reply_to_what_was_only_sent_is_passed_over(requester: Requester) -> None:
    for number in range(20):
        requester.send(Double(-number), WAIT_S)
        assert requester.ask(Double(number), WAIT_S) == 2 * number


def test_errors_arrive_as_what_they_are(requester: Requester) -> None:
    with pytest.raises(NodeUnknown, match="no such node"):
        requester.ask(Fail(False), WAIT_S)
    with pytest.raises(StoreError, match="bug in the test: ZeroDivisionError"):
        requester.ask(Fail(True), WAIT_S)
    with pytest.raises(RequestInvalid, match="the test sent a reply that cannot be decoded"):
        requester.ask(Misread(1), WAIT_S)


def test_silence_ends_at_the_deadline_and_a_late_reply_confuses_nobody(
    requester: Requester, server: Server
) -> None:
    assert requester.ask(Double(1), WAIT_S) == 2
    server.is_silent = True
    with pytest.raises(StoreUnavailable) as refusal:
        requester.ask(Double(2), 0.05)
    assert str(refusal.value) == ("the test did not answer double within 0.05 s; is it running?")
    server.is_silent = False
    assert requester.ask(Double(3), WAIT_S) == 6


def test_a_closed_requester_says_so(requester: Requester) -> None:
    requester.close()
    with pytest.raises(StoreUnavailable, match="this client of the test is closed"):
        requester.ask(Double(1), WAIT_S)
    requester.send(Double(1), WAIT_S)  # is lost


def test_a_stream_cut_anywhere_gives_the_same_messages(seed: int) -> None:
    chance = random.Random(seed)
    sent = [
        [pack_header(MessageKind.REQUEST, number), chance.randbytes(chance.choice([0, 1, 500]))]
        for number in range(50)
    ]
    raw = b"".join(map(to_stream, sent))
    cuts = sorted(chance.sample(range(1, len(raw)), 80))
    incoming, found = bytearray(), []
    for start, end in itertools.pairwise([0, *cuts, len(raw)]):
        incoming += raw[start:end]
        while (message := from_stream(incoming)) is not None:
            found.append(message)
    assert found == sent and not incoming


def test_a_body_over_the_limit_is_refused_before_it_has_come() -> None:
    incoming = bytearray(pack_header(MessageKind.REQUEST, 1) + struct.pack("<I", 101))
    assert from_stream(incoming, body_bytes_max=101) is None
    with pytest.raises(ValueError, match="101 bytes"):
        from_stream(incoming, body_bytes_max=100)


def test_a_client_that_breaks_the_limits_is_dropped_and_the_others_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "UNREAD_BYTES_MAX", 64 * 1024)
    header = pack_header(MessageKind.REQUEST, 1)
    request = to_stream([header, msgspec.msgpack.encode(Double(7))])
    too_long = header + struct.pack("<I", REQUEST_BYTES_MAX + 1)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for peer in (first, second):
            peer.settimeout(WAIT_S)
            peer.connect(server.path)
        first.sendall(too_long)
        assert first.recv(1) == b"", "it was dropped"
        with pytest.raises((ConnectionError, BrokenPipeError)):
            for _ in range(300):  # it never takes its replies
                second.sendall(request * 1_000)
        assert select.select([second], [], [], WAIT_S)[0]
    requester = Requester("the test", "", lambda _: UnixConnection(server.path), is_in_order=True)
    assert requester.ask(Double(21), WAIT_S) == 42
    requester.close()
