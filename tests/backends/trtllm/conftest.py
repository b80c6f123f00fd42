"""The stand-in for tensorrt_llm, for the tests that want it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.engine.trtllm.stand_in import VERSIONS, importable


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import tensorrt_llm` gives the stand-in, of the newest release; afterwards it is gone."""
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    with importable(VERSIONS[0], monkeypatch):
        yield
