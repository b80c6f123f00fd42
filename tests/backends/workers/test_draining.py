"""A worker that is drained takes nothing new, ends what it has, or lets it go on elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.errors import WorkerGone
from backends.workers.protocol import DrainWorker, decode_message, encode, open_outbox
from tests.backends.workers.pair import WAIT_S, Pair, pairs
from tests.e2e.server import wait_until


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch)


def drain(worker: Any, is_on: bool, moves: bool = False) -> None:
    """By its inbox, as an operator's command does."""
    outbox = open_outbox()
    outbox.send(worker.process.info.inbox, DrainWorker(is_on, moves))
    wait_until(lambda: worker.is_draining == is_on, "the worker to hear of it", WAIT_S)
    outbox.close()
    with worker.lock:  # until all of the message is done
        return


def test_the_message_travels() -> None:
    for message in (DrainWorker(True, True), DrainWorker(False)):
        assert decode_message(encode(message)) == message


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_drained_worker_refuses_as_one_that_left_and_takes_requests_again(
    pair: Pair, role: str
) -> None:
    worker = getattr(pair, role)
    drain(worker, True)
    assert worker.report().is_draining, "the conductor hears it"
    with pytest.raises(WorkerGone, match="being drained"):
        if role == "prefill":
            pair.ask([3, 4, 5])
        else:
            raise pair.ask([3, 4, 5]).wait_failed()
    drain(worker, False)
    assert not worker.report().is_draining
    assert len(pair.ask([3, 4, 5]).wait()) == 8


def hold(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Steps of the decode worker wait: (one has begun, they may go on)."""
    began, goes_on = threading.Event(), threading.Event()
    forward = pair.decode.driver.engine.forward

    def held(*given: Any) -> Any:
        began.set()
        assert goes_on.wait(WAIT_S)
        return forward(*given)

    monkeypatch.setattr(pair.decode.driver.engine, "forward", held)
    return began, goes_on


@pytest.mark.parametrize("moves", [False, True])
def test_what_a_drained_worker_has_comes_to_its_end_or_goes_elsewhere(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    began, goes_on = hold(pair, monkeypatch)
    asked = pair.ask([3, 4, 5])
    assert began.wait(WAIT_S)
    drain(pair.decode, True, moves)
    goes_on.set()
    if moves:
        assert isinstance(asked.wait_failed(), WorkerGone), "its frontend goes on elsewhere"
    else:
        assert len(asked.wait()) == 8
