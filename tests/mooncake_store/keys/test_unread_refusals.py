"""A connection that is refused thousands of times, while nobody asks or sends over it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from mooncake_store.keys.folder import VARIABLE
from mooncake_store.wire import idle_look, mailbox, request_reply
from mooncake_store.wire.framing import MessageKind, pack_header
from mooncake_store.wire.mailbox import Inbox, Outbox
from mooncake_store.wire.request_reply import Requester, ZeroMqConnection
from tests.mooncake_store.directory_thread import ANY_PORT
from tests.mooncake_store.keys.hosts import Hosts

PATIENCE_S = 30.0
FAILURES = 4_000  # more than ZeroMQ keeps notes of for a reader with its usual limits


class Refuser:
    """Breaks off each handshake, as a server with another key does, and counts them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            peer.close()
            with self._changed:
                self._count += 1
                self._changed.notify_all()

    def wait_for(self, more: int) -> None:
        with self._changed:
            wanted = self._count + more
            is_over = self._changed.wait_for(lambda: self._count >= wanted, PATIENCE_S)
            assert is_over, f"ZeroMQ has stopped: {wanted - self._count} of {more} are missing"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def refuser(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuser]:
    """This process is host b, connects again at once, and looks when a test says so."""
    hosts.be("b")

    def hurry(a_socket: zmq.Socket[bytes], _: str) -> None:
        a_socket.setsockopt(zmq.RECONNECT_IVL, 1)
        a_socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)

    for module in (mailbox, request_reply):
        monkeypatch.setattr(module, "notice_silence", hurry)
        monkeypatch.setattr(module, "look_after", lambda _: None)
    made = Refuser()
    yield made
    made.close()


def ends(step: Callable[[], object]) -> bool:
    """Within the patience; if not, its thread is left behind."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def idle_requester(refuser: Refuser) -> Requester:
    """One that keeps a connection for the next request."""
    asked = Requester("it", "?", lambda context: ZeroMqConnection(context, refuser.address))
    connection, _ = asked._take_connection()
    asked._give_back(connection, is_usable=True)
    return asked


def test_an_idle_client_that_is_refused_for_hours_can_still_be_closed(refuser: Refuser) -> None:
    asked = idle_requester(refuser)
    refuser.wait_for(FAILURES)
    assert ends(asked.close)


def test_an_idle_client_that_is_refused_is_dropped_at_a_look(refuser: Refuser) -> None:
    asked = idle_requester(refuser)
    refuser.wait_for(100)
    asked.look_after_idle()
    assert not asked._idle
    asked.close()


def test_a_refused_way_silences_no_inbox_and_no_other_way_of_the_process(refuser: Refuser) -> None:
    came: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    inbox: Inbox[int] = Inbox(ANY_PORT, msgspec.msgpack.Decoder(int).decode, came.put)
    outbox: Outbox[int] = Outbox(msgspec.msgpack.Encoder().encode)
    assert outbox.send(refuser.address, 1)
    refuser.wait_for(FAILURES)
    assert outbox.send(inbox.address, 7)
    assert came.get(timeout=PATIENCE_S) == [7]
    outbox.look_after_idle()
    assert list(outbox._sockets) == [inbox.address]
    assert ends(outbox.close)
    inbox.close()


def test_a_connection_that_works_is_kept_however_often_one_looks(hosts: Hosts) -> None:
    hosts.be("b")
    with zmq.Context() as context:
        server, address = request_reply.listening(context, zmq.ROUTER, ANY_PORT)
        asked = Requester("it", "?", lambda made: ZeroMqConnection(made, address))
        connection, number = asked._take_connection()
        connection.send([pack_header(MessageKind.REQUEST, number), b""])
        assert server.poll(PATIENCE_S * 1e3)
        asked._give_back(connection, is_usable=True)
        assert asked in idle_look._owners
        for _ in range(3):
            idle_look.look_at_all()
        assert asked._idle == [connection]
        asked.close()
        server.close()


def test_without_keys_no_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(idle_look._owners)
    outbox: Outbox[int] = Outbox(msgspec.msgpack.Encoder().encode)
    assert set(idle_look._owners) <= before
    outbox.close()
