"""Engines of the tests inside vLLM's interpreter, and a clean one for each test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

if TYPE_CHECKING:
    from tests.vllm.inside.real_engine import Family, PlainModel, RealVllm

DEMO = Path(__file__).parents[3] / "backends" / "demo_checkpoint"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PAGE_TOKENS = {"deepseek_v3": 16}  # vLLM has only this for latent attention on a CPU


class Engines:
    """Checkpoints, their reference models, and the one engine that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._families: dict[str, tuple[Family, PlainModel]] = {}
        self._number = 0
        self._running: tuple[tuple[Any, ...], RealVllm] | None = None

    def family(self, name: str) -> tuple[Family, PlainModel]:
        from tests.vllm.inside.real_engine import Family, PlainModel
        from tests.vllm.inside.windowed import write_mistral
        from tests.vllm.random_checkpoints import write

        if name not in self._families:
            folder = self._folder / name
            write_mistral(folder) if name == "mistral" else write(name, folder)
            if name == "llama":  # grammars need a tokenizer
                for file in TOKENIZER_FILES:
                    shutil.copy(DEMO / file, folder / file)
            is_latent = name == "deepseek_v3"
            family = Family(folder, PAGE_TOKENS.get(name, 32), is_latent)
            self._families[name] = family, PlainModel(folder)
        return self._families[name]

    def get(self, family: str = "llama", **options: Any) -> RealVllm:
        """The running engine if it has these options, else another one."""
        from tests.vllm.inside.real_engine import RealVllm

        wanted = (family, *sorted(options.items()))
        if self._running is not None:
            has, engine = self._running
            if has == wanted:
                engine.forget()
                engine.new_listener()
                return engine
        self.close()
        self._number += 1
        engine = RealVllm(self._folder / str(self._number), *self.family(family), **options)
        self._running = wanted, engine
        return engine

    def close(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running[1].close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(tmp_path_factory.mktemp("vllm"))
    yield found
    found.close()


@pytest.fixture
def engine(engines: Engines) -> RealVllm:
    """A Llama-shaped model in pages of 32 tokens, with an empty prefix cache."""
    return engines.get()
