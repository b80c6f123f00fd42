"""The stand-in for tensorrt_llm, importable in tests that ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parents[3] / "fakes" / "trtllm"


def forget_modules() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorrt_llm" or name == "backends.engine.trtllm.connector":
            del sys.modules[name]


@pytest.fixture(params=["1.3", "1.2"])
def trtllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both places where versions have the connector API, one after the other."""
    monkeypatch.setenv("FAKE_TRTLLM_API", request.param)
    monkeypatch.syspath_prepend(str(FAKES))
    forget_modules()
    yield request.param
    forget_modules()
