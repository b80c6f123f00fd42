"""A worker's end and an executor with our connector, in one process: what a test drives.

`keep` is the store: block bytes by key, so that what one side saved another can stage.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.channel import ConnectorHost
from mooncake_store.block_keys import chain_seed
from mooncake_store.layout import blocks_touched
from tests.backends.engine.trtllm.listening import WAIT_S, Heard

CONNECTOR = "backends.engine.trtllm.connector"


class Connected:
    """One engine: its staging pool, its channel, its executor."""

    def __init__(
        self, folder: Path, shape: Any, block_tokens: int = 16, pool_pages: int = 24,
        connector_module: str = CONNECTOR, block_bytes: int = 0, heard: Heard | None = None,
        aside_bytes_min: int = 0, **arguments: Any,
    ) -> None:  # fmt: skip
        from tensorrt_llm._fake.executor import Executor
        from tensorrt_llm.llmapi.llm_args import (
            KvCacheConfig,
            KvCacheConnectorConfig,
            TorchLlmArgs,
        )

        self.shape, self.block_tokens = shape, block_tokens
        token_bytes = shape.layers * shape.kv_factor * shape.kv_heads * shape.head_bytes
        self.block_bytes = block_bytes or token_bytes * block_tokens
        folder.mkdir(parents=True, exist_ok=True)
        pool_path = folder / "pool"
        pool_path.write_bytes(bytes(pool_pages * self.block_bytes))
        self.pool = np.memmap(pool_path, dtype=np.uint8, mode="r+") if pool_pages else np.empty(0)
        self.free_pages = list(range(pool_pages))
        self.heard = heard or Heard()
        address = f"ipc://{folder}/kv"
        site = m.Site(address, str(pool_path), block_tokens, self.block_bytes, aside_bytes_min)
        os.environ.update(site.to_environment())
        cache = {"enable_block_reuse": True, "enable_partial_reuse": False, "max_tokens": 512}
        cache |= arguments.pop("cache", {})
        self.host = ConnectorHost(site.channel, self.heard)
        try:
            self.executor = Executor(
                TorchLlmArgs(
                    kv_cache_config=KvCacheConfig(tokens_per_block=shape.tokens_per_block, **cache),
                    kv_connector_config=KvCacheConnectorConfig(
                        connector_module, "MooncakeConnectorScheduler", "MooncakeConnectorWorker"
                    ),
                    **arguments,
                ),
                shape,
            )
        except BaseException:
            self.host.close()  # after what was said until now
            raise
        finally:
            os.environ.pop(m.ENVIRONMENT)
        self.host.wait_ready(WAIT_S)

    def stage(
        self, request_id: str, prompt: Sequence[int], keep: dict[bytes, bytes] | None = None,
        loaded_tokens: int = 0, more_tokens: int = 0, salt: str = "",
    ) -> list[int]:  # fmt: skip
        """Stages `prompt` with the blocks that `keep` has for its first tokens; its pool pages."""
        count = blocks_touched(len(prompt) + more_tokens, self.block_tokens)
        pages = [self.free_pages.pop() for _ in range(count)]
        seed = chain_seed("print", cache_salt=salt)
        stage = m.Stage.of(
            request_id, prompt, self.block_tokens, seed, salt, pages, loaded_tokens
        )  # fmt: skip
        for index, page in enumerate(pages):
            self.page(page)[:] = 0xEE  # what nobody wrote
            if keep is not None and index * self.block_tokens < loaded_tokens:
                key = stage.keys[index] if index < len(stage.keys) else b"tail"
                self.page(page)[:] = np.frombuffer(keep[key], np.uint8)
        self.host.stage(stage, WAIT_S).result(WAIT_S)
        return pages

    def unstage(self, request_id: str, pages: list[int]) -> None:
        self.host.unstage(request_id, WAIT_S).result(WAIT_S)
        self.free_pages += pages

    def keep(
        self, prompt: Sequence[int], pages: Sequence[int], into: dict[bytes, bytes], salt: str = ""
    ) -> None:
        """The pool's pages into the store, the last, partial one as the tail."""
        seed = chain_seed("print", cache_salt=salt)
        keys = m.Stage.of("", prompt, self.block_tokens, seed, salt, pages, 0).keys
        for index, page in enumerate(pages):
            into[keys[index] if index < len(keys) else b"tail"] = self.page(page).tobytes()

    def page(self, page: int) -> Any:
        return self.pool[page * self.block_bytes : (page + 1) * self.block_bytes]

    def submit(
        self, number: int, prompt: Sequence[int], tokens_max: int, salt: str | None = None
    ) -> Any:
        from tensorrt_llm._fake.request import LlmRequest

        request = LlmRequest(number, list(prompt), tokens_max, cache_salt=salt)
        self.executor.submit(request)
        return request

    def generate(self, number: int, prompt: Sequence[int], tokens_max: int, **options: Any) -> Any:
        """Runs it to its end; the request, with the tokens that came out."""
        request = self.submit(number, prompt, tokens_max, **options)
        self.executor.run_until_idle()
        return request

    def output(self, request: Any) -> list[int]:
        return list(request.tokens[len(request.prompt) :])

    def close(self) -> None:
        self.host.close()
        self.executor.shutdown()
        for connector in (self.executor.connectors.scheduler, *self.executor.connectors.workers):
            if hasattr(connector, "close"):
                connector.close()
