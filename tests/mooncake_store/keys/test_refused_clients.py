"""Each ZeroMQ listener: wrong key, no key, a retired one, another version: a refusal by name.

It comes quickly, and the others are served on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from zmq.utils import z85

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.directory.server import DirectoryServer
from mooncake_store.errors import AccessRefused, ProtocolMismatch, RequestInvalid, named
from mooncake_store.keys import curve, gate
from mooncake_store.keys.curve import AddressUnguarded, PeerAccess
from mooncake_store.node.control import NodeControl
from mooncake_store.wire import directory_protocol, node_protocol
from mooncake_store.wire.framing import PROTOCOL_VERSION, MessageKind, pack_header, unpack_header
from mooncake_store.wire.mailbox import Inbox, Outbox
from mooncake_store.wire.node_protocol import NodeClient
from mooncake_store.wire.request_reply import Failure, ZeroMqConnection
from tests.mooncake_store.directory_thread import ANY_PORT, DirectoryThread
from tests.mooncake_store.keys.hosts import Hosts

PATIENCE_S = 30.0  # far more than a refusal takes: what needs it all is a mere timeout
WHO = {"stranger": "key of this host is unknown|key is not the one", "": "requires? keys"}


@pytest.fixture
def directory(hosts: Hosts) -> Iterator[DirectoryServer]:
    """Run by host a. This process is host b from here on."""
    hosts.be("a")
    made = DirectoryThread()
    hosts.be("b")
    yield made.server
    made.close()


@pytest.fixture
def node(hosts: Hosts) -> Iterator[NodeControl]:
    hosts.be("a")
    made = NodeControl(ANY_PORT)
    made.serve(lambda request, _: "here")
    hosts.be("b")
    yield made
    made.close()


@pytest.fixture
def inbox(hosts: Hosts) -> Iterator[tuple[Inbox[int], queue.SimpleQueue[list[int]]]]:
    hosts.be("a")
    came: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    made = Inbox(ANY_PORT, msgspec.msgpack.Decoder(int).decode, came.put)
    hosts.be("b")
    yield made, came
    made.close()


def test_a_known_host_is_served_by_the_directory(directory: DirectoryServer) -> None:
    with DirectoryClient(directory.address, PATIENCE_S) as client:
        assert client.nodes() == []


@pytest.mark.parametrize("who", WHO)
def test_the_directory_refuses_strangers_by_name_and_serves_on(
    hosts: Hosts, directory: DirectoryServer, who: str
) -> None:
    with hosts.being(who, "b"), DirectoryClient(directory.address, PATIENCE_S) as client:
        for _ in range(2):
            with pytest.raises(AccessRefused, match=WHO[who]) as refusal:
                client.nodes()
            assert directory.address in str(refusal.value)
    with DirectoryClient(directory.address, PATIENCE_S) as client:
        assert client.nodes() == []


@pytest.mark.timeout(60)
def test_a_request_after_a_failed_handshake_does_not_block(
    hosts: Hosts, directory: DirectoryServer
) -> None:
    """ZeroMQ has given the connection up before the request is sent."""
    with hosts.being("", "b"), zmq.Context() as context:
        connection = ZeroMqConnection(context, directory.address)
        monitor = connection._access.monitor
        assert monitor is not None and monitor.poll(20_000), "no handshake"
        with pytest.raises(AccessRefused, match=WHO[""]):
            connection.exchange([b"header", b"body"], 1, time.monotonic() + 20.0)
        connection.close()


@pytest.mark.parametrize("who", WHO)
def test_a_node_refuses_strangers_by_name_and_serves_on(
    hosts: Hosts, node: NodeControl, who: str
) -> None:
    with hosts.being(who, "b"), NodeClient(node.address) as client:
        with pytest.raises(AccessRefused, match=WHO[who]) as refusal:
            client.ping(PATIENCE_S)
        assert node.address.partition("#")[0] in str(refusal.value)
    with NodeClient(node.address) as client:
        assert client.ping(PATIENCE_S) == "here"


@pytest.mark.parametrize("who", WHO)
def test_an_inbox_takes_nothing_of_strangers_and_their_log_says_why(
    hosts: Hosts,
    inbox: tuple[Inbox[int], queue.SimpleQueue[list[int]]],
    who: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, came = inbox
    encode = msgspec.msgpack.Encoder().encode
    with hosts.being(who, "b"):
        stranger: Outbox[int] = Outbox(encode)
        for _ in range(1_000):
            if not stranger.send(made.address, 666):
                break
            threading.Event().wait(0.02)
        else:
            pytest.fail("the stranger was never refused")
    assert "the inbox at tcp://127.0.0.1" in caplog.text and "refuses" in caplog.text
    ours: Outbox[int] = Outbox(encode)
    assert ours.send(made.address, 7)
    assert came.get(timeout=PATIENCE_S) == [7]
    stranger.close()
    ours.close()


@pytest.mark.parametrize("who", WHO)
def test_the_event_stream_goes_to_known_hosts_only(
    hosts: Hosts, directory: DirectoryServer, who: str
) -> None:
    with hosts.being(who, "b"), zmq.Context() as context, context.socket(zmq.SUB) as stream:
        stream.linger = 0
        stream.subscribe(b"")
        access = PeerAccess(directory.events_address, "the event stream")
        access.connect(stream)
        with pytest.raises(AccessRefused, match=WHO[who]):
            while True:
                assert access.monitor is not None and access.monitor.poll(PATIENCE_S * 1e3)
                access.must_redial()
        assert not stream.poll(0)
        access.close()
    feed = EventFeed(directory.address, directory.events_address, lambda _: None, lambda _: None)
    assert feed.wait_ready(PATIENCE_S)
    feed.close()


def test_a_feed_of_a_stranger_says_that_it_is_refused_and_hears_nothing(
    hosts: Hosts, directory: DirectoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    with hosts.being("stranger", "b"):
        feed = EventFeed(
            directory.address, directory.events_address, lambda _: None, lambda _: None
        )
        assert not feed.wait_ready(2.0)
        feed.close()
    assert "event stream of the directory" in caplog.text and "refuses" in caplog.text


def test_a_host_that_was_removed_is_let_in_nowhere(
    hosts: Hosts, directory: DirectoryServer
) -> None:
    with hosts.being("c", "b"), DirectoryClient(directory.address, PATIENCE_S) as client:
        kept = hosts.keys("c")  # it kept its folder in memory, say
        assert client.nodes() == []
        hosts.authority.remove_host("c")
        assert kept.curve.host == "c"
    with hosts.being("c", "b"):
        client = DirectoryClient(directory.address, PATIENCE_S)
        with pytest.raises(AccessRefused, match="key of this host is unknown"):
            client.nodes()
        client.close()


def test_a_server_without_keys_is_not_believed(hosts: Hosts) -> None:
    """Nobody can pose as the directory by listening in plain, or with keys of its own."""
    for impostor, causes in (
        ("", "has some|has no keys at all"),
        ("stranger", "key is not the one"),
    ):
        hosts.be(impostor)
        made = DirectoryThread()
        hosts.be("b")
        with (
            DirectoryClient(made.server.address, PATIENCE_S) as client,
            pytest.raises(AccessRefused, match=causes),
        ):
            client.nodes()
        made.close()


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 65_535])
def test_another_version_is_refused_with_both_named(
    directory: DirectoryServer, node: NodeControl, version: int
) -> None:
    requests = {directory.address: directory_protocol.Nodes(), node.address: node_protocol.Ping()}
    for address, request in requests.items():
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            PeerAccess(address).connect(socket)
            body = msgspec.msgpack.encode(request)
            socket.send_multipart([pack_header(MessageKind.REQUEST, 5, version), body])
            assert socket.poll(PATIENCE_S * 1e3)
            header, answer = socket.recv_multipart()
            assert unpack_header(header).kind is MessageKind.FAILURE
            failure = msgspec.msgpack.decode(answer, type=Failure)
            error = named(failure.kind, failure.message)
            assert isinstance(error, ProtocolMismatch)
            assert f"version {version} " in str(error) and f"{PROTOCOL_VERSION};" in str(error)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://203.0.113.9:7001"])
def test_an_address_of_other_hosts_needs_keys_or_insecure(
    hosts: Hosts, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.be("")
    for make in (
        lambda: DirectoryServer(Directory(1), address, ANY_PORT),
        lambda: DirectoryServer(Directory(1), ANY_PORT, address),
        lambda: NodeControl(address),
        lambda: Inbox(address, bytes, lambda _: None),
    ):
        with pytest.raises(AddressUnguarded, match=r"there are no keys.*MOONCAKE_KEYS"):
            make()
    monkeypatch.setenv(curve.INSECURE_VARIABLE, "1")
    if "203" not in address:
        NodeControl(address).close()


def test_a_host_without_the_directorys_key_cannot_run_one(hosts: Hosts) -> None:
    hosts.authority.add_host("w", may_direct=False)
    hosts.be("w")
    with pytest.raises(RequestInvalid, match="no directory may run on host w"):
        DirectoryServer(Directory(1), ANY_PORT, ANY_PORT)
    NodeControl(ANY_PORT).close()


def test_the_gate_rejects_a_malformed_request_and_answers_the_next_one(hosts: Hosts) -> None:
    known = hosts.keys("b").curve.ordered()[0].own_public
    with zmq.Context() as context:
        gate.guard(context, hosts.keys("a"))
        with context.socket(zmq.REQ) as asking:
            asking.connect(gate.ADDRESS)
            sound = [b"1.0", b"7", gate.DOMAIN, b"peer", b"", b"CURVE", z85.decode(known)]
            for frames, code in (([b"1.0"], b"400"), (sound[:6], b"400"), (sound, b"200")):
                asking.send_multipart(frames)
                assert asking.poll(20_000), "no answer"
                assert asking.recv_multipart()[2] == code
        context.destroy(linger=0)


def test_ipc_and_unix_sockets_ask_for_no_key(hosts: Hosts, tmp_path: object) -> None:
    hosts.be("a")
    made = NodeControl(f"ipc://{tmp_path}/control")
    made.serve(lambda request, _: "here")
    hosts.be("")
    assert "#" not in made.address
    with NodeClient(made.address) as client:
        assert client.ping(PATIENCE_S) == "here"
    made.close()
