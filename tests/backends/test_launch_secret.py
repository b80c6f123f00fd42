"""Messages and calls of processes that do not know the secret of a launch are nothing to it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from backends import launch_secret
from backends.frontend.grpc_calls import GrpcCalls
from backends.workers.protocol import Stop, WorkerMessage, encode, open_inbox, open_outbox

SECRET = "0123456789abcdef"


def test_a_secret_is_right_or_not() -> None:
    made = launch_secret.make_secret()
    assert made != launch_secret.make_secret() and len(made) >= 32
    assert launch_secret.is_right(made, made)
    for wrong in ("", made[:-1], made + "0", "\ud800", None, 7, made.encode()):
        assert not launch_secret.is_right(wrong, made)


@pytest.fixture
def came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, queue.SimpleQueue[WorkerMessage]]]:
    """The address of an inbox, and the messages that it accepted."""
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)
    messages: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()

    def take(some: list[WorkerMessage]) -> None:
        for message in some:
            messages.put(message)

    inbox = open_inbox(f"ipc://{tmp_path}/inbox", take)
    yield inbox.address, messages
    inbox.close()


def test_only_messages_with_the_secret_reach_a_process(
    came: tuple[str, queue.SimpleQueue[WorkerMessage]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, messages = came
    ours = open_outbox()
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, "another")
    theirs = open_outbox()
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.connect(address)
    for number in range(3):
        stranger.send(encode(Stop(f"stranger-{number}", "")))
        theirs.send(address, Stop(f"theirs-{number}", ""))
        ours.send(address, Stop(f"ours-{number}", ""))
    found = [messages.get(timeout=30.0) for _ in range(3)]
    assert [message.request_id for message in found] == ["ours-0", "ours-1", "ours-2"]  # type: ignore[union-attr]
    ours.send(address, Stop("last", ""))
    assert messages.get(timeout=30.0) == Stop("last", ""), "and nothing else came meanwhile"
    stranger.close(linger=0)
    ours.close()
    theirs.close()


def test_the_secret_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)
    calls = GrpcCalls()
    assert SECRET not in repr(calls) + repr(open_outbox())
    calls.close()
