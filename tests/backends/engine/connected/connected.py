"""A worker's end and an engine with our connector, in one process: what a test drives.

Tests that take `make` (conftest.py) run with each engine: the small one (small_engine.py), and the
stand-in for TensorRT-LLM (../trtllm/stand_in.py). `keep` is the store: bytes of blocks by key, so
that one engine can stage what another has saved.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.engine.connected import messages as m
from backends.engine.connected.channel import ConnectorHost
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.layout import blocks_touched
from tests.backends.engine.connected.listening import WAIT_S, Heard
from tests.backends.engine.connected.slots import Slots

Make = Callable[..., "Connected"]


class Connected(ABC):
    """One engine: its staging pool, its channel, its executor."""

    executor: Any  # with submit, step, run_until_idle, abort, has_work, ranks and blocks
    scheduler: Any  # a StageScheduler
    copies: list[Any]  # RankCopies of each rank

    def __init__(
        self,
        folder: Path,
        shape: Any,
        token_bytes: int,
        block_tokens: int = 16,
        pool_pages: int = 24,
        block_bytes: int = 0,
        heard: Heard | None = None,
        aside_bytes_min: int = 0,
        **options: Any,
    ) -> None:
        """`token_bytes`: KV of a token. `options` are the engine's."""
        self.shape, self.block_tokens = shape, block_tokens
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
        site = m.Site(
            f"ipc://{folder}/kv",
            str(pool_path),
            block_tokens,
            self.block_bytes,
            aside_bytes_min,
            is_alike=shape.kv_factor == 1,
        )
        self.host = ConnectorHost(site.channel, self.heard)
        try:
            self._start(site, options)
        except BaseException:
            self.host.close()  # after what was said until now
            raise
        self.host.wait_ready(WAIT_S)

    @abstractmethod
    def _start(self, site: m.Site, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def submit(
        self, number: int, prompt: Sequence[int], tokens_max: int, salt: str | None = None
    ) -> Any: ...

    @abstractmethod
    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The answer of the engine's model, computed without pages."""

    @property
    @abstractmethod
    def saving(self) -> set[int]:
        """Finished requests whose pages stay until they are saved."""

    def shake(self, chance: random.Random) -> None:
        """Before a step: what an engine may do to its requests by itself."""
        return None

    @property
    def all_free(self) -> bool:
        return bool(self.executor.blocks.free_blocks == self.executor.blocks.blocks)

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
        for node in self.nodes:
            node.die()


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2048) for _ in range(tokens)]


def expected(engine: Connected, prompt: list[int], tokens: int) -> list[int]:
    return engine.expected(prompt, tokens)


def keys_of(engine: Connected, prompt: list[int], salt: str = "") -> list[bytes]:
    return block_keys(prompt, engine.block_tokens, chain_seed("print", cache_salt=salt))


def filled(engine: Connected, prompt: list[int]) -> dict[bytes, bytes]:
    """The store after the engine has computed this prompt."""
    store: dict[bytes, bytes] = {}
    pages = engine.stage("fill", prompt)
    engine.generate(1000, prompt, 1)
    tokens = len(prompt) // engine.shape.tokens_per_block * engine.shape.tokens_per_block
    engine.heard.wait_for("saved", "fill", tokens)
    engine.keep(prompt, pages, store)
    engine.unstage("fill", pages)
    return store


def step_until(engine: Connected, is_true: Any) -> None:
    for _ in range(1000):
        if is_true():
            return
        engine.executor.step()
    raise AssertionError("it never happened")
