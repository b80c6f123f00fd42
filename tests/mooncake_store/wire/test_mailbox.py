"""One-way messages: in order, from those who know the secret, and the sender hears what is lost."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mooncake_store.errors import ProtocolMismatch, RequestInvalid
from mooncake_store.wire import mailbox
from mooncake_store.wire.mailbox import Inbox, Outbox, opened, sealed

SECRET = "0123456789abcdef"
WAIT_S = 30.0

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(int).decode
Came = queue.SimpleQueue[list[int]]
OpenInbox = Callable[..., tuple[Inbox[int], Came]]


@pytest.fixture
def open_inbox(tmp_path: Path) -> Iterator[OpenInbox]:
    inboxes: list[Inbox[int]] = []

    def make(**options: object) -> tuple[Inbox[int], Came]:
        came: Came = queue.SimpleQueue()
        address = f"ipc://{tmp_path}/inbox-{len(inboxes)}"
        inboxes.append(Inbox(address, decode, came.put, **options))  # type: ignore[arg-type]
        return inboxes[-1], came

    yield make
    for inbox in inboxes:
        inbox.close()


def taken(came: Came, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += came.get(timeout=WAIT_S)
    return found


def test_what_was_sealed_is_opened_by_the_same_secret_only() -> None:
    assert opened(sealed(b"data", SECRET), SECRET) == b"data"
    for stranger in (sealed(b"data", SECRET[::-1]), sealed(b"data", ""), b"data", b""):
        with pytest.raises(RequestInvalid, match="another secret"):
            opened(stranger, SECRET)
    with pytest.raises(RequestInvalid, match="not a message of a mooncake process"):
        opened(SECRET.encode() + b"garbage", SECRET)


def test_a_message_of_another_version_is_refused_with_both_named() -> None:
    sealed_now = sealed(b"data", SECRET)
    later = sealed_now.replace(b"MM\x01", b"MM\x07")
    assert later != sealed_now
    with pytest.raises(ProtocolMismatch, match=r"has version 7 .* this side 1"):
        opened(later, SECRET)


def test_messages_arrive_in_the_order_in_which_they_were_sent(open_inbox: OpenInbox) -> None:
    inbox, came = open_inbox()
    outbox: Outbox[int] = Outbox(encode)
    for number in range(1_000):
        assert outbox.send(inbox.address, number)
    assert taken(came, 1_000) == list(range(1_000))
    outbox.close()
    assert outbox.send(inbox.address, 1_000), "nobody waits for it, so it is no failure"


def test_what_cannot_be_read_or_has_no_secret_is_dropped_and_the_rest_arrives(
    open_inbox: OpenInbox,
) -> None:
    inbox, came = open_inbox(secret=SECRET)
    stranger: Outbox[int] = Outbox(encode)
    ours: Outbox[int] = Outbox(encode, SECRET)
    garbled: Outbox[object] = Outbox(lambda _: b"\xc1", SECRET)
    stranger.send(inbox.address, 1)
    garbled.send(inbox.address, 2)
    ours.send(inbox.address, 3)
    assert taken(came, 1) == [3]
    for outbox in (stranger, ours, garbled):
        outbox.close()


def test_what_lies_around_garbage_in_one_turn_is_not_lost_with_it(tmp_path: Path) -> None:
    came: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    begun, go = threading.Event(), threading.Event()

    def read(messages: list[str]) -> None:
        came.put(messages)
        begun.set()
        assert go.wait(WAIT_S)

    inbox = Inbox(f"ipc://{tmp_path}/inbox", msgspec.msgpack.Decoder(str).decode, read)
    raw: Outbox[bytes] = Outbox(bytes)
    raw.send(inbox.address, encode("first"))
    assert begun.wait(WAIT_S)
    for data in (encode("before"), b"\xa2\xff\xfe", b"\x91" * 5_000, encode("behind")):
        raw.send(inbox.address, data)  # they wait for the turn together
    go.set()
    found: list[str] = []
    while len(found) < 3:
        found += came.get(timeout=WAIT_S)
    assert found == ["first", "before", "behind"]
    raw.close()
    inbox.close()


def test_a_peer_that_lets_too_many_wait_is_told_to_the_sender(tmp_path: Path) -> None:
    outbox: Outbox[int] = Outbox(encode, messages_max=5)
    address = f"ipc://{tmp_path}/nobody"
    assert [outbox.send(address, number) for number in range(7)] == [True] * 5 + [False] * 2
    outbox.close()


def test_an_error_in_who_reads_does_not_close_the_inbox(tmp_path: Path) -> None:
    came: Came = queue.SimpleQueue()

    def read(messages: list[int]) -> None:
        came.put(messages)
        raise ZeroDivisionError

    inbox = Inbox(f"ipc://{tmp_path}/inbox", decode, read)
    outbox: Outbox[int] = Outbox(encode)
    for number in range(2):
        outbox.send(inbox.address, number)
        assert taken(came, 1) == [number]
    outbox.close()
    inbox.close()


def test_who_reads_is_called_again_when_it_wants_to_be(tmp_path: Path) -> None:
    came: Came = queue.SimpleQueue()

    def read(messages: list[int]) -> float | None:
        came.put(messages)
        return 0.001 if messages else None

    inbox = Inbox(f"ipc://{tmp_path}/inbox", decode, read)
    outbox: Outbox[int] = Outbox(encode)
    outbox.send(inbox.address, 7)
    assert came.get(timeout=WAIT_S) == [7]
    assert came.get(timeout=WAIT_S) == [], "though no message came"
    outbox.close()
    inbox.close()


def test_an_inbox_with_turns_calls_before_any_message_comes(open_inbox: OpenInbox) -> None:
    _, came = open_inbox(turn_s=0.001)
    assert [came.get(timeout=WAIT_S) for _ in range(3)] == [[], [], []]


def test_an_address_where_nothing_can_listen_is_an_error_at_once() -> None:
    with pytest.raises(zmq.ZMQError):
        Inbox("ipc:///does/not/exist", decode, lambda _: None)


def test_an_outbox_forgets_its_oldest_peer_when_it_writes_to_too_many(
    open_inbox: OpenInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "OUTBOX_SOCKETS_MAX", 2)
    made = [open_inbox() for _ in range(3)]
    outbox: Outbox[int] = Outbox(encode)
    for number in range(2):
        for inbox, came in made:
            outbox.send(inbox.address, number)
            assert taken(came, 1) == [number]
    assert len(outbox._sockets) == 2
    outbox.close()


class Clock:
    """Stands in for the module `time` where only `monotonic` is used."""

    now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_inboxes_that_come_and_go_leave_no_descriptor_behind(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers that are killed and started again, each time with another inbox."""
    clock = Clock()
    monkeypatch.setattr(mailbox, "time", clock)
    outbox: Outbox[int] = Outbox(encode)

    def send_to_one_that_ends(number: int) -> int:
        address = f"ipc://{tmp_path}/{number}" if transport == "ipc" else "tcp://127.0.0.1:*"
        inbox: Inbox[int] = Inbox(address, decode, lambda _: None)
        assert outbox.send(inbox.address, number)
        inbox.close()
        clock.now_s += mailbox.OUTBOX_IDLE_S
        return len(os.listdir("/proc/self/fd"))

    few = max(send_to_one_that_ends(number) for number in range(3))
    for number in range(3, 23):
        many = send_to_one_that_ends(number)
    give_up_s = time.monotonic() + WAIT_S
    while many > few + 8 and time.monotonic() < give_up_s:  # ZeroMQ closes a moment later
        time.sleep(0.05)  # poll
        many = len(os.listdir("/proc/self/fd"))
    outbox.close()
    assert many <= few + 8, f"{many - few} more descriptors after 20 more inboxes"


def test_an_outbox_keeps_its_way_to_a_peer_that_it_writes_to(
    open_inbox: OpenInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(mailbox, "time", clock)
    (busy, busy_came), (quiet, quiet_came) = open_inbox(), open_inbox()
    outbox: Outbox[int] = Outbox(encode)
    outbox.send(quiet.address, 7)
    assert taken(quiet_came, 1) == [7]
    for number in range(5):
        assert outbox.send(busy.address, number)
        clock.now_s += mailbox.OUTBOX_IDLE_S / 4
    assert {*outbox._sockets} == {busy.address, quiet.address}, "closed, although no peer is new"
    kept = outbox._sockets[busy.address]
    inbox, came = open_inbox()
    outbox.send(inbox.address, 8)
    assert {*outbox._sockets} == {busy.address, inbox.address} and kept in outbox._sockets.values()
    outbox.send(quiet.address, 9)
    assert taken(busy_came, 5) == [*range(5)] and taken(came, 1) == [8]
    assert taken(quiet_came, 1) == [9]
    outbox.close()


def test_large_bytes_come_with_their_message_and_in_its_order(open_inbox: OpenInbox) -> None:
    attached: dict[int, bytes] = {}

    def attach(number: int, attachment: memoryview) -> int:
        attached[number] = bytes(attachment)
        return number

    inbox, came = open_inbox(secret=SECRET, attach=attach)
    outbox: Outbox[int] = Outbox(encode, SECRET)
    sent = {number: number.to_bytes() * 300_000 for number in range(0, 20, 2)}
    for number in range(20):
        large = memoryview(sent[number]) if number in sent else None
        assert outbox.send(inbox.address, number, large)
    assert taken(came, 20) == list(range(20))
    assert attached == sent
    outbox.close()


def test_an_attachment_that_nobody_expects_or_that_a_stranger_sends_is_dropped_with_its_message(
    open_inbox: OpenInbox,
) -> None:
    plain, came_plain = open_inbox(secret=SECRET)
    guarded, came = open_inbox(secret=SECRET, attach=lambda number, _: number)
    ours: Outbox[int] = Outbox(encode, SECRET)
    stranger: Outbox[int] = Outbox(encode, SECRET[::-1])
    assert stranger.send(guarded.address, 1, memoryview(b"large"))
    for number in (2, 3):
        assert ours.send(plain.address, number, memoryview(b"large") if number == 2 else None)
    assert taken(came_plain, 1) == [3]
    assert ours.send(guarded.address, 4, memoryview(b"large"))
    assert taken(came, 1) == [4]
    for outbox in (ours, stranger):
        outbox.close()
