"""A frontend's view of its cluster on a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.frontend import cluster_view
from backends.frontend.cluster_view import ClusterView
from conductor.config import ConductorConfig


class Clock:
    now_s = 100.0
    on_sleep: Callable[[], None] = staticmethod(lambda: None)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cluster_view, "time", made)
    return made


@pytest.fixture
def view(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterView]:
    """Without a directory: events come from the test, and ticks too."""
    monkeypatch.setattr(cluster_view, "TICK_S", 3600.0)
    made = ClusterView(ConductorConfig(), f"ipc://{tmp_path}/d", f"ipc://{tmp_path}/e")
    yield made
    made.close()
