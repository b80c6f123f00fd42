"""A pipeline group of prefill workers with one long prompt, and with a short one.

    python -m bench.pipeline

It makes a random Llama of 12 layers and 16,640 positions, and starts a directory, a storage node,
two whole prefill workers and one group, each stage a process with one thread. In every round, in
turns:

    alone      the long prompt at one whole worker: T1
    two        a long prompt at each whole worker, at the same time: the gain g = 2 T1 / their time
    pipeline   the long prompt at the group, cut into chunks
    one chunk  a prompt of one chunk, alone and at the group

All times end with the first token at a frontend; prompts are fresh. With S stages of equal work and
free hand-over, the pipeline would take T1 / g x (1 + 1 / chunks) for S = 2: that is `ideal`. g is
the machine's capacity for a second worker: cores and memory bandwidth.

Not here: Triton and the frontend, whose cost is the same for a group and a worker (bench/overhead).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from backends.workers.pipeline.group import BEGIN_AGAIN_S
from bench.harness.prefill_process import BLOCK_TOKENS, PrefillFailed, PrefillProcess, PrefillSite
from bench.harness.random_checkpoint import LlamaShape
from loadtest.harness.benchmark import BlocksSeed, benchmark, console
from loadtest.harness.result import Cell, Target

LONG_TOKENS = 16_384
OVER_IDEAL_GOAL = 1.2
ONE_CHUNK_GOAL, HOP_MS_GOAL = 1.05, 3.0
SHORT_REPEATS = 5
WHOLE_S_MAX = 30.0
STAGES = 2


@dataclass(frozen=True, slots=True)
class PipelineShape:
    model: LlamaShape
    prompt_tokens: int
    chunk_tokens: int

    @property
    def chunks(self) -> int:
        return -(-self.prompt_tokens // self.chunk_tokens)


class PipelineSite(PrefillSite):
    def __init__(self, stack: contextlib.ExitStack, shape: PipelineShape, seed: int) -> None:
        self._shape = shape
        # The node has room for the blocks of four long prompts.
        segment_bytes = 4 * shape.prompt_tokens * shape.model.token_bytes + 2**26
        parameters = {
            "chunk_tokens": str(shape.chunk_tokens),
            "kv_pages": str(shape.model.positions // BLOCK_TOKENS + 2),
            "transport": "mapped",
        }
        super().__init__(stack, shape.model, seed, {"s0": segment_bytes}, parameters)
        self.whole = [self.start("prefill_0"), self.start("prefill_1")]
        self.stages = [
            self.start(
                f"stage_{number}",
                pipeline_group="g0",
                pipeline_stage=str(number),
                pipeline_stages=str(STAGES),
            )
            for number in range(STAGES)
        ]
        for process in [*self.whole, *self.stages]:
            process.wait_ready()
        self._wait_whole()

    def _wait_whole(self) -> None:
        until_s = time.monotonic() + WHOLE_S_MAX
        while True:
            try:
                self.ttfts_s([self.stages[0]], BLOCK_TOKENS)
                return
            except PrefillFailed:
                if time.monotonic() > until_s:
                    raise
                time.sleep(BEGIN_AGAIN_S)

    def ttfts_s(self, workers: list[PrefillProcess], prompt_tokens: int) -> list[float]:
        """TTFTs of fresh prompts, one at each worker, all at once; returns when all blocks are
        stored too."""
        prompts = [self.fresh(prompt_tokens) for _ in workers]
        requests = [self.tokens.request(prompt) for prompt in prompts]
        started_s = time.perf_counter()
        for worker, request, prompt in zip(workers, requests, prompts, strict=True):
            worker.ask(request, prompt)
        for worker in workers:
            assert worker.wait_reply().cached_tokens == 0, "a fresh prompt was cached"
        return [self.tokens.wait_s(request.request_id) - started_s for request in requests]

    def long_round(self) -> dict[str, Cell]:
        tokens, shape = self._shape.prompt_tokens, self._shape
        alone_s = [self.ttfts_s([self.whole[0]], tokens)[0]]
        both_s = max(self.ttfts_s(self.whole, tokens))
        pipeline_s = self.ttfts_s([self.stages[0]], tokens)[0]
        alone_s.append(self.ttfts_s([self.whole[1]], tokens)[0])
        t1_s = statistics.mean(alone_s)
        gain = 2 * t1_s / both_s
        ideal_s = t1_s / gain * (1 + 1 / shape.chunks)
        return {
            "prompt_tokens": tokens,
            "chunks": shape.chunks,
            "alone_s": round(t1_s, 3),
            "gain_of_two": round(gain, 3),
            "pipeline_s": round(pipeline_s, 3),
            "ideal_s": round(ideal_s, 3),
            "over_ideal": round(pipeline_s / ideal_s, 4),
            "over_alone": round(pipeline_s / t1_s, 4),
        }

    def short_round(self) -> dict[str, Cell]:
        tokens = self._shape.chunk_tokens
        alone_s, group_s = [], []
        for _ in range(SHORT_REPEATS):
            alone_s.append(self.ttfts_s([self.whole[0]], tokens)[0])
            group_s.append(self.ttfts_s([self.stages[0]], tokens)[0])
        alone_ms, group_ms = (statistics.median(each) * 1e3 for each in (alone_s, group_s))
        return {
            "prompt_tokens": tokens,
            "chunks": 1,
            "alone_ms": round(alone_ms, 3),
            "group_ms": round(group_ms, 3),
            "hop_ms": round((group_ms - alone_ms) / (STAGES - 1), 3),
        }


def targets(rows: list[dict[str, Cell]]) -> list[Target]:
    def median(name: str) -> float:
        return float(np.median([float(row[name] or 0) for row in rows if name in row]))

    hops_ms = HOP_MS_GOAL * (STAGES - 1)
    one_chunk = (median("group_ms") - hops_ms) / median("alone_ms")
    return [
        Target("ttft_16k_over_ideal", round(median("over_ideal"), 4), "<=", OVER_IDEAL_GOAL),
        Target(
            "ttft_one_chunk",
            round(one_chunk, 4),
            "<=",
            ONE_CHUNK_GOAL,
            why=f"(the group's - {HOP_MS_GOAL:g} ms a hop) / that of one worker",
        ),
    ]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 3,
    prompt_tokens: Annotated[
        int, typer.Option(min=512, help="Tokens of the long prompt.")
    ] = LONG_TOKENS,
    chunk_tokens: Annotated[int, typer.Option(min=BLOCK_TOKENS, help="Longest step.")] = 512,
    layers: Annotated[int, typer.Option(min=STAGES, help="Layers of the model.")] = 12,
    seed: BlocksSeed = 1,
) -> None:
    """Measure one prompt through a group of two stages; the last line is JSON."""
    shape = PipelineShape(LlamaShape(layers=layers), prompt_tokens, chunk_tokens)
    with benchmark("pipeline") as run, contextlib.ExitStack() as stack:
        with console.status("making a model, starting workers ..."):
            site = PipelineSite(stack, shape, seed)
        for number in range(1, rounds + 1):
            with console.status(f"round {number} of {rounds} ..."):
                run.rows.append(site.long_round())
                run.rows.append(site.short_round())
        run.targets = targets(run.rows)


if __name__ == "__main__":
    typer.run(main)
