"""A server whose workers run engine tensorrt_llm over the stand-in package, and what it must say.

The stand-in's "model" computes tokens from the bytes that it finds in its pages (its kv_model.py),
so an answer is right only if the KV of the whole context was right. Not here: the tests.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.server import Server, running

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes" / "trtllm"
WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")


@cache
def _kv_model() -> ModuleType:
    path = FAKES / "tensorrt_llm" / "_fake" / "kv_model.py"
    spec = importlib.util.spec_from_file_location("fake_kv_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_kv_model"] = module  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    return module


def expected(
    prompt: list[int], tokens: int, dtype: str = "float32", page_tokens: int = 32, **shape_of: int
) -> list[int]:
    """What the demo checkpoint's shape gives, computed without any pages."""
    shape = _kv_model().KvShape(
        **{"layers": 4, "kv_heads": 2, "head_dim": 32, **shape_of},
        dtype=dtype,
        tokens_per_block=page_tokens,
        vocabulary_tokens=2048,
    )
    found: list[int] = _kv_model().reference_tokens(shape, prompt, tokens)
    return found


def set_parameter(repository: Path, model: str, name: str, value: str) -> None:
    """Also one that the file does not name yet."""
    path = repository / model / "config.pbtxt"
    line = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    text, count = re.subn(rf'parameters {{ key: "{name}" .*', line, path.read_text())
    path.write_text(text if count else f"{text}\n# Set by a test.\n{line}\n")


def serving(
    folder: Path, state_dir: Path, parameters: Mapping[str, str], further: Mapping[str, str]
) -> Iterator[Server]:
    """`parameters` that config.pbtxt has, and `further` ones of this engine."""

    def prepare(repository: Path) -> None:
        for model in WORKERS:
            for name, value in further.items():
                set_parameter(repository, model, name, value)
        set_parameter(repository, "prefill_1", "store_node", "s0")  # prefill_0's: hits are shared

    parameters = {"engine": "tensorrt_llm", **parameters}
    server = running(folder, state_dir, parameters, prepare=prepare)
    with pytest.MonkeyPatch.context() as patch:  # until the launcher has it
        patch.setenv("PYTHONPATH", str(FAKES))
        patch.setenv("FAKE_TRTLLM_FAILS", str(folder / "fails"))
        started = next(server)
    try:
        yield started
    finally:
        next(server, None)  # stops it, and looks for leftovers
