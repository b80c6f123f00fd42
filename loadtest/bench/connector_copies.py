"""How fast the connector's copies are, and what they cost a matrix product beside them.

On a GPU: 1 GiB of pages of 32 tokens, in no order, between the GPU and page-locked memory, against
one copy of 1 GiB; both while a product of matrices runs on another stream, whose speed is measured
with and without. Without a GPU: the plain copier against memcpy, and targets that say why they
have no value. torch is imported here only when the benchmark runs.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backends.engine.trtllm.block_pages import BlockPages, Move, Run
from backends.engine.trtllm.copier import make_copier, map_pool
from loadtest.bench.result import Cell, Target

# Qwen2-0.5B in bfloat16: 24 layers, 2 KV heads, 32 tokens, 64 numbers.
LAYERS, FLAT, TOKENS_PER_BLOCK, PAGES_PER_BLOCK = 24, 2 * 32 * 64, 32, 8
PAGE_BYTES = LAYERS * 2 * FLAT * 2
ROUNDS = 7
PRODUCT = 8192  # rows and columns of the matrices
PRODUCT_S = 2.0  # how long products are counted


@dataclass
class Measured:
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def add(self, what: str, size_bytes: int, seconds: float, limit: float | None = None) -> float:
        rate = size_bytes / seconds / 1e9
        row: dict[str, Cell] = {"call": what, "gb_per_s": round(rate, 2)}
        if limit is not None:
            row["of_limit"] = round(rate / limit, 3)
        self.rows.append(row)
        return rate


class Copies:
    """Pages on a device, a pool in a file, and the runs between them."""

    def __init__(self, folder: Path, device: str, size_bytes: int) -> None:
        import torch

        blocks = size_bytes // PAGE_BYTES // PAGES_PER_BLOCK
        pages = blocks * PAGES_PER_BLOCK
        self.size_bytes = pages * PAGE_BYTES
        path = folder / "pool"
        with path.open("wb") as file:
            file.truncate(self.size_bytes)
        self.pool = map_pool(str(path), PAGE_BYTES * PAGES_PER_BLOCK)
        self.pool[:] = np.random.default_rng(1).integers(0, 256, self.size_bytes, np.uint8)
        self.kv = torch.zeros((pages, LAYERS, 2, FLAT), dtype=torch.bfloat16, device=device)
        self.copier = make_copier(self.kv, self.pool)
        geometry = BlockPages.of(0, 1, PAGE_BYTES, TOKENS_PER_BLOCK, 256)
        chance = random.Random(2)
        block_ids = chance.sample(range(pages), pages)
        pool_pages = chance.sample(range(blocks), blocks)
        self.runs: list[Run] = geometry.runs([Move("a", 1, 0, block_ids, pool_pages)])

    def load(self, stream: Any) -> None:
        event = self.copier.load(self.runs, stream)
        if event is not None:
            event.synchronize()

    def save(self, stream: Any) -> None:
        self.copier.save(self.runs, self.copier.record(stream))


def measure(size_bytes: int = 2**30) -> Measured:
    try:
        import torch

        has_cuda = torch.cuda.is_available()
    except ImportError:
        has_cuda = False
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-bench-") as folder:
        if has_cuda:
            return _on_gpu(Path(folder), size_bytes)
        return _on_cpu(Path(folder), min(size_bytes, 2**28))


def best_s(action: Callable[[], None]) -> float:
    found = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        action()
        found.append(time.perf_counter() - started_s)
    return min(found)


def _on_cpu(folder: Path, size_bytes: int) -> Measured:
    measured = Measured()
    copies = Copies(folder, "cpu", size_bytes)
    target = np.empty_like(copies.pool)
    limit = measured.add(
        "memcpy (limit)", copies.size_bytes, best_s(lambda: np.copyto(target, copies.pool))
    )
    for name, action in (("load", copies.load), ("save", copies.save)):
        seconds = best_s(partial(action, None))
        measured.add(f"plain copier, {name}", copies.size_bytes, seconds, limit)
    copies.copier.close()
    why = "no CUDA GPU on this machine"
    measured.targets = [
        Target("copier, host to device, of the measured rate", None, ">=", 0.8, why),
        Target("copier, device to host, of the measured rate", None, ">=", 0.8, why),
        Target("matrix product beside copies, of its speed alone", None, ">=", 0.95, why),
    ]
    return measured


def _on_gpu(folder: Path, size_bytes: int) -> Measured:
    import torch

    measured = Measured()
    copies = Copies(folder, "cuda", size_bytes)
    stream = torch.cuda.current_stream()
    flat = copies.kv.view(torch.uint8).reshape(-1)
    locked = torch.empty(copies.size_bytes, dtype=torch.uint8, pin_memory=True)

    def raw(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    limits = {
        "load": measured.add(
            "one copy, host to device (limit)", copies.size_bytes, best_s(lambda: raw(flat, locked))
        ),
        "save": measured.add(
            "one copy, device to host (limit)", copies.size_bytes, best_s(lambda: raw(locked, flat))
        ),
    }
    actions = {"load": partial(copies.load, stream), "save": partial(copies.save, stream)}
    for name, action in actions.items():
        measured.add(f"copier, {name}", copies.size_bytes, best_s(action), limits[name])
    products = Products()
    alone = products.per_s(PRODUCT_S)
    for name, action in actions.items():
        rates, beside = _beside(products, action, copies.size_bytes)
        measured.add(f"copier, {name}, beside products", copies.size_bytes,
                     copies.size_bytes / rates / 1e9, limits[name])  # fmt: skip
        direction = "host to device" if name == "load" else "device to host"
        measured.targets += [
            Target(f"copier, {direction}, of the measured rate", rates / limits[name], ">=", 0.8),
            Target(
                f"matrix product beside {name}s, of its speed alone", beside / alone, ">=", 0.95
            ),
        ]
    copies.copier.close()
    return measured


def _beside(products: Products, action: Callable[[], None], size_bytes: int) -> tuple[float, float]:
    """(GB/s of copies, products per second) while both go on."""
    is_over = threading.Event()
    copied: list[float] = []

    def copy_on() -> None:
        while not is_over.is_set():
            started_s = time.perf_counter()
            action()
            copied.append(time.perf_counter() - started_s)

    thread = threading.Thread(target=copy_on, name="copies")
    thread.start()
    try:
        per_s = products.per_s(PRODUCT_S)
    finally:
        is_over.set()
        thread.join()
    return size_bytes / sorted(copied)[len(copied) // 2] / 1e9, per_s


class Products:
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
