"""The stand-in for tensorrt_llm, for the tests that want it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parents[2] / "fakes" / "trtllm"


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import tensorrt_llm` gives the stand-in; afterwards it is gone again."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
