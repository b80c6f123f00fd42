"""A listener of Unix sockets whose process has as many descriptors as it may."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncake_store.directory.__main__ import raise_descriptor_limit
from mooncake_store.wire import unix_socket
from mooncake_store.wire.framing import MessageKind, pack_header, to_stream
from mooncake_store.wire.unix_socket import UnixListener


@contextmanager
def no_further_descriptor() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def connected(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(30.0)
    made.connect(str(path))
    return made


def ready(listener: UnixListener) -> list[int]:
    """As its owner polls; without waiting."""
    poller = select.poll()
    for each in listener.files():
        poller.register(each, select.POLLIN)
    return [each for each, _ in poller.poll(0)]


def test_who_is_connected_is_served_while_nobody_else_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "direct"
    listener = UnixListener(str(path), lambda frames: frames)
    early, late = connected(path), connected(path)
    listener.serve(ready(listener))
    assert len(listener.files()) == 3
    waiting = connected(path)
    message = to_stream([pack_header(MessageKind.REQUEST, 1), b"body"])
    with no_further_descriptor():
        listener.serve(ready(listener))
        assert len(listener.files()) == 2, "it pauses, instead of trying without end"
        early.sendall(message)
        listener.serve(ready(listener))
        assert early.recv(len(message)) == message
    assert [each for each in caplog.messages if "accepted no client" in each]
    waiting.sendall(message)
    late.close()
    for _ in range(3_000):
        listener.serve(ready(listener))
        if select.select([waiting], [], [], 0.01)[0]:
            break
    assert waiting.recv(len(message)) == message
    for each in (early, waiting):
        each.close()
    listener.close()


def test_a_crowd_that_is_turned_away_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "CONNECTIONS_MAX", 1)
    listener = UnixListener(str(tmp_path / "direct"), lambda frames: frames)
    crowd = [connected(tmp_path / "direct") for _ in range(20)]
    listener.serve(ready(listener))
    assert [each for each in caplog.messages if "refused a client" in each] == [
        "refused a client: 1 are connected"
    ]
    for each in crowd:
        each.close()
    listener.close()


def test_a_directory_may_have_as_many_descriptors_as_its_user() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1_024), hard))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
