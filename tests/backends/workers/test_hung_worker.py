"""A worker whose engine hangs leaves, tells whoever waits, and ends; its reports tell it before."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backends.errors import WorkerUnavailable
from backends.workers import worker_process
from backends.workers.protocol import HEARTBEAT_S, Heartbeat
from backends.workers.step_times import HUNG_S_MIN, StepWatch
from backends.workers.worker_process import WATCH_S, WorkerProcess
from tests.backends.stepped_site import Outbox, Site

WAIT_S = 20.0


class Ticks:
    """A clock and an event that never comes; its waiting takes no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_over = False

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.is_over or self.now_s > 1_000.0


def watching(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Ticks, list[str]]:
    """A WorkerProcess of which only the watch is there, and what became of it."""
    ticks, said = Ticks(), []
    worker: Any = object.__new__(WorkerProcess)
    worker.worker_id, worker.jobs = "decode_0", {}
    worker.watch, worker._reporting = StepWatch(), StepWatch()
    worker._is_closing, worker.is_lost = ticks, False
    worker.driver = SimpleNamespace(close=lambda: said.append("closed"))
    worker.deregister = lambda: said.append("left")

    def end(*steps: Any) -> None:
        for step in steps:
            step()
        said.append("ended")
        ticks.is_over = True

    monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=ticks.monotonic))
    monkeypatch.setattr(worker_process, "end_process", end)
    return worker, ticks, said


def test_jobs_of_a_hung_engine_are_told_when_the_worker_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, ticks, said = watching(monkeypatch)
    client = SimpleNamespace(fail=lambda error: said.append(type(error).__name__))
    worker.jobs = {"r": SimpleNamespace(client=client)}
    worker.watch.began(0.0, 0.1)
    worker._watch_loop()
    assert said == ["left", WorkerUnavailable.__name__, "closed", "ended"]
    assert HUNG_S_MIN < ticks.now_s <= HUNG_S_MIN + 2 * WATCH_S


def test_a_worker_that_cannot_even_report_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ticks, said = watching(monkeypatch)
    worker._reporting.began(5.0)
    worker._watch_loop()
    assert said == ["left", "closed", "ended"] and ticks.now_s > 5.0 + HUNG_S_MIN


def test_an_idle_worker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, said = watching(monkeypatch)
    worker._watch_loop()
    assert not said


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_reports_tell_of_a_step_that_does_not_end(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(0, monkeypatch)
    client = site.ask([1, 2, 3, 4, 5], 3)
    hung = getattr(site, role)
    if role == "decode":
        for _ in range(20):
            for worker in site.workers:
                if not site.decode.batching.running:
                    site.turn(worker)
            while todo := site.things_to_do():
                todo[0]()
        assert site.decode.batching.running
    else:
        site.turn(hung)
        while todo := site.things_to_do():
            todo[0]()
    begun, goes_on = threading.Event(), threading.Event()

    def stands_still() -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)

    monkeypatch.setattr(hung.driver.engine, "_meanwhile", stands_still)
    assert hung.report().oldest_step_s == 0.0
    engine = threading.Thread(target=hung._turn)
    engine.start()
    assert begun.wait(WAIT_S)
    first_s = hung.report().oldest_step_s
    assert 0.0 < first_s < hung.report().oldest_step_s
    goes_on.set()
    engine.join(WAIT_S)
    assert hung.report().oldest_step_s == 0.0
    monkeypatch.undo()
    assert not client.error


def test_every_frontend_hears_now_and_then_which_of_its_requests_are_in_hand() -> None:
    worker: Any = object.__new__(WorkerProcess)
    worker.incarnation, worker.outbox, worker._heartbeat_s = "life", Outbox(), float("-inf")
    asked = {"a": "ipc://1", "b": "ipc://2", "c": "ipc://1", "d": ""}
    worker.jobs = {
        name: SimpleNamespace(request=SimpleNamespace(reply_inbox=inbox))
        for name, inbox in asked.items()
    }
    for now_s in (100.0, 101.0, 100.0 + HEARTBEAT_S):
        worker._send_heartbeats(now_s)
    beats = [("ipc://1", Heartbeat("life", ["a", "c"])), ("ipc://2", Heartbeat("life", ["b"]))]
    assert worker.outbox.messages == beats * 2
