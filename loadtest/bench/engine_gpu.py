"""The torch engine on one GPU beside what the GPU can do: its memory, its products, its bus.

    python -m loadtest.bench.engine_gpu [--device cuda:0]

A Llama-3-8B of random numbers, bfloat16, made on the device, so nothing is read from a disk or a
network. Beside what the same run measures of the device (reading memory, a large product, copying
from pinned memory):

    decode    a step of batch 1, 16 and 64 with 512 tokens of context: the bytes that it cannot but
              read (every matrix once, the KV of every sequence) over its time
    prefill   8k tokens in chunks: the products that it cannot but do over its time
    load      the KV of a 32k prefix from host memory into pages
    ttft      32k tokens of which 95 % are cached in host memory, over computing all of them

`--shape tiny --device cpu` runs the same on a CPU in seconds, to see that the script works; its
numbers say nothing.

Not here: transformers beside the engine, on a CPU (bench/engine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
import typer

from backends.engine.interface import Work
from backends.engine.model_config import ModelConfig, RopeConfig
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.linear import GatedLinear, Linear
from backends.engine.torch.rope import rope_table
from backends.engine.torch.torch_engine import TorchEngine
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import LayerWeights, Weights
from loadtest.bench.engine.own_engine import layers_scalars, step_bytes
from loadtest.harness.benchmark import BenchmarkRun, benchmark, console, median_of
from loadtest.harness.result import Target
from loadtest.harness.server import CannotMeasure
from mooncake_store.layout import blocks_touched

DTYPE, BLOCK_TOKENS = "bfloat16", 256
DECODE_CONTEXT_TOKENS, BATCHES = 512, (1, 16, 64)
PREFILL_TOKENS, PREFIX_TOKENS, CACHED_SHARE = 8_192, 32_768, 0.95
DECODE_GOAL, PREFILL_GOAL, LOAD_GOAL, TTFT_GOAL = 0.7, 0.55, 0.8, 0.15
WARM_TIMES = 3


class GpuModelShape(str, Enum):
    LLAMA_3_8B = "llama-3-8b"
    TINY = "tiny"


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """What is measured, and of how much of the device."""

    config: ModelConfig
    prefill_tokens: int
    prefix_tokens: int
    probed_bytes: int  # that are read and copied to learn the device's rates
    probed_rows: int  # of the square matrices that are multiplied


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int
) -> ModelConfig:
    return ModelConfig(
        family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, intermediate=inner, vocabulary_tokens=words,
        context_tokens_max=2 * PREFIX_TOKENS, norm_epsilon=1e-5, rope=RopeConfig(500_000.0),
        has_tied_embeddings=False, has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False,
        has_qk_norm=False, eos_token_ids=(),
    )  # fmt: skip


WORKLOADS = {
    GpuModelShape.LLAMA_3_8B: GpuWorkload(
        llama(32, 4_096, 32, 8, 14_336, 128_256), PREFILL_TOKENS, PREFIX_TOKENS, 2**30, 8_192
    ),
    GpuModelShape.TINY: GpuWorkload(llama(2, 64, 4, 2, 128, 256), 512, 1_024, 2**20, 128),
}


def random_weights(config: ModelConfig, device: torch.device, scalar: torch.dtype) -> Weights:
    """Of numbers that keep activations finite."""

    def made(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=scalar, device=device).mul_(columns**-0.5)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(made(rows, columns))

    hidden, inner = config.hidden, config.intermediate
    query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = [
        LayerWeights(
            qkv=linear(query_rows + 2 * kv_rows, hidden), qk_norm=None,
            output=linear(hidden, query_rows), gate_up=GatedLinear(made(2 * inner, hidden)),
            down=linear(hidden, inner),
        )
        for _ in range(config.layers)
    ]  # fmt: skip
    norm = torch.ones(hidden, dtype=scalar, device=device)
    words = config.vocabulary_tokens
    return Weights(made(words, hidden), layers, norm, linear(words, hidden))


class DeviceEngine:
    """The engine over random weights, its pages mirrored in host memory as on any GPU."""

    def __init__(self, config: ModelConfig, device: torch.device, tokens_max: int) -> None:
        scalar = torch.bfloat16
        self.config, self.device = config, device
        self.layout = config.layout(DTYPE, BLOCK_TOKENS)
        memory = KvMemory(
            self.layout, blocks_touched(tokens_max, BLOCK_TOKENS), device, is_mirrored=True
        )
        positions = config.context_tokens_max
        rope = rope_table(config.rope, config.head_dim, positions, scalar, device)
        weights = random_weights(config, device, scalar)
        transformer = Transformer(config, weights, memory, rope)
        self.engine = TorchEngine(config, self.layout, memory, transformer, "random", positions)
        memory.pool.normal_()  # of steps that are timed over pages that no prompt has filled

    def pages(self, count: int, first: int = 0) -> list[int]:
        """Of nobody: nothing runs beside a measurement."""
        assert first + count <= self.engine.pages.pages_max, (first, count)
        return list(range(first, first + count))

    def decode(self, batch: int, context_tokens: int) -> None:
        need = blocks_touched(context_tokens, BLOCK_TOKENS)
        works = [
            Work([5 + index], context_tokens - 1, self.pages(need, index * need))
            for index in range(batch)
        ]
        self.engine.forward(works)

    def prefill(self, start: int, end: int, chunk_tokens: int) -> None:
        pages = self.pages(blocks_touched(end, BLOCK_TOKENS))
        words = self.config.vocabulary_tokens
        for at in range(start, end, chunk_tokens):
            ids = [(token * 7_919) % words for token in range(at, min(at + chunk_tokens, end))]
            self.engine.forward([Work(ids, at, pages)])

    def load(self, tokens: int) -> int:
        """KV of so many tokens from host memory; how many bytes that is."""
        pages = self.pages(tokens // BLOCK_TOKENS)
        self.engine.import_pages(pages)
        return len(pages) * self.layout.block_bytes

    def prompt_flops(self, tokens: int) -> float:
        """Products with matrices, and of queries with keys and values that each may see."""
        config = self.config
        attention = 2 * tokens**2 * config.heads * config.head_dim * config.layers
        return 2.0 * layers_scalars(config) * tokens + attention


@dataclass(frozen=True, slots=True)
class DeviceRates:
    read_bytes_per_s: float
    flops_per_s: float
    host_to_device_bytes_per_s: float


def seconds(action: Callable[[], object], device: torch.device, times: int) -> float:
    """Median, each until the device has done it."""

    def done() -> None:
        action()
        wait(device)

    for _ in range(WARM_TIMES):
        done()
    return median_of(done, times)


def readable(ratio: float) -> float:
    """Three digits, also of one that is nearly nothing."""
    return float(f"{ratio:.3g}")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def device_rates(load: GpuWorkload, device: torch.device, times: int) -> DeviceRates:
    numbers = torch.ones(load.probed_bytes // 4, device=device)
    read_s = seconds(numbers.sum, device, times)
    rows = load.probed_rows
    matrix = torch.randn(rows, rows, dtype=torch.bfloat16, device=device)
    product_s = seconds(lambda: matrix @ matrix, device, times)
    host = torch.ones(load.probed_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(host, device=device)
    copy_s = seconds(lambda: target.copy_(host, non_blocking=True), device, times)
    return DeviceRates(
        load.probed_bytes / read_s, 2.0 * rows**3 / product_s, load.probed_bytes / copy_s
    )


def measure(
    run: BenchmarkRun, load: GpuWorkload, device: torch.device, chunk: int, times: int
) -> None:
    with console.status("the device's own rates ..."):
        rates = device_rates(load, device, times)
    run.rows.append({
        "what": "device", "name": name_of(device),
        "read_gb_per_s": round(rates.read_bytes_per_s / 1e9, 1),
        "tflops": round(rates.flops_per_s / 1e12, 2),
        "host_to_device_gb_per_s": round(rates.host_to_device_bytes_per_s / 1e9, 2),
    })  # fmt: skip
    with console.status("the model ..."):
        tokens_max = max(load.prefix_tokens, max(BATCHES) * DECODE_CONTEXT_TOKENS)
        own = DeviceEngine(load.config, device, tokens_max)
    for batch in BATCHES:
        step_s = seconds(lambda: own.decode(batch, DECODE_CONTEXT_TOKENS), device, times)  # noqa: B023
        share = (
            step_bytes(own.config, own.layout, batch, DECODE_CONTEXT_TOKENS)
            / step_s
            / rates.read_bytes_per_s
        )
        run.rows.append({
            "what": "decode", "batch": batch, "context_tokens": DECODE_CONTEXT_TOKENS,
            "ms": round(step_s * 1e3, 3), "share": readable(share),
        })  # fmt: skip
        name = f"decode_{batch}_over_memory_bandwidth"
        run.targets.append(Target(name, readable(share), ">=", DECODE_GOAL))
    prefill_s = seconds(lambda: own.prefill(0, load.prefill_tokens, chunk), device, times)
    share = own.prompt_flops(load.prefill_tokens) / prefill_s / rates.flops_per_s
    run.rows.append({
        "what": "prefill", "tokens": load.prefill_tokens, "chunk_tokens": chunk,
        "ms": round(prefill_s * 1e3, 1), "share": readable(share),
    })  # fmt: skip
    run.targets.append(Target("prefill_8k_over_matrix_rate", readable(share), ">=", PREFILL_GOAL))
    measure_prefix(run, own, load, rates, chunk, times)


def measure_prefix(
    run: BenchmarkRun,
    own: DeviceEngine,
    load: GpuWorkload,
    rates: DeviceRates,
    chunk: int,
    times: int,
) -> None:
    tokens, device = load.prefix_tokens, own.device
    load_s = seconds(lambda: own.load(tokens), device, times)
    share = own.load(tokens) / load_s / rates.host_to_device_bytes_per_s
    cached = int(tokens * CACHED_SHARE) // BLOCK_TOKENS * BLOCK_TOKENS

    def with_cache() -> None:
        own.load(cached)
        own.prefill(cached, tokens, chunk)

    few = max(1, times // 4)  # these take seconds
    whole_s = seconds(lambda: own.prefill(0, tokens, chunk), device, few)
    cached_s = seconds(with_cache, device, few)
    run.rows += [
        {"what": "load", "tokens": tokens, "ms": round(load_s * 1e3, 2), "share": readable(share)},
        {"what": "ttft", "tokens": tokens, "cached_tokens": 0, "ms": round(whole_s * 1e3, 1)},
        {"what": "ttft", "tokens": tokens, "cached_tokens": cached, "ms": round(cached_s * 1e3, 1)},
    ]
    run.targets += [
        Target("load_32k_over_host_to_device", readable(share), ">=", LOAD_GOAL),
        Target("ttft_32k_cached_over_whole", readable(cached_s / whole_s), "<=", TTFT_GOAL),
    ]


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def checked(name: str) -> torch.device:
    """CannotMeasure where it is not there."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotMeasure(
            f"torch {torch.__version__} sees no GPU here; --shape tiny --device cpu tries the "
            "script"
        )
    return device


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu.")] = "cuda",
    shape: Annotated[GpuModelShape, typer.Option(help="Of the model.")] = GpuModelShape.LLAMA_3_8B,
    chunk_tokens: Annotated[int, typer.Option(min=256, help="Of prefill, in a step.")] = 8_192,
    times: Annotated[int, typer.Option(min=3, help="Medians are of so many.")] = 20,
) -> None:
    """Measure the torch engine on a GPU; the last line is JSON."""
    with benchmark("engine_gpu") as run:
        measure(run, WORKLOADS[shape], checked(device), chunk_tokens, times)


if __name__ == "__main__":
    typer.run(main)
