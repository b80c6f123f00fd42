"""A copier that a test holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from backends.engine.connected.copier import HostCopier
from tests.backends.engine.connected.listening import WAIT_S


class Gate:
    """Holds up saves until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: set[int] | None = None) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        save = HostCopier.save
        first_of: dict[int, int] = {}

        def held(copier: HostCopier, runs: Any, after: Any) -> None:
            rank = first_of.setdefault(id(copier), len(first_of))
            if ranks is None or rank in ranks:
                self.is_reached.set()
                assert self.is_open.wait(WAIT_S)
            save(copier, runs, after)

        monkeypatch.setattr(HostCopier, "save", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()
