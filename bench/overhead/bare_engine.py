"""The engine of the workers alone in this process: the reference of the benchmark.

Not here: requests to a server (served.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from backends.engine.interface import Work
from backends.engine.sampling import sample
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate_tokens
from loadtest.harness.server import PROJECT
from loadtest.replay.prompts import TokenIds
from mooncake_store.layout import blocks_touched

CHECKPOINT = PROJECT / "backends" / "demo_checkpoint"
ONE = SamplingParams(max_tokens=1)


class BareEngine:
    def __init__(self, block_tokens: int, threads: int, kv_tokens: int) -> None:
        """`kv_tokens`: of all requests that are in its pages at once."""
        pages = blocks_touched(kv_tokens, block_tokens)
        self._engine = TorchEngine.load(CHECKPOINT, pages, block_tokens, threads=threads)
        self._block_tokens = block_tokens
        self._short_pages: list[int] = []

    def ttft_s(self, prompt: TokenIds) -> float:
        """TTFT of a prompt whose full blocks are in pages; at least one token is computed."""
        cached = min(len(prompt) // self._block_tokens * self._block_tokens, len(prompt) - 1)
        if not self._short_pages:
            self._short_pages = self._engine.pages.take(len(prompt) // self._block_tokens + 1)
            self._engine.forward([Work(prompt[:cached].tolist(), 0, self._short_pages)])
        started_s = time.perf_counter()
        work = Work(prompt[cached:].tolist(), cached, self._short_pages)
        sample(self._engine.forward([work])[0], ONE, 0, [], [])
        return time.perf_counter() - started_s

    def streams_s(self, prompts: Sequence[TokenIds], output_tokens: int) -> list[list[float]]:
        """Arrival times of each token of each prompt, all decoding at once."""
        params = SamplingParams(max_tokens=output_tokens, min_tokens=output_tokens)
        times_s: list[list[float]] = [[] for _ in prompts]
        ids = [prompt.tolist() for prompt in prompts]
        for index, _ in generate_tokens(self._engine, ids, params, slots_max=len(prompts)):
            times_s[index].append(time.perf_counter())
        return times_s

    def intervals_s(
        self, prompts: Sequence[TokenIds], steps: int, beside: TokenIds | None, chunk_tokens: int
    ) -> list[float]:
        """Between the tokens of streams, one for each step. `beside`: a prompt that is prefilled in
        the same batches, a chunk in each; then the steps with its chunks are returned."""
        pool = self._engine.pages
        longest = max(len(prompt) for prompt in prompts) + steps
        pages = [pool.take(blocks_touched(longest, self._block_tokens)) for _ in prompts]
        own = (
            pool.take(blocks_touched(len(beside), self._block_tokens)) if beside is not None else []
        )
        try:
            for prompt, its in zip(prompts, pages, strict=True):
                self._engine.forward([Work(prompt.tolist(), 0, its)])
            done, times_s = 0, [time.perf_counter()]
            for step in range(steps):
                works = [
                    Work([1], len(prompt) + step, its)
                    for prompt, its in zip(prompts, pages, strict=True)
                ]
                if beside is not None:
                    if done >= len(beside):
                        break
                    chunk = beside[done : done + chunk_tokens].tolist()
                    works.append(Work(chunk, done, own))
                    done += len(chunk)
                for logits in self._engine.forward(works)[: len(prompts)]:
                    sample(logits, ONE, 0, [], [])
                times_s.append(time.perf_counter())
            return [after - before for before, after in pairwise(times_s)]
        finally:
            for taken in (*pages, own):
                pool.release(taken)
