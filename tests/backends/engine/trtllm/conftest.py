"""Fixtures of tests that only concern TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.engine.connected.connected import Make
from tests.backends.engine.trtllm.stand_in import VERSIONS, StandIn, importable


@pytest.fixture(params=VERSIONS)
def trtllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both places where versions have the connector API, one after the other."""
    with importable(request.param, monkeypatch):
        yield request.param


@pytest.fixture
def make(tmp_path: Path, trtllm: str) -> Iterator[Make]:
    made: list[StandIn] = []

    def make_one(shape: dict[str, Any] | None = None, **options: Any) -> StandIn:
        made.append(StandIn(tmp_path / str(len(made)), shape, **options))
        return made[-1]

    yield make_one
    for each in made:
        each.close()
