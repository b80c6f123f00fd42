"""A worker's end and an executor with our connector, in one process: what a test drives.

`keep` is the store: block bytes by key, so that what one side saved another can stage.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.engine.connected import messages as m
from backends.engine.connected.channel import ConnectorHost
from mooncake_store.block_keys import chain_seed
from mooncake_store.layout import blocks_touched
from tests.backends.engine.trtllm.listening import WAIT_S, Heard
from tests.backends.engine.trtllm.slots import Slots

CONNECTOR = "backends.engine.trtllm.connector"


class Connected:
    """One engine: its staging pool, its channel, its executor."""

    def __init__(
        self,
        folder: Path,
        shape: Any,
        block_tokens: int = 16,
        pool_pages: int = 24,
        connector_module: str = CONNECTOR,
        block_bytes: int = 0,
        heard: Heard | None = None,
        aside_bytes_min: int = 0,
        **arguments: Any,
    ) -> None:
        from tensorrt_llm._fake.executor import Executor
        from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig, TorchLlmArgs

        self.shape, self.block_tokens = shape, block_tokens
        token_bytes = shape.layers * shape.kv_factor * shape.kv_heads * shape.head_bytes
        self.block_bytes = block_bytes or token_bytes * block_tokens
        folder.mkdir(parents=True, exist_ok=True)
        pool_path = folder / "pool"
        pool_path.write_bytes(bytes(pool_pages * self.block_bytes))
        self.pool = np.memmap(pool_path, dtype=np.uint8, mode="r+") if pool_pages else np.empty(0)
        self.free_pages = list(range(pool_pages))
        self.heard = heard or Heard()
        self._folder, self._regions = folder, 0
        self.nodes: list[Slots] = []  # incarnations of the storage node; the last one lives
        # request -> block -> slot: to be read, and to be filled
        self._in_slots: dict[str, dict[int, tuple[Slots, int]]] = {}
        self.filling: dict[str, dict[int, tuple[Slots, int]]] = {}
        address = f"ipc://{folder}/kv"
        is_alike = shape.kv_factor == 1
        site = m.Site(
            address, str(pool_path), block_tokens, self.block_bytes, aside_bytes_min, is_alike
        )
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

    def start_node(self, slots: int = 24) -> None:
        """The storage node's next incarnation; the one before it dies, if there is one."""
        if self.nodes:
            self.nodes[-1].die()
        self._regions += 1
        path = self._folder / f"segment-{self._regions}"
        node = Slots(self.host, path, self._regions, slots, self.block_bytes)
        self.nodes.append(node)
        self._let_go()

    def _let_go(self) -> None:
        for node in [node for node in self.nodes if not node.is_alive and not node.used]:
            node.detach()
            self.nodes.remove(node)

    def stage(
        self,
        request_id: str,
        prompt: Sequence[int],
        keep: dict[bytes, bytes] | None = None,
        loaded_tokens: int = 0,
        more_tokens: int = 0,
        salt: str = "",
        in_slots: bool = False,
    ) -> list[int]:
        """Stages `prompt` with the blocks that `keep` has for its first tokens; its pool pages.

        `in_slots`: whole ones lie in slots of the storage node instead, and others will be saved
        into some, as far as there are any.
        """
        count = blocks_touched(len(prompt) + more_tokens, self.block_tokens)
        pages = [self.free_pages.pop() for _ in range(count)]
        seed = chain_seed("print", cache_salt=salt)
        stage = m.Stage.of(
            request_id,
            prompt,
            self.block_tokens,
            seed,
            salt,
            [page * self.block_bytes for page in pages],
            loaded_tokens,
        )
        for index, page in enumerate(pages):
            self.page(page)[:] = 0xEE  # what nobody wrote
            if keep is not None and index * self.block_tokens < loaded_tokens:
                key = stage.keys[index] if index < len(stage.keys) else b"tail"
                self.page(page)[:] = np.frombuffer(keep[key], np.uint8)
        if in_slots:
            stage = self._put_in_slots(stage, keep or {})
        self.host.stage(stage, WAIT_S).result(WAIT_S)
        return pages

    def _put_in_slots(self, stage: m.Stage, keep: dict[bytes, bytes]) -> m.Stage:
        places, uses = list(stage.places), []
        of_request = self._in_slots.setdefault(stage.request_id, {})
        node = self.nodes[-1]
        filling = self.filling.setdefault(stage.request_id, {})
        for index in range(len(places)):
            if node.free:
                is_loaded = index < stage.loaded_tokens // self.block_tokens
                block = keep[stage.keys[index]] if is_loaded else b""
                slot, places[index], use = node.fill(index, block)
                (of_request if is_loaded else filling)[index] = node, slot
                uses.append(use)
        return msgspec.structs.replace(stage, places=places, uses=tuple(uses))

    def in_slots(self, request_id: str) -> dict[int, tuple[Slots, int]]:
        return self._in_slots.get(request_id, {})

    def end_leases(self, request_id: str) -> None:
        """Others may have its slots."""
        for node, slot in self._in_slots.pop(request_id, {}).values():
            node.give_back(slot)
        self._let_go()

    def unstage(self, request_id: str, pages: list[int]) -> None:
        self.host.unstage(request_id, WAIT_S).result(WAIT_S)
        self.end_leases(request_id)
        for node, slot in self.filling.pop(request_id, {}).values():
            node.give_back(slot)
        self._let_go()
        self.free_pages += pages

    def keep(
        self, prompt: Sequence[int], pages: Sequence[int], into: dict[bytes, bytes], salt: str = ""
    ) -> None:
        """The pool's pages into the store, the last, partial one as the tail."""
        seed = chain_seed("print", cache_salt=salt)
        keys = m.Stage.of("", prompt, self.block_tokens, seed, salt, [], 0).keys
        for index, page in enumerate(pages):
            into[keys[index] if index < len(keys) else b"tail"] = self.page(page).tobytes()

    def block(self, request_id: str, pages: Sequence[int], block: int) -> Any:
        """What was saved of it; None when it went with its storage node."""
        if block not in (filling := self.filling.get(request_id, {})):
            return self.page(pages[block])
        node, slot = filling[block]
        return node.payload(slot) if node.is_alive else None

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
        for node in self.nodes:
            node.die()
