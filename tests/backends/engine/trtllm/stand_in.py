"""The stand-in for TensorRT-LLM: importable where a test asks for it, and with our connector."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.engine.connected import messages as m
from tests.backends.engine.connected.connected import Connected

FAKES = Path(__file__).resolve().parents[3] / "fakes" / "trtllm"
CONNECTOR = "backends.engine.trtllm.connector"
# KV cache manager V2, and V1 with the connector API at its two places.
VERSIONS = ("1.4", "1.3", "1.2")


def forget_modules() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorrt_llm" or name == CONNECTOR:
            del sys.modules[name]


@contextlib.contextmanager
def importable(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import tensorrt_llm` gives the stand-in, with the API where this version has it."""
    monkeypatch.setenv("FAKE_TRTLLM_API", version)
    monkeypatch.syspath_prepend(str(FAKES))
    forget_modules()
    yield
    forget_modules()


class StandIn(Connected):
    is_v2 = property(lambda self: os.environ["FAKE_TRTLLM_API"] == "1.4")

    def __init__(self, folder: Path, shape: dict[str, Any] | None = None, **options: Any) -> None:
        from tensorrt_llm._fake.kv_model import KvShape

        kv = KvShape(**(shape or {}))
        token_bytes = kv.layers * kv.kv_factor * kv.kv_heads * kv.head_bytes
        super().__init__(folder, kv, token_bytes, **options)

    def _start(self, site: m.Site, options: dict[str, Any]) -> None:
        from tensorrt_llm._fake.executor import Executor
        from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig, TorchLlmArgs

        cache = {"enable_block_reuse": True, "enable_partial_reuse": False, "max_tokens": 512}
        cache |= {"use_kv_cache_manager_v2": self.is_v2, **options.pop("cache", {})}
        os.environ.update(site.to_environment())
        try:
            self.executor = Executor(
                TorchLlmArgs(
                    kv_cache_config=KvCacheConfig(
                        tokens_per_block=self.shape.tokens_per_block, **cache
                    ),
                    kv_connector_config=KvCacheConnectorConfig(
                        CONNECTOR, "MooncakeConnectorScheduler", "MooncakeConnectorWorker"
                    ),
                    **options,
                ),
                self.shape,
            )
        finally:
            os.environ.pop(m.ENVIRONMENT)
        self.scheduler = self.executor.connectors.scheduler._scheduler
        self.copies = [worker._copies for worker in self.executor.connectors.workers]

    def submit(
        self, number: int, prompt: Sequence[int], tokens_max: int, salt: str | None = None
    ) -> Any:
        from tensorrt_llm._fake.request import LlmRequest

        request = LlmRequest(number, list(prompt), tokens_max, cache_salt=salt)
        self.executor.submit(request)
        return request

    def shake(self, chance: random.Random) -> None:
        """Manager V2 takes less than was offered, and takes the pages of running requests."""
        executor = self.executor
        if self.is_v2:
            executor.loads_max_tokens = chance.choice([None, None, 0, 4, 24])
            if chance.random() < 0.1 and executor.args.disable_overlap_scheduler:
                for request in chance.sample(executor._active, min(1, len(executor._active))):
                    executor.take_pages_of(request)

    def output(self, request: Any) -> list[int]:
        return list(request.tokens[request.asked_tokens :])

    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        from tensorrt_llm._fake.kv_model import reference_tokens

        return list(reference_tokens(self.shape, prompt, tokens))

    @property
    def saving(self) -> set[int]:
        return set(self.executor.connectors.saving)

    def close(self) -> None:
        super().close()
        for connector in (self.executor.connectors.scheduler, *self.executor.connectors.workers):
            connector.close()
