"""The torch engine on CPU beside transformers, beside its linear layers alone, beside its bytes.

    python -m bench.engine [--only prefill|decode|shares|demo|fp8]

It makes a random Llama of 100 million parameters (hidden 768, 12 layers, 12 heads, 4 KV heads,
intermediate 2,048, vocabulary 32,000, tied), bfloat16, two threads. In every round, in turns:

    prefill   prompts of 512, 2k and 8k tokens: ours in chunks of 512, transformers whole
    decode    from token to token, batch 1 and 16 from 512 tokens of context: ours with sampling,
              `generate` and continuous batching (`generate_batch`) of transformers, greedy
    shares    our step, its linear layers alone (the same packed matrices, the same rows), and
              reading the bytes that a step must read
    demo      the demo checkpoint, float32, one thread: a decode step beside reading its bytes
    fp8       decode steps and a prompt with KV in fp8, beside the same with KV in bfloat16; how
              near the demo checkpoint's tokens are to those with KV in float32

Medians of the rounds are compared. Not here: running each (own_engine.py, transformers_peer.py),
the distance of answers (kv_quality.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.engine import kv_quality
from bench.engine.own_engine import CHUNK_TOKENS, OwnEngine, bytes_per_s
from bench.engine.transformers_peer import Transformers
from bench.harness.random_checkpoint import LlamaShape, make_llama
from loadtest.harness.benchmark import BenchmarkRun, BlocksSeed, benchmark, console, median_s
from loadtest.harness.result import Cell, Target

SHAPE = LlamaShape(
    layers=12, hidden=768, heads=12, kv_heads=4, intermediate=2_048, vocabulary_tokens=32_000
)
MODEL = "Llama, 100 M"
MODEL_SHAPE = "12 layers of 768, 12 heads, 4 KV heads, intermediate 2,048, vocabulary 32,000, tied"
DTYPE, THREADS, BLOCK_TOKENS = "bfloat16", 2, 256
PROMPTS_TOKENS = {"512": 512, "2k": 2_048, "8k": 8_192}
BATCH_GOALS = {1: 1.4, 16: 2.0}
DECODE_CONTEXT_TOKENS, DECODE_STEPS = 512, 16
SHARE_GOALS = {(1, 512): 0.7, (16, 512): 0.5, (1, 4_096): 0.5}
LIMITED = (16, 4_096)
LIMIT_GOAL, PREFILL_SHARE_GOAL = 1.6, 0.6
SHARED_PROMPT_TOKENS = 2_048
STEPS = 10  # of a way in a round
FP8_STEPS = ((1, 4_096), (16, 512), (16, 4_096))
FP8_GOAL = 1.0  # most times as long as with bfloat16, at the longest context
DEMO, DEMO_BLOCK_TOKENS, DEMO_GOAL = (16, 512), 64, 1.8
DEMO_FOLDER = Path("backends/demo_checkpoint")


class Part(str, Enum):
    prefill = "prefill"
    decode = "decode"
    shares = "shares"
    demo = "demo"
    fp8 = "fp8"


def measure_prefill(run: BenchmarkRun, own: OwnEngine, peer: Transformers, rounds: int) -> None:
    for name, tokens in PROMPTS_TOKENS.items():
        [prompt] = own.prompts(1, tokens)
        ours, theirs = partial(own.prefill_s, prompt), partial(peer.prefill_s, prompt)
        found = medians_s(rounds, ours=ours, theirs=theirs)
        run.rows.append(
            {
                "model": MODEL,
                "prompt_tokens": tokens,
                "ours_ms": ms(found["ours"]),
                "transformers_ms": ms(found["theirs"]),
                "ours_tokens_per_s": round(tokens / found["ours"]),
            }
        )
        ratio = found["theirs"] / found["ours"]
        run.targets.append(Target(f"prefill_over_transformers_{name}", round(ratio, 3), ">=", 1.0))


def measure_decode(run: BenchmarkRun, own: OwnEngine, peer: Transformers, rounds: int) -> None:
    for batch, goal in BATCH_GOALS.items():
        prompts = own.prompts(batch, DECODE_CONTEXT_TOKENS)
        found = medians_s(
            rounds,
            ours=partial(own.generate_s, prompts, DECODE_STEPS),
            generate=partial(peer.generate_s, prompts, DECODE_STEPS),
            batch=partial(peer.generate_batch_s, prompts, DECODE_STEPS),
        )
        run.rows.append(
            {
                "model": MODEL,
                "batch": batch,
                "context_tokens": DECODE_CONTEXT_TOKENS,
                "ours_ms": ms(found["ours"]),
                "generate_ms": ms(found["generate"]),
                "generate_batch_ms": ms(found["batch"]),
            }
        )
        theirs, name = min((found["generate"], "generate"), (found["batch"], "generate_batch"))
        ratio = round(theirs / found["ours"], 3)
        run.targets.append(
            Target(f"decode_over_transformers_{batch}", ratio, ">=", goal, why=f"beside {name}")
        )


def measure_shares(run: BenchmarkRun, own: OwnEngine, rounds: int) -> None:
    for batch, context_tokens in [*SHARE_GOALS, LIMITED]:
        row = measure_step(own, batch, context_tokens, rounds)
        run.rows.append({"model": MODEL, **row})
        if (batch, context_tokens) in SHARE_GOALS:
            goal = SHARE_GOALS[batch, context_tokens]
            name = f"decode_linear_share_{batch}_{context_tokens}"
            run.targets.append(Target(name, float(row["linear_share"] or 0), ">=", goal))
        else:
            name = f"decode_over_bytes_{batch}_{context_tokens}"
            run.targets.append(Target(name, float(row["over_limit"] or 0), "<=", LIMIT_GOAL))
    [prompt] = own.prompts(1, SHARED_PROMPT_TOKENS)
    chunks = SHARED_PROMPT_TOKENS // CHUNK_TOKENS
    found = medians_s(
        rounds,
        prompt=lambda: own.prefill_s(prompt),
        linears=lambda: own.linears_s(CHUNK_TOKENS, 1, chunks) * chunks,
    )
    share = round(found["linears"] / found["prompt"], 3)
    run.rows.append(
        {
            "model": MODEL,
            "prompt_tokens": SHARED_PROMPT_TOKENS,
            "ours_ms": ms(found["prompt"]),
            "linears_ms": ms(found["linears"]),
            "linear_share": share,
        }
    )
    run.targets.append(Target("prefill_linear_share_2k", share, ">=", PREFILL_SHARE_GOAL))


def measure_step(own: OwnEngine, batch: int, context_tokens: int, rounds: int) -> dict[str, Cell]:
    """A decode step, its linear layers alone, and its bytes, in turns."""
    size_bytes = own.step_bytes(batch, context_tokens)
    found = medians_s(
        rounds,
        step=lambda: own.step_s(batch, context_tokens, STEPS),
        linears=lambda: own.linears_s(batch, batch, STEPS),
        byte=lambda: 1 / bytes_per_s(size_bytes, STEPS),
    )
    limit_s = size_bytes * found["byte"]
    return {
        "batch": batch,
        "context_tokens": context_tokens,
        "step_ms": ms(found["step"]),
        "linears_ms": ms(found["linears"]),
        "linear_share": round(found["linears"] / found["step"], 3),
        "step_mb": round(size_bytes / 1e6, 1),
        "read_gb_per_s": round(1e-9 / found["byte"], 2),
        "limit_ms": ms(limit_s),
        "over_limit": round(found["step"] / limit_s, 3),
    }


def measure_demo(run: BenchmarkRun, rounds: int, seed: int) -> None:
    torch.set_num_threads(1)
    batch, context_tokens = DEMO
    own = OwnEngine(DEMO_FOLDER, "float32", DEMO_BLOCK_TOKENS, batch * context_tokens, seed)
    row = measure_step(own, batch, context_tokens, 3 * rounds)  # a step is short here
    run.rows.append({"model": "demo checkpoint, float32, 1 thread", **row})
    over = float(row["over_limit"] or 0)
    run.targets.append(Target("demo_decode_over_bytes_16", over, "<=", DEMO_GOAL))


def measure_fp8(
    run: BenchmarkRun, own: OwnEngine, checkpoint: Path, rounds: int, seed: int
) -> None:
    """The same steps over pages of bfloat16 and of fp8, in turns."""
    tokens_max = LIMITED[0] * LIMITED[1]
    small = OwnEngine(checkpoint, DTYPE, BLOCK_TOKENS, tokens_max, seed, "fp8")

    def compared(cells: dict[str, Cell], run_s: Callable[[OwnEngine], float]) -> float:
        """Add a row; returns the time with fp8 over that with bfloat16."""
        found = medians_s(rounds, bfloat16=partial(run_s, own), fp8=partial(run_s, small))
        ratio = round(found["fp8"] / found["bfloat16"], 3)
        times = {f"{name}_ms": ms(seconds) for name, seconds in found.items()}
        run.rows.append({"model": MODEL, **cells, **times, "fp8_over_bfloat16": ratio})
        return ratio

    for at in FP8_STEPS:
        cells: dict[str, Cell] = {"batch": at[0], "context_tokens": at[1]}
        ratio = compared(cells, methodcaller("step_s", *at, STEPS))
        if at == LIMITED:
            run.targets.append(Target("fp8_over_bfloat16_16_4096", ratio, "<=", FP8_GOAL))
    [prompt] = own.prompts(1, SHARED_PROMPT_TOKENS)
    compared({"prompt_tokens": SHARED_PROMPT_TOKENS}, methodcaller("prefill_s", prompt))


def medians_s(rounds: int, **ways: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each way; the ways take turns, after a round that does not count."""
    return median_s(ways, rounds, warm_rounds=1)


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 3,
    only: Annotated[list[Part] | None, typer.Option(help="Parts; by default all.")] = None,
    seed: BlocksSeed = 1,
) -> None:
    """Measure the engine; the last line is JSON."""
    parts = set(only or Part)
    with benchmark("engine") as run, tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        if Part.demo in parts:
            with console.status("the demo checkpoint ..."):
                measure_demo(run, rounds, seed)
        if parts == {Part.demo}:
            return
        torch.set_num_threads(THREADS)
        run.constants |= {MODEL: MODEL_SHAPE, "dtype": DTYPE, "threads": THREADS}
        with console.status("making a model ..."):
            checkpoint = make_llama(Path(folder), SHAPE, seed)
            tokens_max = LIMITED[0] * LIMITED[1]
            own = OwnEngine(checkpoint, DTYPE, BLOCK_TOKENS, tokens_max, seed)
        if Part.shares in parts:
            with console.status("steps, their linear layers, their bytes ..."):
                measure_shares(run, own, rounds)
        if Part.fp8 in parts:
            with console.status("KV as fp8 ..."):
                measure_fp8(run, own, checkpoint, rounds, seed)
                run.rows.append(kv_quality.measure(DEMO_FOLDER, seed))
        if parts & {Part.prefill, Part.decode}:
            peer = Transformers(checkpoint, DTYPE)
            run.constants["transformers"] = peer.version
        if Part.decode in parts:
            with console.status("decoding beside transformers ..."):
                measure_decode(run, own, peer, rounds)
        if Part.prefill in parts:
            with console.status("prefill beside transformers ..."):
                measure_prefill(run, own, peer, rounds)


if __name__ == "__main__":
    typer.run(main)
