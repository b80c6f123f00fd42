"""Layer-wise loading of a half-cached prompt, and of a queue that is short of pages.

    python -m bench.layerwise

It makes a random Llama of 12 layers and starts a directory, two storage nodes and prefill workers,
each a process with one engine thread. One worker of node s1 computes the first halves of the
prompts. Those of node s0 fetch these halves over NIXL, throttled until loading takes as long as
computing (SlowLink). Each exists with `layerwise` on and off. In every round, in turns, with fresh
prompts:

    one      a prompt of 8k: TTFT, over max(load, compute) of the prompt before it, which loads and
             then computes, and of its own; the taken pages times the seconds that they stay taken
    queue    prompts at once that need four times `kv_pages`, the largest just fitting: tokens per
             second there, and at a worker that has pages for all of them

Not here: Triton and the frontend (bench/overhead), many chunks on several stages (pipeline.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from bench.harness.prefill_process import BLOCK_TOKENS, PrefillSite
from bench.harness.random_checkpoint import LlamaShape
from loadtest.harness.benchmark import BlocksSeed, benchmark, console
from loadtest.harness.result import Cell, Target

CHUNK_TOKENS = 512
LONG_BLOCKS = 32  # the largest prompt, and all pages of a worker that is short of them
QUEUE_BLOCKS = (8, 16, 32, 16, 8, 16, 8, 16, 8)  # four times as many in all
SPARE_TOKENS = 2  # of the context, for the output
TTFT_GOAL, PAGE_SECONDS_GOAL, QUEUE_GOAL = 1.15, 0.60, 0.95
TRANSFER_S_MAX = 25.0
PAIRS = 3  # single prompts with and without layers, in each round


class SlowLink:
    """A link shared by all reads of a process from other nodes: bytes follow each other at
    `rate`.
    """

    def __init__(self, rate: Any) -> None:
        self._rate = rate  # bytes per second, in memory that processes share; 0: not throttled
        self._lock = threading.Lock()
        self._free_s = 0.0  # end of the earlier transfers

    def passed(self, moved_bytes: int, started_s: float) -> None:
        """Wait until bytes that were requested at `started_s` would have passed."""
        if (rate := self._rate.value) <= 0:
            return
        with self._lock:
            self._free_s = max(self._free_s, started_s) + moved_bytes / rate
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def throttle(rate: Any) -> None:
    """In a worker's process: NIXL's reads pass through a link and are otherwise unchanged."""
    from mooncake_store.transports import known_nodes

    link = SlowLink(rate)

    class Throttled(known_nodes.NixlTransport):
        def read(self, node: Any, remote: Any, local: Any, deadline_s: float) -> None:
            started_s = time.monotonic()
            super().read(node, remote, local, deadline_s)
            link.passed(sum(span.length_bytes for span in remote), started_s)

    known_nodes.NixlTransport = Throttled  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class PrefillWay:
    is_layerwise: bool
    has_all_pages: bool

    @property
    def name(self) -> str:
        return f"{'on' if self.is_layerwise else 'off'}_{'all' if self.has_all_pages else 'short'}"

    def parameters(self) -> dict[str, str]:
        pages = sum(QUEUE_BLOCKS) if self.has_all_pages else LONG_BLOCKS
        return {"layerwise": str(self.is_layerwise).lower(), "kv_pages": str(pages)}


WAYS = [PrefillWay(*each) for each in itertools.product((False, True), (False, True))]


class LayerwiseSite(PrefillSite):
    def __init__(self, stack: contextlib.ExitStack, model: LlamaShape, seed: int) -> None:
        self.token_bytes = model.token_bytes
        segment_bytes = 3 * sum(QUEUE_BLOCKS) * BLOCK_TOKENS * model.token_bytes + 2**26
        parameters = {
            "chunk_tokens": str(CHUNK_TOKENS),
            "kv_pages": str(LONG_BLOCKS),
            "transfer_s_max": str(TRANSFER_S_MAX),
        }
        nodes = dict.fromkeys(("s0", "s1"), segment_bytes)
        super().__init__(stack, model, seed, nodes, parameters)
        self._rate = multiprocessing.get_context("spawn").Value("d", 0.0)
        slow = functools.partial(throttle, self._rate)
        self._far = self.start("far", slow, store_node="s1")
        self.of_way = {way.name: self.start(way.name, slow, **way.parameters()) for way in WAYS}
        for worker in [self._far, *self.of_way.values()]:
            worker.wait_ready()

    def throttle(self, bytes_per_s: float) -> None:
        self._rate.value = bytes_per_s

    def half_cached(self, blocks: int) -> np.ndarray:
        """A fresh prompt that fits `blocks` blocks; node s1 has the KV of its first half."""
        prompt = self.fresh(blocks * BLOCK_TOKENS - SPARE_TOKENS)
        half = prompt[: blocks // 2 * BLOCK_TOKENS]
        self._far.ask(self.tokens.request(half), half)
        self._far.wait_reply()
        return prompt

    def one(self, way: PrefillWay, blocks: int) -> dict[str, Cell]:
        worker, prompt = self.of_way[way.name], self.half_cached(blocks)
        before = worker.page_seconds()
        request = self.tokens.request(prompt, blocks // 2, ["s1"])
        started_s = time.perf_counter()
        worker.ask(request, prompt)
        reply = worker.wait_reply()
        assert reply.cached_tokens == blocks // 2 * BLOCK_TOKENS, reply.cached_tokens
        ttft_s = self.tokens.wait_s(request.request_id) - started_s
        return {
            "way": way.name,
            "prompt_tokens": len(prompt),
            "ttft_s": round(ttft_s, 4),
            "load_s": round(reply.load_s, 4),
            "compute_s": round(reply.compute_s, 4),
            "over_own_max": round(ttft_s / max(reply.load_s, reply.compute_s), 4),
            "page_seconds": round(worker.page_seconds() - before, 3),
        }

    def queue(self, way: PrefillWay) -> dict[str, Cell]:
        """All prompts at once, until the last first token."""
        worker = self.of_way[way.name]
        prompts = [self.half_cached(blocks) for blocks in QUEUE_BLOCKS]
        before = worker.page_seconds()
        requests = [
            self.tokens.request(prompt, blocks // 2, ["s1"])
            for prompt, blocks in zip(prompts, QUEUE_BLOCKS, strict=True)
        ]
        started_s = time.perf_counter()
        for request, prompt in zip(requests, prompts, strict=True):
            worker.ask(request, prompt)
        for _ in prompts:
            worker.wait_reply()
        last_s = max(self.tokens.wait_s(request.request_id) for request in requests)
        tokens = sum(len(prompt) for prompt in prompts)
        return {
            "way": f"queue_{way.name}",
            "prompt_tokens": tokens,
            "tokens_per_s": round(tokens / (last_s - started_s), 1),
            "page_seconds": round(worker.page_seconds() - before, 3),
        }


def measure(site: LayerwiseSite, rounds: int) -> list[dict[str, Cell]]:
    """Rounds in turns; the link is set anew in each, because the machine's speed changes."""
    rows: list[dict[str, Cell]] = []
    off, on = PrefillWay(False, False), PrefillWay(True, False)
    load_bytes = LONG_BLOCKS // 2 * BLOCK_TOKENS * site.token_bytes
    for number in range(rounds + 1):  # the first warms up
        with console.status(f"round {number} of {rounds} ..."):
            site.throttle(0.0)
            computed = site.one(off, LONG_BLOCKS)
            site.throttle(load_bytes / float(computed["compute_s"] or 1))
            pairs = PAIRS if number else 1
            found = [site.one(way, LONG_BLOCKS) for _ in range(pairs) for way in (off, on)]
            if number:
                found += [site.queue(way) for way in WAYS]
                rows += [{"round": number, **row} for row in found]
    return rows


def of_rounds(rows: Sequence[dict[str, Cell]], way: str, name: str) -> list[float]:
    return [float(row[name] or 0) for row in rows if row["way"] == way]


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    def ratio(over: str, under: str, name: str) -> float:
        parts = zip(of_rounds(rows, over, name), of_rounds(rows, under, name), strict=True)
        return statistics.median(above / below for above, below in parts)

    loads, computes = (of_rounds(rows, "off_short", name) for name in ("load_s", "compute_s"))
    longest_s = [max(each) for each in zip(loads, computes, strict=True)]

    def over_longest(way: str) -> float:
        ttfts_s = of_rounds(rows, way, "ttft_s")
        return statistics.median(t / longest for t, longest in zip(ttfts_s, longest_s, strict=True))

    return [
        Target(
            "ttft_over_max",
            round(over_longest("on_short"), 4),
            "<=",
            TTFT_GOAL,
            why=f"over max(load, compute); {over_longest('off_short'):.2f} without layers, "
            f"{statistics.median(of_rounds(rows, 'on_short', 'over_own_max')):.2f} over its own",
        ),
        Target(
            "page_seconds",
            round(ratio("on_short", "off_short", "page_seconds"), 4),
            "<=",
            PAGE_SECONDS_GOAL,
            why="with layers over without, one prompt",
        ),
        Target(
            "queue_of_4x",
            round(ratio("queue_on_short", "queue_on_all", "tokens_per_s"), 4),
            ">=",
            QUEUE_GOAL,
            why="tokens per second over those with pages for all; without layers "
            f"{ratio('queue_off_short', 'queue_off_all', 'tokens_per_s'):.2f}",
        ),
    ]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 3,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 12,
    seed: BlocksSeed = 1,
) -> None:
    """Measure layer-wise loading with a link as fast as computing; the last line is JSON."""
    model = LlamaShape(layers=layers, hidden=192, heads=3, kv_heads=1, intermediate=512)
    with benchmark("layerwise") as run, contextlib.ExitStack() as stack:
        with console.status("making a model, starting workers ..."):
            site = LayerwiseSite(stack, model, seed)
        run.rows = measure(site, rounds)
        run.targets = targets(run.rows)


if __name__ == "__main__":
    typer.run(main)
