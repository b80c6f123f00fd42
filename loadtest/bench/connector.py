"""What our connector costs inside a step of TensorRT-LLM, and how fast its copies are.

    python -m loadtest.bench.connector

TensorRT-LLM calls `get_num_new_matched_tokens` while it holds the lock of its own prefix tree, and
`build_connector_meta` in every step, for which it first describes the step (how much of that we
replace: backends/engine/trtllm/lean_output.py); each call gets a list of tokens that nobody has
seen yet, as the real one does. Beside them stand what a call cannot avoid (reading the list once)
and what it would cost to hash the keys instead. Copies are measured where CUDA is
(connector_copies.py); on plain memory they are a memcpy, which is only shown.

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
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import typer

from backends.engine.trtllm import lean_output
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

    def described(self, tokens: int, is_lean: bool) -> float:
        """What TensorRT-LLM builds of 64 decoding requests for a connector, in each step."""
        requests = [Running(number, self.prompt(tokens)) for number in range(REQUESTS)]
        made = lean_output.lean_request(LIKE_UPSTREAM) if is_lean else WholeLists
        described = [made() for _ in requests]

        def prepare(number: int) -> Callable[[], object]:
            for each, request in zip(described, requests, strict=True):
                each.update_and_build_data(request, request)  # the first time is the prompt's
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

        size = f"{tokens // 1024}k"
        kind = f"new, half of {size} loaded" if is_new else f"decoding, {size}"
        return self.timed(f"orders of {REQUESTS} requests, {kind}", prepare)


class Running:
    """A request and its pages as TensorRT-LLM hands them to Python: a new list for each call."""

    def __init__(self, number: int, prompt: np.ndarray) -> None:
        self.request_id, self.length, self.state = number, len(prompt), "generating"
        self._tokens = array("i", [*prompt.tolist(), *range(4096)])
        self._pages = array("i", range(len(self._tokens) // TOKENS_PER_BLOCK + 1))
        self.tokens_per_block = TOKENS_PER_BLOCK

    def get_num_tokens(self, beam: int) -> int:
        return self.length

    def get_tokens(self, beam: int) -> list[int]:
        return self._tokens[: self.length].tolist()

    def get_cache_indices(self, request: Running) -> list[int]:
        return self._pages[: self.length // TOKENS_PER_BLOCK + 1].tolist()


class WholeLists:
    """As TensorRT-LLM does it: all tokens and pages, compared by length with a copy of its own."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._pages: list[int] = []

    def update_and_build_data(self, request: Running, pages: Running) -> Computed:
        all_pages, all_tokens = pages.get_cache_indices(request), request.get_tokens(0)
        new_pages, new_tokens = all_pages[len(self._pages) :], all_tokens[len(self._tokens) :]
        self._pages += new_pages
        self._tokens += new_tokens
        return Computed(request.request_id, new_tokens, new_pages, len(all_tokens) - 1, 1)


LIKE_UPSTREAM = SimpleNamespace(
    KvCacheConnectorSchedulerOutputRequest=WholeLists, RequestData=Computed,
    LlmRequestState=SimpleNamespace(CONTEXT_INIT=1, DISAGG_GENERATION_TRANS_IN_PROGRESS=2),
)  # fmt: skip


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
    long_decoding_us = bench.orders(is_new=False, tokens=32_768)
    whole_us = bench.described(32_768, is_lean=False)
    lean_us = bench.described(32_768, is_lean=True)
    targets = [
        Target("get_num_new_matched_tokens, 4k, us", short_us, "<=", 100.0),
        Target("get_num_new_matched_tokens, 128k, us", long_us, "<=", 2500.0),
        Target("build_connector_meta, 64 requests, us", decoding_us, "<=", 200.0),
        Target("build_connector_meta, 64 new requests, us", new_us, "<=", 200.0),
        Target("build_connector_meta, 64 requests of 32k, us", long_decoding_us, "<=", 200.0),
        Target("description of 64 requests of 32k, us", lean_us, "<=", 200.0),
        Target("description of 64 x 32k, of TensorRT-LLM's", lean_us / whole_us, "<=", 0.05),
    ]
    rows = bench.rows
    if copies:
        measured = connector_copies.measure()
        rows = [*rows, *measured.rows]
        targets += measured.targets
    Result("connector", time.monotonic() - started_s, rows, targets).print()


if __name__ == "__main__":
    typer.run(main)
