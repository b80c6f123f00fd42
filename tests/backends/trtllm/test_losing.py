"""What fails while a TensorRT-LLM worker closes does not end its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backends.engine.connected.generation import FAILURES_MAX, EngineHealth
from backends.workers.connected.driver import ConnectedDriver


@pytest.mark.parametrize("is_closing", [False, True])
def test_stagings_that_fail_lose_the_worker_unless_it_closes(is_closing: bool) -> None:
    lost: list[str] = []
    worker = SimpleNamespace(is_closing=is_closing, process=SimpleNamespace(lose=lost.append))
    driver: Any = SimpleNamespace(_worker=worker, _health=EngineHealth(worker.process.lose))
    for number in range(FAILURES_MAX):
        ConnectedDriver._failed_for(driver, f"the connector did not answer ({number})")
    assert len(lost) == (0 if is_closing else 1)
