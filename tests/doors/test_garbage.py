"""Garbage at each of our listeners, with keys and without: it serves on, and does not grow."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from mooncake_store.keys.tls import contexts_of_process
from tests.doors.garbage import DIRECTORY_VERBS, NODE_VERBS, Garbage
from tests.doors.listeners import Listener, Site, dialled, tls_connection

pytestmark = pytest.mark.servers

FEW = {"directory": 1_500, "events": 100, "node": 800, "data": 100, "inbox": 1_500, "outside": 200}
# 100,000 in all.
MANY = {
    "directory": 35_000,
    "events": 2_000,
    "node": 18_000,
    "data": 5_000,
    "inbox": 30_000,
    "outside": 10_000,
}
WARM_UP = 0.2  # of the frames: buffers and arenas grow to their size
GROWTH_BYTES_MAX = 24 * 2**20
FILES_MORE_MAX = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("doors"))
    yield made
    made.close()


def say_with_keys(site: Site, listener: Listener, garbage: Garbage, count: int) -> None:
    """`count` frames by a host that is accepted."""
    if listener.name == "data":
        say_over_tls(site, garbage, count)
        return
    kind = {"inbox": zmq.PUSH, "events": zmq.SUB}.get(listener.name, zmq.DEALER)
    verbs = DIRECTORY_VERBS if listener.name == "directory" else NODE_VERBS
    with dialled(listener.address, kind) as peer:
        for _ in range(count):
            if kind == zmq.PUSH:
                peer.send(garbage.message())
            elif kind == zmq.SUB:  # all that a subscriber says
                topic = garbage.some_bytes()
                peer.subscribe(topic)
                peer.unsubscribe(topic)
            else:
                peer.send_multipart(garbage.request(verbs))
                with contextlib.suppress(zmq.Again):
                    while True:
                        peer.recv_multipart(zmq.NOBLOCK)


def say_over_tls(site: Site, garbage: Garbage, count: int) -> None:
    tls = contexts_of_process()
    assert tls is not None
    token = site.info.incarnation.encode()
    for _ in range(count):
        with contextlib.suppress(OSError), tls_connection(site.info.data_address, tls) as peer:
            peer.sendall(garbage.transport_frame(token))


SILENT, SLOW = 40, 20


@pytest.mark.parametrize("name", ["directory", "events", "node", "data", "inbox"])
def test_silent_and_slow_clients_keep_no_listener_from_serving(site: Site, name: str) -> None:
    """They connect and send nothing, or the first bytes of a handshake one by one."""
    (listener,) = [each for each in site.listeners if each.name == name]
    assert listener.is_served()
    before = listener.open_files
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(listener.host_and_port, timeout=10.0))
            for _ in range(SILENT + SLOW)
        ]
        for byte in (b"\xff", b"\x00", b"\x00"):  # as ZeroMQ's greeting begins
            for peer in peers[SILENT:]:
                with contextlib.suppress(OSError):  # it was closed already
                    peer.sendall(byte)
            assert listener.is_served()
    assert listener.settled_files(before + FILES_MORE_MAX) <= before + FILES_MORE_MAX


def say_from_outside(listener: Listener, garbage: Garbage, count: int) -> None:
    """`count` connections of somebody without keys."""
    for _ in range(count):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(listener.host_and_port, timeout=10.0) as peer,
        ):
            peer.sendall(garbage.opening())
            if garbage.rng.random() < 0.1:
                peer.settimeout(0.01)
                peer.recv(100)


def attack(listener: Listener, say: Callable[[Garbage, int], None], count: int, seed: int) -> None:
    """It is as it was after the first part of these frames, and serves after all of them."""
    garbage = Garbage(seed)
    assert listener.is_served()  # what answering opens is open from here on
    files = listener.open_files
    say(garbage, int(count * WARM_UP))
    assert listener.is_served()
    held_bytes = listener.memory_bytes
    say(garbage, count - int(count * WARM_UP))
    assert listener.is_served(), f"{listener.name} serves no more"
    files_after = listener.settled_files(files + FILES_MORE_MAX)
    assert files_after <= files + FILES_MORE_MAX, f"{listener.name}: {files} -> {files_after} files"
    grown = listener.memory_bytes - held_bytes
    assert grown < GROWTH_BYTES_MAX, f"{listener.name} grew by {grown / 2**20:.1f} MiB"


def attack_all(site: Site, counts: dict[str, int], seed: int) -> None:
    for listener in site.listeners:
        attack(
            listener,
            lambda garbage, count, to=listener: say_with_keys(site, to, garbage, count),
            counts[listener.name],
            seed,
        )
        attack(
            listener,
            lambda garbage, count, to=listener: say_from_outside(to, garbage, count),
            counts["outside"] // len(site.listeners),
            seed,
        )
    for listener in site.listeners:
        assert listener.is_served(), f"{listener.name} serves no more"
    logs = "".join(path.read_text() for path in Path(site.directory.log or "").parent.glob("*.log"))
    assert "Traceback" not in logs, logs[-3_000:]


def test_some_garbage_changes_nothing(site: Site, seed: int) -> None:
    attack_all(site, FEW, seed)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_hundred_thousand_frames_change_nothing(site: Site, seed: int) -> None:
    attack_all(site, MANY, seed)
