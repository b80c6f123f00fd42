"""The torch engine on a real GPU: every check of engine_checks.py, as a test.

Skipped without a GPU:  python -m pytest tests/gpu/test_torch_engine.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU on this machine", allow_module_level=True)

from tests.gpu.engine_checks import CHECKS, Bench  # noqa: E402


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(Path(tmp_path_factory.mktemp("llama")), "cuda")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Callable[[Bench], None], bench: Bench) -> None:
    check(bench)
