"""A small engine with KV pages of its own, for tests: scheduler and ranks in the caller's thread.

Its pages lie as those of vLLM on a CPU: one allocation, layer after layer, and in each layer page
after page. So a page has one run for each layer. It has no prefix cache of its own.

KV matters: the bytes of a token's KV are a hash of all KV before it, *read from the pages*, and of
the token. The next token is a hash of all KV. So a wrong byte changes the answer.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import BlockPages
from backends.engine.connected.channel import SCHEDULER, ConnectorLink, rank_name
from backends.engine.connected.rank_copies import RankCopies, register
from backends.engine.connected.scheduler import Entry, StageScheduler
from tests.backends.engine.connected.connected import Connected

LAYERS, PAGE_TOKENS, TOKEN_BYTES = 3, 4, 128  # bytes of a token in a layer of all ranks
IDLE_S = 0.001
GAP_PAGES = 1  # unused memory between layers
VOCABULARY_TOKENS = 2048
SHAPE = SimpleNamespace(tokens_per_block=PAGE_TOKENS, kv_factor=2)


def kv_of(state: bytes, token: int) -> bytes:
    return hashlib.shake_256(state + token.to_bytes(4, "little")).digest(LAYERS * TOKEN_BYTES)


def after(state: bytes, kv: bytes) -> bytes:
    return hashlib.blake2b(state + kv, digest_size=16).digest()


def next_token(state: bytes) -> int:
    return int.from_bytes(state[:8], "little") % VOCABULARY_TOKENS


@dataclass(eq=False)
class SmallRequest:
    request_id: int
    prompt: list[int]
    max_tokens: int
    salt: str
    tokens: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)  # since the last pass
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0  # tokens with KV, after the present pass
    matched_tokens: int = 0
    local_tokens: int = 0
    is_loading: bool = False
    is_new: bool = True
    is_aborted: bool = False
    finish_reason: str | None = None

    @property
    def is_allocated(self) -> bool:
        return bool(self.block_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


class SmallScheduler(StageScheduler):
    def _position(self, entry: Entry, data: SmallRequest, is_new: bool) -> int:
        return data.computed


class SmallExecutor:
    def __init__(self, site: m.Site, tp_size: int, pages: int, tokens_max: int, batch_max: int):
        self._tokens_max, self._batch_max = tokens_max, batch_max
        self._free = list(range(pages))
        self.blocks = SimpleNamespace(blocks=pages, free_blocks=pages)
        self._waiting: list[SmallRequest] = []
        self._active: list[SmallRequest] = []
        self.saving: dict[int, SmallRequest] = {}  # finished, and pages still to be freed
        self._idle = threading.Event()  # never set
        self._ended: list[int] = []  # not yet passed to the ranks
        self._started: list[int] = []
        self._done: tuple[Counter[int], Counter[int]] = Counter(), Counter()  # saved, loaded
        self.ranks: list[np.ndarray] = []  # [layers, pages, bytes of a page's layer]
        self.copies: list[RankCopies] = []
        self._links: list[ConnectorLink] = []
        layer_bytes = PAGE_TOKENS * TOKEN_BYTES // tp_size
        for rank in range(tp_size):
            self._open_rank(site, rank, tp_size, pages, layer_bytes)
        rank_page = LAYERS * layer_bytes
        aside_pages = -(-site.aside_bytes_min // rank_page)
        self.scheduler = SmallScheduler(
            site.block_tokens, PAGE_TOKENS, lambda said: self._links[-1].send(said), aside_pages
        )
        self._link(site, SCHEDULER, self.scheduler)

    def _open_rank(self, site: m.Site, rank: int, tp_size: int, pages: int, layer_bytes: int):
        import torch

        kv = np.zeros((LAYERS, pages + GAP_PAGES, layer_bytes), np.uint8)
        geometry = BlockPages(
            rank,
            tp_size,
            LAYERS * layer_bytes,
            PAGE_TOKENS,
            site.block_tokens,
            layers=LAYERS,
            layer_stride_bytes=kv.strides[0],
            block_stride_bytes=kv.strides[1],
        )
        handler = SimpleNamespace(on_message=lambda message: None)
        link = self._link(site, rank_name(rank), handler)
        try:
            copies, ready = register(site, geometry, torch.from_numpy(kv), pages, link.send)
        except Exception as error:
            link.send(m.Broken(f"rank {rank}: {error}"))
            self.shutdown()
            raise
        handler.on_message = copies.on_message
        self.ranks.append(kv)
        self.copies.append(copies)
        link.send(ready)

    def _link(self, site: m.Site, name: str, handler: Any) -> ConnectorLink:
        def on_message(message: m.ToConnector) -> None:
            if not isinstance(message, m.Goodbye):
                handler.on_message(message)

        self._links.append(ConnectorLink(site.channel, name, on_message))
        return self._links[-1]

    def submit(self, request: SmallRequest) -> None:
        self._waiting.append(request)

    def abort(self, request: SmallRequest) -> None:
        request.is_aborted = True

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active or self.saving)

    def run_until_idle(self) -> None:
        for _ in range(10_000):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("still busy")

    def step(self) -> None:
        for request in [each for each in self._waiting if each.is_aborted]:
            self._waiting.remove(request)
            request.finish_reason = "cancelled"
        self._admit()
        batch, left = [], self._tokens_max
        for request in self._active:
            count = min(left, len(request.tokens) - request.computed)
            if not request.is_loading and count:
                batch.append((request, request.computed))
                request.computed += count
                left -= count
        if not batch:
            self._idle.wait(IDLE_S)  # for the copies
        new = [request for request, _ in batch if request.is_new]
        orders = self.scheduler.orders(new, [each for each, _ in batch if each not in new])
        for copies in self.copies:
            copies.start(orders, None)
        for request, start in batch:
            request.is_new, request.new_block_ids = False, []
            self._compute(request, start)
        for copies in self.copies:
            copies.after_forward(None)
        for request in list(self._active):
            if request.is_aborted:
                self._finish(request, "cancelled")
            elif request.generated >= request.max_tokens:
                self._finish(request, "length")
        self._poll()

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._batch_max:
            request = self._waiting[0]
            pages = -(-(len(request.prompt) + request.max_tokens) // PAGE_TOKENS)
            if pages > len(self._free):
                return
            self._active.append(self._waiting.pop(0))
            request.matched_tokens = request.computed = self.scheduler.promise(
                request.request_id, request.prompt, request.salt, 0
            )
            request.block_ids = [self._free.pop(0) for _ in range(pages)]
            self.blocks.free_blocks = len(self._free)
            request.new_block_ids = list(request.block_ids)
            self.scheduler.allocated(request, request.block_ids)
            if self.scheduler.is_aside(request.request_id):
                request.is_loading = True
                self._started.append(request.request_id)

    def _compute(self, request: SmallRequest, start: int) -> None:
        state = b""
        for token in range(start):
            state = after(state, b"".join(each.tobytes() for each in self._at(request, token)))
        for number in range(start, request.computed):
            kv = np.frombuffer(kv_of(state, request.tokens[number]), np.uint8)
            parts = kv.reshape(len(self.ranks), LAYERS, -1)
            for rank, part in zip(self._at(request, number), parts, strict=True):
                rank[:] = part
            state = after(state, kv.tobytes())
        if request.computed == len(request.tokens):
            request.tokens.append(next_token(state))

    def _at(self, request: SmallRequest, token: int) -> list[np.ndarray]:
        """Views of each rank's KV of this token, [layers, bytes]."""
        page, within = request.block_ids[token // PAGE_TOKENS], token % PAGE_TOKENS
        size = TOKEN_BYTES // len(self.ranks)
        return [kv[:, page, within * size : (within + 1) * size] for kv in self.ranks]

    def _finish(self, request: SmallRequest, reason: str) -> None:
        request.finish_reason = reason
        self._active.remove(request)
        if self.scheduler.finished(request):
            self._ended.append(request.request_id)
            self.saving[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: SmallRequest) -> None:
        self._free += request.block_ids
        self.blocks.free_blocks = len(self._free)

    def _poll(self) -> None:
        ended, self._ended = self._ended, []
        started, self._started = self._started, []
        saved, loaded = self._done
        for copies in self.copies:
            saved.update(copies.finished(ended))
            loaded.update(copies.loaded(started))
        for request_id in [each for each, n in saved.items() if n == len(self.copies)]:
            del saved[request_id]
            self._release(self.saving.pop(request_id))
        for request in self._active:
            if loaded[request.request_id] == len(self.copies):
                request.is_loading = False

    def shutdown(self) -> None:
        for link in self._links:
            link.close()
        for copies in self.copies:
            copies.close()


class SmallEngine(Connected):
    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, SHAPE, LAYERS * TOKEN_BYTES, **options)

    def _start(self, site: m.Site, options: dict[str, Any]) -> None:
        """Ignores options of TensorRT-LLM for what this engine lacks: prefix cache, overlap."""
        self.executor = SmallExecutor(
            site,
            options.get("tensor_parallel_size", 1),
            options.get("cache", {}).get("max_tokens", 512) // PAGE_TOKENS,
            options.get("max_num_tokens", 8192),
            options.get("max_batch_size", 16),
        )
        self.scheduler, self.copies = self.executor.scheduler, self.executor.copies

    def submit(
        self, number: int, prompt: Sequence[int], tokens_max: int, salt: str | None = None
    ) -> SmallRequest:
        request = SmallRequest(number, list(prompt), tokens_max, salt or "", list(prompt))
        self.executor.submit(request)
        return request

    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        state, output = b"", []
        for token in prompt:
            state = after(state, kv_of(state, token))
        for _ in range(tokens):
            output.append(next_token(state))
            state = after(state, kv_of(state, output[-1]))
        return output

    @property
    def saving(self) -> set[int]:
        return set(self.executor.saving)
