"""`make`: an engine with our connector, once for each kind of engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.engine.connected.connected import Connected, Make
from tests.backends.engine.connected.small_engine import SmallEngine
from tests.backends.engine.trtllm.stand_in import VERSIONS, StandIn, importable


@pytest.fixture(params=["small", *VERSIONS])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    made: list[Connected] = []
    is_small = request.param == "small"

    def make_one(**options: Any) -> Connected:
        made.append((SmallEngine if is_small else StandIn)(tmp_path / str(len(made)), **options))
        return made[-1]

    with contextlib.nullcontext() if is_small else importable(request.param, monkeypatch):
        yield make_one
        for each in made:
            each.close()
