"""Tests of this folder start servers whose workers run vLLM: `make test-vllm`.

They run in the project's environment, and the tests in `inside` in vLLM's, because they import
vLLM. Each environment collects its own tests only.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".venv-vllm" / "bin" / "python"
TEST_S_MAX = 900  # the first test of a module waits for vLLM to start in each worker

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") else ["inside"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER not in item.path.parents or FOLDER / "inside" in item.path.parents:
            continue
        item.add_marker(pytest.mark.long)
        item.add_marker(pytest.mark.e2e)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_S_MAX))
        if not os.access(PYTHON, os.X_OK):
            item.add_marker(pytest.mark.skip(reason="there is no .venv-vllm; `make vllm` makes it"))
