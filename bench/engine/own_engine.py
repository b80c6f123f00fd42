"""The torch engine as the benchmark runs it: prompts in chunks, decoding, its linear layers alone.

Not here: the comparisons (__main__.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.interface import Work
from backends.engine.model_config import read_model_config
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch import onednn
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.layers.feed_forward import DenseFeedForward
from backends.engine.torch.layers.grouped_attention import GroupedWeights
from backends.engine.torch.rope import rope_table
from backends.engine.torch.torch_engine import TorchEngine
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import Weights, load_weights
from bench.engine.step_costs import step_bytes
from bench.harness.generate import generate_tokens
from loadtest.harness.benchmark import median_of

CHUNK_TOKENS = 512  # default of a prefill worker
READ_BYTES_MAX = 256 * 2**20  # larger than any CPU cache: reading more has the same rate


class OwnEngine:
    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        block_tokens: int,
        tokens_max: int,
        seed: int,
        kv_dtype: str = "auto",
    ) -> None:
        config, cpu = read_model_config(checkpoint), torch.device("cpu")
        scalar = TORCH_DTYPES[dtype]
        layout = config.layout(config.kv_dtype(kv_dtype, dtype), block_tokens)
        memory = KvMemory(layout, -(-tokens_max // block_tokens), cpu)
        self.weights: Weights = load_weights(
            Checkpoint.open(checkpoint), config, scalar, cpu, None, layout.dtype == "fp8"
        )
        positions = config.context_tokens_max
        rope = rope_table(config.rope, config.rotary_dim, positions, scalar, cpu)
        transformer = Transformer(config, self.weights, memory, rope)
        self.engine = TorchEngine(transformer, "bench")
        self._config, self._dtype, self._activations = config, scalar, rope.dtype
        # Numbers like a model's own, because steps are timed over pages that no prompt has filled.
        memory.pool.copy_(
            torch.randn(1 << 20)
            .to(memory.pool.dtype)
            .repeat(-(-memory.pool.numel() // (1 << 20)))[: memory.pool.numel()]
            .view_as(memory.pool)
        )
        self._rng = np.random.default_rng(seed)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        found = self._rng.integers(3, self._config.vocabulary_tokens, (count, tokens))
        return [[int(token) for token in row] for row in found]

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """A prompt in chunks, as a prefill worker computes it."""
        pages = self._pages(len(prompt))
        started_s = time.perf_counter()
        for start in range(0, len(prompt), CHUNK_TOKENS):
            self.engine.forward([Work(prompt[start : start + CHUNK_TOKENS], start, pages)])
        return time.perf_counter() - started_s

    def generate_s(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Seconds from token to token, sampling included, once all prompts are computed."""
        params = SamplingParams(max_tokens=steps + len(prompts))
        times_s: dict[int, list[float]] = {index: [] for index in range(len(prompts))}
        for index, _ in generate_tokens(self.engine, prompts, params, CHUNK_TOKENS):
            times_s[index].append(time.perf_counter())
        last = max(times_s.values(), key=lambda times: times[0])
        return statistics.median(np.diff(last[1 : steps + 1]))

    def step_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """Median of decode steps of `batch` sequences with this context."""
        need = -(-context_tokens // self.engine.layout.block_tokens)
        pages = self._pages(batch * need * self.engine.layout.block_tokens)
        works = [
            Work([5 + index], context_tokens - 1, pages[index * need : (index + 1) * need])
            for index in range(batch)
        ]
        return median_of(lambda: self.engine.forward(works), steps)

    @torch.inference_mode()
    def linears_s(self, rows: int, last_rows: int, times: int) -> float:
        """Median seconds of all linear layers of a step alone.

        After K and V, the last layer continues with `last_rows` only, as in the engine.
        """
        config, weights = self._config, self.weights
        assert weights.logits is not None
        logits = weights.logits
        widths = (config.hidden, config.heads * config.head_dim, config.intermediate)
        inputs = {
            (count, width): torch.randn(count, width).to(self._activations)
            for count in {rows, last_rows}
            for width in widths
        }

        def run() -> None:
            for index, layer in enumerate(weights.layers):
                assert isinstance(layer.attention, GroupedWeights), "latent attention"
                layer.attention.qkv(inputs[rows, widths[0]])
                count = rows if index < config.layers - 1 else last_rows
                layer.output(inputs[count, widths[1]])
                feed_forward = layer.feed_forward
                assert isinstance(feed_forward, DenseFeedForward), "a model of experts"
                feed_forward.gate_up(inputs[count, widths[0]])
                feed_forward.down(inputs[count, widths[2]])
            logits(inputs[last_rows, widths[0]])

        return median_of(run, times)

    def step_bytes(self, batch: int, context_tokens: int) -> int:
        return step_bytes(
            self._config, self.engine.layout, batch, context_tokens, self._dtype.itemsize
        )

    def _pages(self, tokens: int) -> list[int]:
        """Pages without an owner: nothing else runs during a measurement."""
        need = -(-tokens // self.engine.layout.block_tokens)
        assert need <= self.engine.pages.pages_max, (need, self.engine.pages.pages_max)
        return list(range(need))


@torch.inference_mode()
def bytes_per_s(size_bytes: int, times: int) -> float:
    """How fast these threads read that many bytes repeatedly: the better of two ways.

    A sum, and a product of one row with a packed matrix (both read everything once).
    """
    size_bytes = min(size_bytes, READ_BYTES_MAX)
    numbers = torch.ones(size_bytes // 4)
    seconds = [median_of(lambda: numbers.sum(), times)]
    columns = 4_096
    matrix = torch.ones(size_bytes // 2 // columns, columns, dtype=torch.bfloat16)
    if onednn.serves(matrix):
        packed, row = onednn.pack(matrix), torch.ones(1, columns, dtype=torch.bfloat16)
        seconds.append(median_of(lambda: onednn.product(row, packed), times))
    return size_bytes / min(seconds)
