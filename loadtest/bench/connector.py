"""What our connector costs inside a step of TensorRT-LLM, and how fast its copies are.

    python -m loadtest.bench.connector

TensorRT-LLM calls `get_num_new_matched_tokens` while it holds the lock of its own prefix tree, and
`build_connector_meta` in every step; each call gets a list of tokens that nobody has seen yet, as
the real one does. Beside them stand what a call cannot avoid (reading the list once) and what it
would cost to hash the keys instead. Copies are measured where CUDA is (connector_copies.py); on
plain memory they are a memcpy, which is only shown.

Not here: the copies' correctness (tests), a whole engine (nobody has one without a GPU).
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.channel import SCHEDULER, ConnectorHost, ConnectorLink
from backends.engine.trtllm.scheduler import StageScheduler
from loadtest.bench import connector_copies
from loadtest.bench.result import Cell, Result, Target
from mooncake_store.block_keys import block_keys, chain_seed

BLOCK_TOKENS, TOKENS_PER_BLOCK = 256, 32
VOCABULARY_TOKENS = 128_256
REQUESTS = 64
SEED = chain_seed("bench")


@dataclass
class Asked:
    """A request as the scheduler sees it; its list of tokens is made when the test is ready."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


@dataclass(slots=True)
class Computed:
    """What TensorRT-LLM says of one request in one step."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class Bench:
    def __init__(self, repeats: int, seed: int) -> None:
        self._repeats = repeats
        self._chance = np.random.default_rng(seed)
        self.rows: list[dict[str, Cell]] = []

    def prompt(self, tokens: int) -> np.ndarray:
        return self._chance.integers(0, VOCABULARY_TOKENS, tokens)

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
        self.rows.append({
            "call": name,
            "median_us": round(median_us, 1),
            "p90_us": round(found_us[int(0.9 * len(found_us))], 1),
            "best_us": round(found_us[0], 1),
        })  # fmt: skip
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
            scheduler = StageScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
            for stage in stages:
                problem = scheduler.add_checked(stage)
                assert not problem, problem
            chosen = number % REQUESTS
            request = Asked(number, prompts[chosen].tolist())

            def call() -> None:
                assert scheduler.match(request, 0) == loaded

            return call

        size = f"{tokens // 1024}k"
        shared = ", one prefix" if shared_tokens else ""
        return self.timed(f"match {size} of {REQUESTS} staged{shared}", prepare)

    def unmatched(self, tokens: int) -> None:
        scheduler = StageScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
        prompt = self.prompt(tokens)
        self.timed(
            f"match {tokens // 1024}k, nothing staged",
            lambda number: partial(scheduler.match, Asked(number, prompt.tolist()), 0),
        )

    def stage(self, tokens: int) -> None:
        """From a worker's Stage to the acknowledgement, through the channel, in one process."""
        prompt, pages = self.prompt(tokens), list(range(-(-tokens // BLOCK_TOKENS)))
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
            address = f"ipc://{folder}/kv"
            host = ConnectorHost(address, Unheard())
            scheduler = StageScheduler(
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

    def orders(self, is_new: bool) -> float:
        """A step of 64 requests: all new (4k tokens, half of them loaded), or all decoding."""
        tokens = 4096
        prompts = [self.prompt(tokens) for _ in range(REQUESTS)]
        pages = list(range(tokens // BLOCK_TOKENS + 1))
        stages = [
            m.Stage.of(str(number), prompt, BLOCK_TOKENS, SEED, "", pages, tokens // 2)
            for number, prompt in enumerate(prompts)
        ]
        blocks = list(range(tokens // TOKENS_PER_BLOCK))

        def prepare(number: int) -> Callable[[], object]:
            scheduler = StageScheduler(BLOCK_TOKENS, TOKENS_PER_BLOCK, lambda message: None)
            for llm_id, (stage, prompt) in enumerate(zip(stages, prompts, strict=True)):
                assert not scheduler.add_checked(stage)
                request = Asked(llm_id, prompt.tolist())
                assert scheduler.match(request, 0) == tokens // 2
                scheduler.allocated(request, blocks)
            new = [Computed(llm_id, [], list(blocks), 0, tokens // 2) for llm_id in range(REQUESTS)]
            if is_new:
                return lambda: scheduler.orders(new, [])
            scheduler.orders(new, [])
            # Two of 64 fill a page in a step: there are 32 tokens in a page.
            steps = [
                Computed(llm_id, [1], [9000], tokens + 31 - (llm_id % 32), 1)
                for llm_id in range(REQUESTS)
            ]
            return lambda: scheduler.orders([], steps)

        kind = "new, 2k of 4k loaded" if is_new else "decoding"
        return self.timed(f"orders of {REQUESTS} requests, {kind}", prepare)


class Unheard:
    """A listener that needs nothing."""

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...
    def saved(self, request_id: str, tokens: int) -> None: ...
    def broken(self, reason: str) -> None: ...


def read_once(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()


def main(
    repeats: Annotated[int, typer.Option(min=3)] = 101,
    seed: Annotated[int, typer.Option()] = 1,
    copies: Annotated[
        bool, typer.Option(help="Measure copies too, on a GPU if there is one.")
    ] = True,
) -> None:
    """Measure the connector's part in a step; the last line is JSON."""
    started_s = time.monotonic()
    bench = Bench(repeats, seed)
    short_us = max(bench.match(4096, 0), bench.match(4096, 3840))
    long_us = max(bench.match(131_072, 0), bench.match(131_072, 130_048))
    for tokens in (4096, 131_072):
        bench.unmatched(tokens)
        bench.stage(tokens)
        bench.limits(tokens)
    decoding_us, new_us = bench.orders(is_new=False), bench.orders(is_new=True)
    targets = [
        Target("get_num_new_matched_tokens, 4k, us", short_us, "<=", 100.0),
        Target("get_num_new_matched_tokens, 128k, us", long_us, "<=", 2500.0),
        Target("build_connector_meta, 64 requests, us", decoding_us, "<=", 200.0),
        Target("build_connector_meta, 64 new requests, us", new_us, "<=", 200.0),
    ]
    rows = bench.rows
    if copies:
        measured = connector_copies.measure()
        rows = [*rows, *measured.rows]
        targets += measured.targets
    Result("connector", time.monotonic() - started_s, rows, targets).print()


if __name__ == "__main__":
    typer.run(main)
