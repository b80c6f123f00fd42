"""Copies that a test holds up, and a record of what the connector sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from backends.engine.connected import messages as m
from backends.engine.connected.copier import HostCopier
from tests.backends.engine.connected.gate import gate as save_gate  # noqa: F401
from tests.backends.engine.connected.listening import WAIT_S
from tests.vllm.inside.real_engine import RealVllm


class LoadGate:
    """Holds up loads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        load = HostCopier.load_aside

        def held(copier: HostCopier, runs: Any, after: Any) -> None:
            self.is_reached.set()
            assert self.is_open.wait(WAIT_S)
            load(copier, runs, after)

        monkeypatch.setattr(HostCopier, "load_aside", held)


@pytest.fixture
def load_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadGate]:
    gate = LoadGate(monkeypatch)
    yield gate
    gate.is_open.set()


class Sent:
    """All messages of the scheduler's half and the rank's half, in the order of sending."""

    def __init__(self, engine: RealVllm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[m.ToWorker] = []
        (copies,) = engine.copies
        link = engine.in_scheduler._link
        monkeypatch.setattr(link, "send", self._noting(link.send))
        monkeypatch.setattr(copies, "_send", self._noting(copies._send))

    def _noting(self, send: Any) -> Any:
        def note(message: m.ToWorker) -> None:
            self.all.append(message)
            send(message)

        return note

    def of(self, kind: type[m.ToWorker]) -> list[m.ToWorker]:
        return [message for message in self.all if isinstance(message, kind)]

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.all]
