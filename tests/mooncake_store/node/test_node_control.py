"""The control socket: every request gets one answer, in time, whatever is sent to it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mooncake_store.errors import (
    NodeUnknown,
    ProtocolMismatch,
    RequestInvalid,
    StoreError,
    StoreUnavailable,
    named,
)
from mooncake_store.node import control as node_control
from mooncake_store.node.control import NodeControl
from mooncake_store.wire import node_protocol as control
from mooncake_store.wire.framing import MessageKind, number_of, pack_header
from mooncake_store.wire.node_protocol import NodeClient
from mooncake_store.wire.request_reply import Failure


class Verbs:
    """Answers pings; loads wait until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.asked: list[control.AnyControl] = []

    def answer(self, request: control.AnyControl, came_s: float) -> object:
        assert came_s > 0
        self.asked.append(request)
        if isinstance(request, control.LoadBlocks):
            self.begun.release()
            assert self.go.wait(30)
            return [True] * len(request.blocks)
        if isinstance(request, control.Fetch):
            raise NodeUnknown("no such node")
        if isinstance(request, control.AskNodeStats):
            raise ZeroDivisionError("a bug")
        return "here"


class Site:
    def __init__(self, folder: Path, address: str = "") -> None:
        self.verbs = Verbs()
        self.server = NodeControl(address or f"ipc://{folder}/{secrets.token_hex(3)}")
        self.server.serve(self.verbs.answer)
        self.client = NodeClient(self.server.address)

    def raw(self, *frames: bytes) -> list[bytes]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.server.address)
            socket.send_multipart(frames)
            assert socket.poll(20_000), "no answer"
            return socket.recv_multipart()

    def close(self) -> None:
        self.verbs.go.set()
        self.client.close()
        self.server.close()
        self.server.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def restores(count: int) -> list[control.Restore]:
    return [control.Restore(bytes(16), i, 1, i, 2, 3, 4) for i in range(count)]


def failure(frames: list[bytes]) -> StoreError:
    assert frames[0][2] == MessageKind.FAILURE
    body = msgspec.msgpack.decode(frames[1], type=Failure)
    return named(body.kind, body.message)


def test_a_slow_load_delays_no_ping_and_answers_find_their_askers(site: Site) -> None:
    answers: dict[int, list[bool]] = {}

    def load(count: int) -> None:
        answers[count] = site.client.load(restores(count), 30.0)

    threads = [threading.Thread(target=load, args=(count,)) for count in range(1, 4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert site.verbs.begun.acquire(timeout=30)
    assert site.client.ping() == "here"
    assert site.server.waiting == 3
    site.verbs.go.set()
    for thread in threads:
        thread.join()
    assert answers == {count: [True] * count for count in range(1, 4)}
    assert site.server.waiting == 0


def test_a_deadline_beyond_the_limit_of_the_node_is_shortened(site: Site) -> None:
    site.verbs.go.set()
    assert site.client.load(restores(1), 3_500.0) == [True]
    with pytest.raises(NodeUnknown):
        site.client.fetch([], [], 3_500.0)
    deadlines_s = [each.deadline_s for each in site.verbs.asked if hasattr(each, "deadline_s")]
    assert deadlines_s == [control.DEADLINE_S_MAX] * 2


def test_more_than_it_may_hold_is_refused_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_control, "REQUESTS_MAX", 2)
    waiting = [
        threading.Thread(target=site.client.load, args=(restores(1), 30.0)) for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    for _ in waiting:
        assert site.verbs.begun.acquire(timeout=30)
    with pytest.raises(StoreUnavailable, match="2 requests wait at this node"):
        site.client.ping()
    site.verbs.go.set()
    for thread in waiting:
        thread.join()
    assert site.client.ping() == "here"


def test_errors_of_the_verbs_arrive_as_what_they_are(site: Site) -> None:
    with pytest.raises(NodeUnknown, match="no such node"):
        site.client.fetch([bytes(16)], [], 1.0)
    with pytest.raises(StoreError, match="bug in the node: ZeroDivisionError"):
        site.client.stats()
    assert site.client.ping() == "here"


def test_another_version_is_refused_by_name(site: Site) -> None:
    body = msgspec.msgpack.encode(control.Ping())
    answer = site.raw(pack_header(MessageKind.REQUEST, 7, version=999), body)
    assert isinstance(failure(answer), ProtocolMismatch) and "999" in str(failure(answer))
    assert number_of(answer[0]) == 7


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        msgspec.msgpack.encode({"type": "no such verb"}),
        msgspec.msgpack.encode({"type": "ping", "more": 1}),
        msgspec.msgpack.encode({"type": "load", "blocks": [], "deadline_s": 0.0}),
        msgspec.msgpack.encode({"type": "load", "blocks": [], "deadline_s": 1e9}),
        msgspec.msgpack.encode(
            {"type": "load", "blocks": [[b"short", *range(1, 7)]], "deadline_s": 1.0}
        ),
        msgspec.msgpack.encode(
            {"type": "load", "blocks": [[bytes(16), -1, *range(1, 6)]], "deadline_s": 1.0}
        ),
        msgspec.msgpack.encode(
            {"type": "load", "deadline_s": 1.0, "blocks": [[bytes(16), 0, 0, 0, 0, 0, 1]] * 5000}
        ),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_next_request_is_answered(
    site: Site, body: bytes
) -> None:
    answer = site.raw(pack_header(MessageKind.REQUEST, 3), body)
    assert isinstance(failure(answer), RequestInvalid)
    assert site.client.ping() == "here"
    assert all(isinstance(request, control.Ping) for request in site.verbs.asked)


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"x" * 16,),
        (pack_header(MessageKind.REQUEST, 1),),
        (pack_header(MessageKind.REPLY, 1), b""),
        (b"a", b"b", b"c"),
    ],
)
def test_frames_that_are_no_request_are_refused(site: Site, frames: tuple[bytes, ...]) -> None:
    assert isinstance(failure(site.raw(*frames)), RequestInvalid)
    assert site.client.ping() == "here"


def test_a_call_that_is_too_late_says_so_and_the_next_one_is_not_confused(site: Site) -> None:
    with pytest.raises(StoreUnavailable, match=r"did not answer load within 1\.01 s"):
        site.client.load(restores(1), 0.01)
    site.verbs.go.set()
    assert site.client.ping() == "here"
    assert site.client.load(restores(2), 5.0) == [True, True]


def test_a_client_that_is_closed_ends_its_calls(site: Site) -> None:
    problems: list[Exception] = []

    def load() -> None:
        try:
            site.client.load(restores(1), 30.0)
        except StoreUnavailable as error:
            problems.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert site.verbs.begun.acquire(timeout=30)
    site.client.close()
    thread.join()
    assert len(problems) == 1


def test_a_free_port_is_taken_and_announced(tmp_path: Path) -> None:
    made = Site(tmp_path, "tcp://127.0.0.1:0")
    assert made.server.address.startswith("tcp://127.0.0.1:") and made.client.ping() == "here"
    with pytest.raises(RequestInvalid, match="cannot listen at --control"):
        NodeControl(made.server.address)
    made.close()
    with pytest.raises(RequestInvalid, match="107 bytes"):
        NodeControl("ipc:///dev/shm/" + "x" * 200)


def test_its_file_is_gone_afterwards(tmp_path: Path) -> None:
    made = Site(tmp_path, f"ipc://{tmp_path}/here")
    assert (tmp_path / "here").exists()
    made.close()
    assert not (tmp_path / "here").exists()
