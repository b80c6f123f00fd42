"""The torch engine on a GPU, checked against itself on the CPU and against its own plain ways.

    python -m tests.gpu.engine_checks [--device cuda:0]

It wants torch, numpy and the checkout: models are small, random, and made on the spot. The last
line is JSON: {"name", "device", "seconds", "kernels": {...}, "passed": [...], "failed": {...}}; the
exit status is 1 if a check failed. `--device cpu` shows that the checks themselves run.

With pytest: test_torch_engine.py. Not here: how fast it is (bench/engine_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.interface import Work
from backends.engine.model_config import read_model_config
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.decode_graph import CudaRecorder, Recorder
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.rope import rope_table
from backends.engine.torch.torch_engine import TorchEngine
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import load_weights
from backends.token_logprobs import PromptScores
from bench.harness.generate import generate
from bench.harness.random_checkpoint import LlamaShape, make_llama
from mooncake_store.layout import blocks_touched

SHAPE = LlamaShape(
    layers=6, hidden=256, heads=4, kv_heads=2, intermediate=512, vocabulary_tokens=1_024
)
BLOCK_TOKENS = 256  # what flash attention 2 takes
PAGES = 48
# Of logits whose largest is about 4, in bfloat16 through 6 layers.
FAR = {"float32": 5e-3, "bfloat16": 0.25}
SLEEP_CYCLES = 200_000_000  # of a GPU: about 0.1 s


class Bench:
    """A checkpoint, and engines over it that differ in how they compute."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = make_llama(folder, SHAPE), torch.device(device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def engine(
        self,
        dtype: str = "bfloat16",
        is_recorded: bool = False,
        kernels: PagedKernels | None = None,
    ) -> TorchEngine:
        """Pages are gathered without `kernels`."""
        config, scalar = read_model_config(self.folder), TORCH_DTYPES[dtype]
        layout = config.layout(dtype, BLOCK_TOKENS)
        memory = KvMemory(layout, PAGES, self.device, is_mirrored=True)
        weights = load_weights(Checkpoint.open(self.folder), config, scalar, self.device)
        tokens_max = PAGES * BLOCK_TOKENS
        rope = rope_table(config.rope, config.head_dim, tokens_max, scalar, self.device)
        transformer = Transformer(config, weights, memory, rope, kernels)
        recorder: Recorder | None = None
        if is_recorded:
            recorder = CudaRecorder(self.device) if self.is_cuda else Recorder()
        return TorchEngine(transformer, "same", recorder=recorder)

    def kernels(self) -> dict[str, PagedKernels | str]:
        """Each that is known, or why it does not serve here."""
        engine = self.engine()
        memory, heads = engine._memory, engine.config.heads
        found: dict[str, PagedKernels | str] = {}
        for name, make in paged_kernels.known(memory, heads):
            [(kernels, problem)] = paged_kernels.tried([(name, make)], memory, heads)
            found[name] = problem if kernels is None else kernels
        return found


def words(tokens: int, seed: int) -> list[int]:
    chance = np.random.default_rng(seed)
    return [int(token) for token in chance.integers(3, SHAPE.vocabulary_tokens, tokens)]


def near(ours: np.ndarray, expected: np.ndarray, dtype: str, what: str) -> None:
    far = float(np.abs(ours - expected).max())
    assert far < FAR[dtype], f"{what}: logits are off by {far:.3g}"


def random_batches(seed: int, has_prompts: bool) -> list[list[Work]]:
    """Over whatever is in the pages."""
    chance, batches = np.random.default_rng(seed), []
    for works in (1, 2, 3, 7, 12, 16):
        free = [int(page) for page in chance.permutation(PAGES)]
        batch = []
        for index in range(works):
            start = int(chance.choice([0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 300, 600]))
            new = 1 if not has_prompts or index % 2 else int(chance.choice([2, 40, 130]))
            pages = [free.pop() for _ in range(blocks_touched(start + new, BLOCK_TOKENS))]
            batch.append(Work(words(new, seed + index), start, pages))
        batches.append(batch)
    return batches


def agree(ours: TorchEngine, plain: TorchEngine, batches: Sequence[list[Work]], what: str) -> None:
    for batch in batches:
        # Pages with the same numbers, not larger than those of a model.
        torch.manual_seed(len(batch))
        plain._memory.pool.normal_()
        ours._memory.pool.copy_(plain._memory.pool)
        near(ours.forward(batch), plain.forward(batch), plain.layout.dtype, what)


def greedy_tokens_are_those_of_the_cpu(bench: Bench) -> None:
    prompts = [words(tokens, tokens) for tokens in (1, 15, 255, 256, 257, 600)]
    params = SamplingParams(max_tokens=24)
    found = []
    for device in ("cpu", str(bench.device)):
        engine = TorchEngine.load(bench.folder, PAGES, BLOCK_TOKENS, device=device)
        found.append(generate(engine, prompts, params, chunk_tokens=256, slots_max=4))
        engine.pages.check()
    assert found[0] == found[1]


def the_engine_of_a_worker_computes_in_half_precision(bench: Bench) -> None:
    engine = TorchEngine.load(
        bench.folder, PAGES, BLOCK_TOKENS, dtype="bfloat16", device=str(bench.device)
    )
    plain = bench.engine("bfloat16")
    agree(engine, plain, random_batches(1, has_prompts=True), "a worker's engine")
    agree(engine, plain, random_batches(1, has_prompts=False), "its decode steps")


def recorded_steps_are_those_that_are_launched(bench: Bench) -> None:
    for dtype in ("float32", "bfloat16"):
        recorded, plain = bench.engine(dtype, is_recorded=True), bench.engine(dtype)
        for seed in (1, 2):  # the second time everything is replayed
            agree(recorded, plain, random_batches(seed, has_prompts=False), f"recorded, {dtype}")
        assert recorded._graphs is not None and recorded._graphs._recorded, "nothing was recorded"


def pages_read_in_place_are_those_gathered(bench: Bench) -> None:
    """Whatever serves here, in prompts, in launched and in recorded steps."""
    for name, kernels in bench.kernels().items():
        if isinstance(kernels, str):
            continue
        in_place = bench.engine(is_recorded=True, kernels=kernels)
        plain = bench.engine()
        for seed in (3, 4):
            agree(in_place, plain, random_batches(seed, has_prompts=True), name)
            agree(in_place, plain, random_batches(seed, has_prompts=False), f"{name}, decoding")
        attention = in_place._transformer.attention
        assert attention.kernels is not None, f"{name} failed in a step"
        assert in_place._graphs is not None and in_place._graphs._recorded, f"{name}: no graph"


def a_chunk_behind_a_long_prefix_is_right_and_needs_little_memory(bench: Bench) -> None:
    tokens, chunk = (PAGES * BLOCK_TOKENS, 2_048) if bench.is_cuda else (2_048, 512)
    prompt, pages = words(tokens, 9), list(range(tokens // BLOCK_TOKENS))
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = bench.engine(dtype)
        for start in range(0, tokens, chunk):
            before = _peak(bench)
            logits = engine.forward([Work(prompt[start : start + chunk], start, pages)])
        if bench.is_cuda:
            # A mask of the last chunk would have 24 million numbers, its scores 4 times as many.
            assert _peak(bench) - before < 200e6, f"{dtype}: {_peak(bench) - before:,} bytes"
        found[dtype] = logits
    near(found["bfloat16"], found["float32"], "bfloat16", "a long prompt")


def _peak(bench: Bench) -> int:
    """And it is counted anew."""
    if not bench.is_cuda:
        return 0
    torch.cuda.synchronize(bench.device)
    peak = torch.cuda.max_memory_allocated(bench.device)
    torch.cuda.reset_peak_memory_stats(bench.device)
    return peak


def pages_that_went_out_and_came_back_give_the_same_logits(bench: Bench) -> None:
    for is_recorded in (False, True):
        engine = bench.engine("float32", is_recorded)
        prompt, pages = words(700, 5), [4, 9, 2]
        expected = engine.forward([Work(prompt, 0, pages)])
        engine.export_pages(pages)
        kept = engine.kv_pool.copy()
        engine._memory.pool.zero_()
        engine.kv_pool[:] = kept
        if bench.is_cuda:  # the copies come late, and the step waits for them
            with torch.cuda.stream(engine._memory._queue._in):  # type: ignore[attr-defined]
                torch.cuda._sleep(SLEEP_CYCLES)
        engine.import_pages(pages)
        again = engine.forward([Work(prompt[-1:], len(prompt) - 1, pages)])
        near(again, expected, "float32", "after a round trip")


def a_step_does_not_wait_for_the_pages_of_others(bench: Bench) -> None:
    engine = bench.engine("float32", is_recorded=True)
    engine.forward([Work([5], 0, [3])])
    if bench.is_cuda:
        with torch.cuda.stream(engine._memory._queue._in):  # type: ignore[attr-defined]
            torch.cuda._sleep(5 * SLEEP_CYCLES)
    engine.import_pages([20, 21])
    engine.forward([Work([6], 1, [3])])
    [done] = engine._memory._arrivals._under_way.values()
    assert not bench.is_cuda or not done.is_over(), "the step waited for the import"
    done.synchronize()


def layers_are_in_host_memory_when_they_are_announced(bench: Bench) -> None:
    engine = bench.engine("float32")
    prompt, pages = words(700, 6), [7, 1, 8]
    scalars = torch.from_numpy(engine.kv_pool).view(torch.float32)
    host = scalars.view(engine._memory.pool.shape)
    seen: dict[int, torch.Tensor] = {}
    engine.forward(
        [Work(prompt, 0, pages)], lambda layer: seen.update({layer: host[pages, layer].clone()})
    )
    assert list(seen) == list(range(SHAPE.layers))
    for layer, there in seen.items():
        assert torch.equal(there, engine._memory.pool[pages, layer].cpu()), f"layer {layer}"


def a_prompt_passes_layer_by_layer_with_the_same_logits(bench: Bench) -> None:
    for dtype in ("float32", "bfloat16"):
        kernels = [k for k in bench.kernels().values() if not isinstance(k, str)][:1]
        for each in (None, *(kernels if dtype == "bfloat16" else [])):
            engine = bench.engine(dtype, kernels=each)
            prompt = words(1_500, 8)
            blocks = blocks_touched(len(prompt), BLOCK_TOKENS)
            chunks = [(at, min(512, len(prompt) - at)) for at in range(0, len(prompt), 512)]
            expected = [
                engine.forward([Work(prompt[at : at + count], at, range(blocks))])
                for at, count in chunks
            ][-1][0]
            assert engine.rings is not None
            rings = engine.rings.in_pages(range(20, 30), blocks)
            passing = engine.begin_pass(prompt, 0, rings)
            for layer in range(SHAPE.layers):
                for at, count in chunks:
                    logits = passing.compute(layer, at, count)
            assert logits is not None
            near(logits, expected, dtype, "layer by layer")


def logprobs_of_a_prompt_are_those_of_the_cpu(bench: Bench) -> None:
    prompt, pages = words(700, 9), [3, 1, 8]
    right = PromptScores(np.array(prompt, np.int32), 5)
    cpu = TorchEngine.load(bench.folder, PAGES, BLOCK_TOKENS)
    cpu.forward([Work(prompt, 0, pages, right)])
    for dtype in ("float32", "bfloat16"):
        found = PromptScores(right.token_ids, 5)
        engine = bench.engine(dtype, is_recorded=True)
        for start, end in ((0, 512), (512, 700)):
            engine.forward([Work(prompt[start:end], start, pages, found)])
        near(found.log_probs, right.log_probs, dtype, "logprobs of a prompt")
        near(found.top_log_probs, right.top_log_probs, dtype, "best tokens of a prompt")


CHECKS: tuple[Callable[[Bench], None], ...] = (
    greedy_tokens_are_those_of_the_cpu,
    the_engine_of_a_worker_computes_in_half_precision,
    recorded_steps_are_those_that_are_launched,
    pages_read_in_place_are_those_gathered,
    a_chunk_behind_a_long_prefix_is_right_and_needs_little_memory,
    pages_that_went_out_and_came_back_give_the_same_logits,
    a_step_does_not_wait_for_the_pages_of_others,
    layers_are_in_host_memory_when_they_are_announced,
    a_prompt_passes_layer_by_layer_with_the_same_logits,
    logprobs_of_a_prompt_are_those_of_the_cpu,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """All checks of the torch engine on a GPU; the last line is JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.engine_checks", description=main.__doc__
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu.")
    asked = parser.parse_args(arguments)
    if asked.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU here; --device cpu tries the checks"
        )
    started_s, passed, failed = time.perf_counter(), [], {}
    with tempfile.TemporaryDirectory(prefix="mooncake-checks-") as folder:
        bench = Bench(Path(folder), asked.device)
        name = torch.cuda.get_device_name(bench.device) if bench.is_cuda else "CPU"
        kernels = {
            each: kernels if isinstance(kernels, str) else "works"
            for each, kernels in bench.kernels().items()
        }
        for check in CHECKS:
            print(f"{check.__name__.replace('_', ' ')} ...", file=sys.stderr, flush=True)
            try:
                check(bench)
                passed.append(check.__name__)
            except Exception as error:  # Catch all: the remaining checks still run
                traceback.print_exc()
                failed[check.__name__] = f"{type(error).__name__}: {error}"
    found = {
        "name": "gpu_engine_checks",
        "device": name,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started_s, 1),
        "kernels": kernels,
        "passed": passed,
        "failed": failed,
    }
    print(json.dumps(found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
