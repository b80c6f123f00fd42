"""Addresses of other hosts: any free port, names, and those that nobody has."""

from __future__ import annotations

import queue
import socket

import msgspec
import pytest
import zmq

from mooncake_store.errors import StoreError
from mooncake_store.keys.curve import INSECURE_VARIABLE
from mooncake_store.keys.folder import VARIABLE
from mooncake_store.wire.addresses import NameUnknown, bindable, number_of_host, with_port
from mooncake_store.wire.mailbox import Inbox, Outbox
from mooncake_store.wire.request_reply import listening

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(int).decode


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("ipc:///tmp/inbox", "ipc:///tmp/inbox"),
        ("tcp://10.77.0.1:7001", "tcp://10.77.0.1:7001"),
        ("tcp://*:0", "tcp://*:0"),
        ("tcp://localhost:7001", "tcp://127.0.0.1:7001"),
        ("tcp://[::1]:7001", "tcp://[::1]:7001"),
    ],
)
def test_names_become_numbers_and_all_else_stays(address: str, bound: str) -> None:
    assert bindable(address) == bound


def test_a_name_with_an_ipv6_address_only_is_rejected_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(name: str, port: None, family: int, kind: int) -> None:
        assert (name, family) == ("six.example", socket.AF_INET)
        raise socket.gaierror(socket.EAI_ADDRFAMILY, "Address family not supported")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(NameUnknown, match=r"'six\.example' is no host with an IPv4 address"):
        number_of_host("six.example")


def test_a_name_that_nobody_has_is_named() -> None:
    with pytest.raises(NameUnknown, match=r"nobody\.invalid"):
        number_of_host("nobody.invalid")
    with pytest.raises(zmq.ZMQError, match=r"nobody\.invalid"):
        Inbox("tcp://nobody.invalid:0", decode, lambda _: None)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://lo:7001",
        "tcp://eth0:7001",
        "tcp://eth0:1:7001",
        "tcp://:7001",
        "tcp://[]:7001",
        "tcp://10.0.0.1:5;127.0.0.1:7001",
        "tcp://127.0.0.1;lo:7001",
    ],
)
def test_the_name_of_an_interface_is_refused_by_its_name(address: str) -> None:
    with pytest.raises(NameUnknown, match="network interfaces are not accepted"):
        bindable(address)


@pytest.mark.parametrize("host", ["*", "0", "0.0.0.0", "[::]", "[::0]", "[*]", "10.0.0.1"])
def test_what_other_hosts_reach_never_listens_without_keys(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (VARIABLE, INSECURE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    with zmq.Context() as context, pytest.raises(StoreError, match="other hosts can reach"):
        listening(context, zmq.ROUTER, f"tcp://{host}:0")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.1", "127.0.0.1", "127.9.9.9"])
def test_what_only_this_host_reaches_may_listen_without_keys(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (VARIABLE, INSECURE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    with zmq.Context() as context:
        bound, where = listening(context, zmq.ROUTER, f"tcp://{host}:0")
        bound.close()
    assert where.startswith("tcp://127.")


def test_others_connect_to_the_name_with_the_port_that_was_free() -> None:
    assert with_port("tcp://host-a:0", "tcp://10.0.0.1:41234") == "tcp://host-a:41234"
    assert with_port("ipc:///tmp/inbox", "ipc:///tmp/inbox") == "ipc:///tmp/inbox"


def test_an_inbox_on_any_free_port_is_reached_by_its_address() -> None:
    came: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    inboxes = [Inbox("tcp://localhost:0", decode, came.put) for _ in range(2)]
    assert len({inbox.address for inbox in inboxes}) == 2
    outbox: Outbox[int] = Outbox(encode)
    for number, inbox in enumerate(inboxes):
        assert inbox.address.startswith("tcp://localhost:")
        outbox.send(inbox.address, number)
    assert sorted(came.get(timeout=30.0) + came.get(timeout=30.0)) == [0, 1]
    outbox.close()
    for inbox in inboxes:
        inbox.close()


def test_an_inbox_may_listen_elsewhere_than_others_call_it() -> None:
    came: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    inbox = Inbox("tcp://localhost:0", decode, came.put, listen="tcp://127.0.0.1:0")
    assert inbox.address.startswith("tcp://localhost:")
    outbox: Outbox[int] = Outbox(encode)
    outbox.send(inbox.address, 7)
    assert came.get(timeout=30.0) == [7]
    outbox.close()
    inbox.close()
