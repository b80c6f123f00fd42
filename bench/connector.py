"""The cost of our connector inside a step of TensorRT-LLM, and the speed of its copies.

    python -m bench.connector

TensorRT-LLM calls `get_num_new_matched_tokens` while it holds the lock of its own prefix tree. It
calls `build_connector_meta` in every step, after describing the step (the part of the description
that we replace: backends/engine/trtllm/connector.py). Each call gets a fresh list of tokens, as in
the real engine. The rows compare them with reading the list once and with hashing the block keys.

Copies on a GPU move 1 GiB of pages of 32 tokens, in random order, between the GPU and a segment
with locked pages. They are measured in one call and one by one. Both are measured alone and beside
a matrix product on another stream. Without a GPU they are a memcpy, and the targets have a reason
instead of a value.

Not here: the correctness of copies (tests), a whole engine, which needs a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import BlockPages, Move, PageRun, place_of
from backends.engine.connected.channel import SCHEDULER, ConnectorHost, ConnectorLink
from backends.engine.connected.copier import make_copier
from backends.engine.connected.host_memory import map_pool
from backends.engine.trtllm import connector
from backends.engine.trtllm.scheduler import TrtllmScheduler
from loadtest.harness.benchmark import benchmark, best_s, timed_s
from loadtest.harness.result import Cell, Target
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.memory.segment import Segment

BLOCK_TOKENS, TOKENS_PER_BLOCK = 256, 32
VOCABULARY_TOKENS = 128_256
REQUESTS = 64
SEED = chain_seed("bench")
# Qwen2-0.5B in bfloat16: 24 layers, 2 KV heads, 32 tokens, 64 numbers.
LAYERS, FLAT, PAGES_PER_BLOCK = 24, 2 * 32 * 64, 8
PAGE_BYTES = LAYERS * 2 * FLAT * 2
COPY_ROUNDS, COPIED_BYTES = 7, 2**30
PRODUCT = 8192  # rows and columns of the matrices
PRODUCT_S = 2.0  # seconds in which products are counted


@dataclass
class PromptRequest:
    """A request as the scheduler sees it; the test makes its list of tokens before the measured
    call."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


@dataclass(slots=True)
class ComputedRequest:
    """TensorRT-LLM's description of one request in one step."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class ConnectorCalls:
    def __init__(self, repeats: int, seed: int) -> None:
        self._repeats = repeats
        self._rng = np.random.default_rng(seed)
        self.rows: list[dict[str, Cell]] = []

    def prompt(self, tokens: int) -> np.ndarray:
        return self._rng.integers(0, VOCABULARY_TOKENS, tokens)

    def timed(self, name: str, one_call: Callable[[int], Callable[[], object]]) -> float:
        """Microseconds of the median call; `one_call(i)` prepares the i-th, untimed."""
        found_us = []
        gc.collect()
        gc.disable()
        try:
            for number in range(self._repeats):
                call = one_call(number)
                started_ns = time.perf_counter_ns()
                call()
                found_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        finally:
            gc.enable()
        found_us.sort()
        median_us = statistics.median(found_us)
        self.rows.append(
            {
                "call": name,
                "median_us": round(median_us, 1),
                "p90_us": round(found_us[int(0.9 * len(found_us))], 1),
                "best_us": round(found_us[0], 1),
            }
        )
        return median_us

    def match(self, tokens: int, shared_tokens: int) -> float:
        """A prompt of which all but the last page is staged, among others of the same length."""
        common = self.prompt(shared_tokens)
        prompts = [
            np.concatenate([common, self.prompt(tokens - shared_tokens)]) for _ in range(REQUESTS)
        ]
        pages = list(range(-(-tokens // BLOCK_TOKENS)))
        loaded = (tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        stages = [
            m.Stage.of(str(number), prompt, BLOCK_TOKENS, SEED, "", pages, loaded)
            for number, prompt in enumerate(prompts)
        ]

        def prepare(number: int) -> Callable[[], object]:
            scheduler = TrtllmScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
            for stage in stages:
                problem = scheduler.add_checked(stage)
                assert not problem, problem
            chosen = number % REQUESTS
            request = PromptRequest(number, prompts[chosen].tolist())

            def call() -> None:
                assert scheduler.match(request, 0) == loaded

            return call

        size = f"{tokens // 1024}k"
        shared = ", one prefix" if shared_tokens else ""
        return self.timed(f"match {size} of {REQUESTS} staged{shared}", prepare)

    def unmatched(self, tokens: int) -> None:
        scheduler = TrtllmScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
        prompt = self.prompt(tokens)
        self.timed(
            f"match {tokens // 1024}k, nothing staged",
            lambda number: partial(scheduler.match, PromptRequest(number, prompt.tolist()), 0),
        )

    def stage(self, tokens: int) -> None:
        """From a worker's Stage to the acknowledgement, through the channel, in one process."""
        prompt, pages = self.prompt(tokens), list(range(-(-tokens // BLOCK_TOKENS)))
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
            address = f"ipc://{folder}/kv"
            host = ConnectorHost(address, DeafListener())
            scheduler = TrtllmScheduler(
                BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: link.send(message)
            )
            link = ConnectorLink(address, SCHEDULER, scheduler.on_message)

            def prepare(number: int) -> Callable[[], object]:
                stage = m.Stage.of(str(number), prompt, BLOCK_TOKENS, SEED, "", pages, 0)
                return lambda: host.stage(stage, 60.0).result()

            self.timed(f"stage {tokens // 1024}k and hear of it", prepare)
            host.close()
            link.close()

    def limits(self, tokens: int) -> None:
        prompt, size = self.prompt(tokens), f"{tokens // 1024}k"
        self.timed(
            f"read a list of {size} once (limit)",
            lambda number: partial(read_once, prompt.tolist()),
        )
        self.timed(
            f"hash the keys of {size} (instead)",
            lambda number: partial(block_keys, prompt.tolist(), BLOCK_TOKENS, SEED),
        )

    def described(self, tokens: int, is_lean: bool) -> float:
        """TensorRT-LLM's description of 64 decoding requests for a connector, in each step."""
        requests = [DecodingRequest(number, self.prompt(tokens)) for number in range(REQUESTS)]
        made = connector.lean_request(LIKE_UPSTREAM) if is_lean else WholeLists
        described = [made() for _ in requests]

        def prepare(number: int) -> Callable[[], object]:
            for each, request in zip(described, requests, strict=True):
                each.update_and_build_data(request, request)  # the first call is for the prompt
                request.length += 1

            def call() -> None:
                for each, request in zip(described, requests, strict=True):
                    each.update_and_build_data(request, request)

            return call

        whose = "as ours" if is_lean else "as TensorRT-LLM's"
        return self.timed(f"describe {REQUESTS} decoding, {tokens // 1024}k, {whose}", prepare)

    def orders(self, is_new: bool, tokens: int = 4096) -> float:
        """A step of 64 requests: all new (half of their tokens loaded), or all decoding."""
        prompts = [self.prompt(tokens) for _ in range(REQUESTS)]
        pages = list(range(tokens // BLOCK_TOKENS + 1))
        stages = [
            m.Stage.of(str(number), prompt, BLOCK_TOKENS, SEED, "", pages, tokens // 2)
            for number, prompt in enumerate(prompts)
        ]
        blocks = list(range(tokens // TOKENS_PER_BLOCK))

        def prepare(number: int) -> Callable[[], object]:
            scheduler = TrtllmScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
            for llm_id, (stage, prompt) in enumerate(zip(stages, prompts, strict=True)):
                assert not scheduler.add_checked(stage)
                request = PromptRequest(llm_id, prompt.tolist())
                assert scheduler.match(request, 0) == tokens // 2
                scheduler.allocated(request, blocks)
            new = [
                ComputedRequest(llm_id, [], list(blocks), 0, tokens // 2)
                for llm_id in range(REQUESTS)
            ]
            if is_new:
                return lambda: scheduler.orders(new, [])
            scheduler.orders(new, [])
            # Two of 64 requests fill a page in a step, because a page has 32 tokens.
            steps = [
                ComputedRequest(llm_id, [1], [9000], tokens + 31 - (llm_id % 32), 1)
                for llm_id in range(REQUESTS)
            ]
            return lambda: scheduler.orders([], steps)

        size = f"{tokens // 1024}k"
        kind = f"new, half of {size} loaded" if is_new else f"decoding, {size}"
        return self.timed(f"orders of {REQUESTS} requests, {kind}", prepare)


class DecodingRequest:
    """A request and its pages as TensorRT-LLM passes them to Python: a new list for each call."""

    def __init__(self, number: int, prompt: np.ndarray) -> None:
        self.request_id, self.length, self.state = number, len(prompt), "generating"
        self._tokens = array("i", [*prompt.tolist(), *range(4096)])
        self._pages = array("i", range(len(self._tokens) // TOKENS_PER_BLOCK + 1))
        self.tokens_per_block = TOKENS_PER_BLOCK

    def get_num_tokens(self, beam: int) -> int:
        return self.length

    def get_tokens(self, beam: int) -> list[int]:
        return self._tokens[: self.length].tolist()

    def get_cache_indices(self, request: DecodingRequest) -> list[int]:
        return self._pages[: self.length // TOKENS_PER_BLOCK + 1].tolist()


class WholeLists:
    """TensorRT-LLM's own way: all tokens and pages, compared by length with a copy of its own."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._pages: list[int] = []

    def update_and_build_data(
        self, request: DecodingRequest, pages: DecodingRequest
    ) -> ComputedRequest:
        all_pages, all_tokens = pages.get_cache_indices(request), request.get_tokens(0)
        new_pages, new_tokens = all_pages[len(self._pages) :], all_tokens[len(self._tokens) :]
        self._pages += new_pages
        self._tokens += new_tokens
        return ComputedRequest(request.request_id, new_tokens, new_pages, len(all_tokens) - 1, 1)


LIKE_UPSTREAM = SimpleNamespace(
    KvCacheConnectorSchedulerOutputRequest=WholeLists,
    RequestData=ComputedRequest,
    LlmRequestState=SimpleNamespace(CONTEXT_INIT=1, DISAGG_GENERATION_TRANS_IN_PROGRESS=2),
)


class DeafListener:
    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...
    def loaded(self, request_id: str) -> None: ...
    def saved(self, request_id: str, tokens: int) -> None: ...
    def broken(self, reason: str) -> None: ...


def read_once(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()


@dataclass
class CopyRates:
    """GB/s of copies of `size_bytes`."""

    size_bytes: int
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def best(self, what: str, copy: Callable[[], object], limit: float | None = None) -> float:
        """The best of several rounds; `limit` is the rate to compare with."""
        return self.add(what, best_s(copy, COPY_ROUNDS), limit)

    def add(self, what: str, seconds: float, limit: float | None) -> float:
        rate = self.size_bytes / seconds / 1e9
        row: dict[str, Cell] = {"call": what, "gb_per_s": round(rate, 2)}
        if limit is not None:
            row["of_limit"] = round(rate / limit, 3)
        self.rows.append(row)
        return rate


class PageCopies:
    """Pages on a device, a segment of a storage node, and the runs between them."""

    def __init__(self, folder: Path, device: str, size_bytes: int) -> None:
        import torch

        blocks = size_bytes // PAGE_BYTES // PAGES_PER_BLOCK
        pages = blocks * PAGES_PER_BLOCK
        self.size_bytes = pages * PAGE_BYTES
        path = folder / "pool"
        with path.open("wb") as file:
            file.truncate(PAGE_BYTES * PAGES_PER_BLOCK)
        self.segment = Segment.create(str(folder / "segment"), self.size_bytes)
        self.pool = self.segment.view
        self.pool[:] = np.random.default_rng(1).integers(0, 256, self.size_bytes, np.uint8)
        self.kv = torch.zeros((pages, LAYERS, 2, FLAT), dtype=torch.bfloat16, device=device)
        small = map_pool(str(path), PAGE_BYTES * PAGES_PER_BLOCK)
        self.copier = make_copier(self.kv, small)
        self.lock_s = timed_s(lambda: self.copier.add(1, self.segment.view))
        geometry = BlockPages(0, 1, PAGE_BYTES, TOKENS_PER_BLOCK, 256)
        rng = random.Random(2)
        block_ids = rng.sample(range(pages), pages)
        places = [
            place_of(1, block * PAGE_BYTES * PAGES_PER_BLOCK)
            for block in rng.sample(range(blocks), blocks)
        ]
        self.runs: list[PageRun] = geometry.runs([Move("a", 1, 0, block_ids, places)])

    def load(self, stream: Any) -> None:
        event = self.copier.load(self.runs, stream)
        if event is not None:
            event.synchronize()

    def save(self, stream: Any) -> None:
        self.copier.save(self.runs, self.copier.record(stream))

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[bool]:
        """Copies without batches. False: the driver has none."""
        driver = self.copier._driver
        batch, driver._batch = driver._batch, None
        try:
            yield batch is not None
        finally:
            driver._batch = batch

    def close(self) -> None:
        self.copier.close()
        self.segment.close()


def measure_copies(size_bytes: int = COPIED_BYTES) -> CopyRates:
    try:
        import torch

        has_cuda = torch.cuda.is_available()
    except ImportError:
        has_cuda = False
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-bench-") as folder:
        if has_cuda:
            return _on_gpu(Path(folder), size_bytes)
        return _on_cpu(Path(folder), min(size_bytes, 2**28))


def _on_cpu(folder: Path, size_bytes: int) -> CopyRates:
    copies = PageCopies(folder, "cpu", size_bytes)
    rates = CopyRates(copies.size_bytes)
    target = np.empty_like(copies.pool)
    limit = rates.best("memcpy (limit)", lambda: np.copyto(target, copies.pool))
    for name, copy in (("load", copies.load), ("save", copies.save)):
        rates.best(f"plain copier, {name}", partial(copy, None), limit)
    copies.close()
    why = "no CUDA GPU on this machine"
    rates.targets = [
        Target("copier, host to device, of the measured rate", None, ">=", 0.8, why),
        Target("copier, device to host, of the measured rate", None, ">=", 0.8, why),
        Target("matrix product beside copies, of its speed alone", None, ">=", 0.95, why),
    ]
    return rates


def _on_gpu(folder: Path, size_bytes: int) -> CopyRates:
    import torch

    copies = PageCopies(folder, "cuda", size_bytes)
    rates = CopyRates(copies.size_bytes)
    stream = torch.cuda.current_stream()
    flat = copies.kv.view(torch.uint8).reshape(-1)
    locked = torch.empty(copies.size_bytes, dtype=torch.uint8, pin_memory=True)

    def raw(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    loading, saving = "one copy, host to device (limit)", "one copy, device to host (limit)"
    limits = {
        "load": rates.best(loading, partial(raw, flat, locked)),
        "save": rates.best(saving, partial(raw, locked, flat)),
    }
    actions = {"load": partial(copies.load, stream), "save": partial(copies.save, stream)}
    rates.add("lock the segment's pages", copies.lock_s, None)
    for name, action in actions.items():
        rates.best(f"copier, {name}", action, limits[name])
    with copies.one_by_one() as has_batches:
        for name, action in actions.items() if has_batches else ():
            rates.best(f"copier, {name}, one by one", action, limits[name])
    products = MatrixProducts()
    alone = products.per_s(PRODUCT_S)
    for name, action in actions.items():
        copy_s, per_s = _beside(products, action)
        rate = rates.add(f"copier, {name}, beside products", copy_s, limits[name])
        direction = "host to device" if name == "load" else "device to host"
        product = f"matrix product beside {name}s, of its speed alone"
        rates.targets += [
            Target(f"copier, {direction}, of the measured rate", rate / limits[name], ">=", 0.8),
            Target(product, per_s / alone, ">=", 0.95),
        ]
    copies.close()
    return rates


def _beside(products: MatrixProducts, action: Callable[[], None]) -> tuple[float, float]:
    """(seconds of the median copy, products per second) while both run."""
    is_over = threading.Event()
    copied: list[float] = []

    def copy_on() -> None:
        while not is_over.is_set():
            copied.append(timed_s(action))

    thread = threading.Thread(target=copy_on, name="copies")
    thread.start()
    try:
        per_s = products.per_s(PRODUCT_S)
    finally:
        is_over.set()
        thread.join()
    return sorted(copied)[len(copied) // 2], per_s


class MatrixProducts:
    """Products of two matrices on a stream of their own."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        shape = (PRODUCT, PRODUCT)
        self._left = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._right = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        self.per_s(0.5)  # warm

    def per_s(self, seconds: float) -> float:
        count, started_s = 0, time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            while time.perf_counter() - started_s < seconds:
                for _ in range(20):
                    self._torch.matmul(self._left, self._right, out=self._out)
                self._stream.synchronize()
                count += 20
        return count / (time.perf_counter() - started_s)


def call_targets(calls: ConnectorCalls) -> list[Target]:
    short_us = max(calls.match(4096, 0), calls.match(4096, 3840))
    long_us = max(calls.match(131_072, 0), calls.match(131_072, 130_048))
    for tokens in (4096, 131_072):
        calls.unmatched(tokens)
        calls.stage(tokens)
        calls.limits(tokens)
    decoding_us, new_us = calls.orders(is_new=False), calls.orders(is_new=True)
    long_decoding_us = calls.orders(is_new=False, tokens=32_768)
    whole_us = calls.described(32_768, is_lean=False)
    lean_us = calls.described(32_768, is_lean=True)
    return [
        Target("get_num_new_matched_tokens, 4k, us", short_us, "<=", 100.0),
        Target("get_num_new_matched_tokens, 128k, us", long_us, "<=", 2500.0),
        Target("build_connector_meta, 64 requests, us", decoding_us, "<=", 200.0),
        Target("build_connector_meta, 64 new requests, us", new_us, "<=", 200.0),
        Target("build_connector_meta, 64 requests of 32k, us", long_decoding_us, "<=", 200.0),
        Target("description of 64 requests of 32k, us", lean_us, "<=", 200.0),
        Target("description of 64 x 32k, of TensorRT-LLM's", lean_us / whole_us, "<=", 0.05),
    ]


def main(
    repeats: Annotated[int, typer.Option(min=3)] = 101,
    seed: Annotated[int, typer.Option()] = 1,
    copies: Annotated[
        bool, typer.Option(help="Measure copies too, on a GPU if there is one.")
    ] = True,
) -> None:
    """Measure the connector's part in a step; the last line is JSON."""
    with benchmark("connector") as run:
        calls = ConnectorCalls(repeats, seed)
        run.rows, run.targets = calls.rows, call_targets(calls)
        if copies:
            rates = measure_copies()
            run.rows += rates.rows
            run.targets += rates.targets


if __name__ == "__main__":
    typer.run(main)
