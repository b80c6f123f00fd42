"""The torch engine on one GPU, compared with the GPU's memory, products and bus.

    python -m bench.engine_gpu [--device cuda:0]

It needs torch, numpy, the checkout and some minutes. The model is a Llama-3-8B of random numbers,
bfloat16, made on the device. The rates to compare with are measured in the same run (reading
memory, a large product, copying from pinned memory):

    decode    a step of batch 1, 16 and 64 with 512 tokens of context: the bytes that must be read
              (every matrix once, the KV of every sequence) over its time
    prefill   8k tokens in chunks: the necessary products over its time; and once more with each
              layer's KV copied out to host memory
    load      the KV of a 32k prefix from host memory into pages
    ttft      32k tokens of which 95 % are cached in host memory, over computing all of them

Decode and prefill are measured in every way that works here. The targets are of the way that the
engine chooses, which the row `device` names; standard error has the reasons against the others.
`--shape tiny --device cpu` is a test of the script in seconds; its numbers mean nothing.

Not here: the engine beside transformers on a CPU (bench/engine).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from backends.engine.interface import Work
from backends.engine.model_config import ModelConfig, RopeConfig
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.decode_graph import CudaRecorder, Recorder
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers.feed_forward import DenseFeedForward
from backends.engine.torch.layers.grouped_attention import GroupedWeights
from backends.engine.torch.linear import Linear
from backends.engine.torch.rope import rope_table
from backends.engine.torch.torch_engine import TorchEngine
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import LayerWeights, Weights
from bench.engine.step_costs import layers_scalars, step_bytes
from loadtest.harness.result import Cell, Result, Target
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
    """The measured sizes, and the sizes of the probes of the device."""

    config: ModelConfig
    prefill_tokens: int
    prefix_tokens: int
    probed_bytes: int  # bytes that are read and copied to measure the device's rates
    probed_rows: int  # rows of the square matrices that are multiplied


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=inner,
        vocabulary_tokens=words,
        context_tokens_max=2 * PREFIX_TOKENS,
        norm_epsilon=1e-5,
        rope=RopeConfig(500_000.0),
        has_tied_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        eos_token_ids=(),
    )


WORKLOADS = {
    GpuModelShape.LLAMA_3_8B: GpuWorkload(
        llama(32, 4_096, 32, 8, 14_336, 128_256), PREFILL_TOKENS, PREFIX_TOKENS, 2**30, 8_192
    ),
    GpuModelShape.TINY: GpuWorkload(llama(2, 64, 4, 2, 128, 256), 512, 1_024, 2**20, 128),
}


def random_weights(config: ModelConfig, device: torch.device, scalar: torch.dtype) -> Weights:
    """Weights of numbers that keep activations finite."""

    def made(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=scalar, device=device).mul_(columns**-0.5)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(made(rows, columns))

    hidden, inner = config.hidden, config.intermediate
    query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = [
        LayerWeights(
            attention=GroupedWeights(linear(query_rows + 2 * kv_rows, hidden)),
            output=linear(hidden, query_rows),
            feed_forward=DenseFeedForward(linear(2 * inner, hidden), linear(hidden, inner)),
        )
        for _ in range(config.layers)
    ]
    norm = torch.ones(hidden, dtype=scalar, device=device)
    words = config.vocabulary_tokens
    return Weights(made(words, hidden), layers, norm, linear(words, hidden))


@dataclass(frozen=True, slots=True)
class Way:
    attention: str  # the kernel that reads the pages, or "gathered"
    kernels: PagedKernels | None
    is_recorded: bool

    @property
    def cells(self) -> dict[str, Cell]:
        return {"attention": self.attention, "recorded": self.is_recorded}


class DeviceEngine:
    """The engine over random weights, its pages mirrored in host memory as on any GPU."""

    def __init__(self, config: ModelConfig, device: torch.device, tokens_max: int) -> None:
        scalar = torch.bfloat16
        self.config, self.device = config, device
        self.layout = config.layout(DTYPE, BLOCK_TOKENS)
        self._memory = KvMemory(
            self.layout, blocks_touched(tokens_max, BLOCK_TOKENS), device, is_mirrored=True
        )
        self._rope = rope_table(
            config.rope, config.head_dim, config.context_tokens_max, scalar, device
        )
        self._weights = random_weights(config, device, scalar)
        self._memory.pool.normal_()  # for steps over pages that no prompt has filled
        self.ways = self._ways()
        self.take(self.ways[0])

    def _ways(self) -> list[Way]:
        """All ways; the first is the one that the engine chooses."""
        kernels: list[tuple[str, PagedKernels | None]] = []
        if self.device.type == "cuda":
            heads = self.config.heads
            for name, make in paged_kernels.known(self._memory, heads):
                [(found, problem)] = paged_kernels.tried([(name, make)], self._memory, heads)
                progress(problem or f"{found.name if found else name} works")
                if found is not None:
                    kernels.append((found.name, found))
        kernels.append(("gathered", None))
        return [
            Way(name, found, is_recorded)
            for name, found in kernels
            for is_recorded in (True, False)
        ]

    def take(self, way: Way) -> None:
        is_cuda = self.device.type == "cuda"
        recorder = (
            (CudaRecorder(self.device) if is_cuda else Recorder()) if way.is_recorded else None
        )
        transformer = Transformer(self.config, self._weights, self._memory, self._rope, way.kernels)
        self.engine = TorchEngine(transformer, "random", recorder=recorder)

    def pages(self, count: int, first: int = 0) -> list[int]:
        """Pages without an owner: nothing else runs during a measurement."""
        assert first + count <= self.engine.pages.pages_max, (first, count)
        return list(range(first, first + count))

    def decode(self, batch: int, context_tokens: int) -> None:
        need = blocks_touched(context_tokens, BLOCK_TOKENS)
        works = [
            Work([5 + index], context_tokens - 1, self.pages(need, index * need))
            for index in range(batch)
        ]
        self.engine.forward(works)

    def prefill(
        self, start: int, end: int, chunk_tokens: int, on_layer: Callable[[int], None] | None = None
    ) -> None:
        pages = self.pages(blocks_touched(end, BLOCK_TOKENS))
        words = self.config.vocabulary_tokens
        for at in range(start, end, chunk_tokens):
            ids = [(token * 7_919) % words for token in range(at, min(at + chunk_tokens, end))]
            self.engine.forward([Work(ids, at, pages)], on_layer)

    def load(self, tokens: int) -> int:
        """Load the KV of that many tokens from host memory; returns its bytes."""
        pages = self.pages(tokens // BLOCK_TOKENS)
        self.engine.import_pages(pages)
        return len(pages) * self.layout.block_bytes

    def prompt_flops(self, tokens: int) -> float:
        """Products with matrices, and of queries with the keys and values that each may see."""
        config = self.config
        attention = 2 * tokens**2 * config.heads * config.head_dim * config.layers
        return 2.0 * layers_scalars(config) * tokens + attention


@dataclass(frozen=True, slots=True)
class DeviceRates:
    read_bytes_per_s: float
    flops_per_s: float
    host_to_device_bytes_per_s: float


def seconds(action: Callable[[], object], device: torch.device, times: int) -> float:
    """Median seconds, each until the device has finished."""
    found = []
    for _ in range(WARM_TIMES + times):
        started_s = time.perf_counter()
        action()
        wait(device)
        found.append(time.perf_counter() - started_s)
    return statistics.median(found[WARM_TIMES:])


def readable(ratio: float) -> float:
    """Three digits, also of a ratio near 0."""
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


@dataclass(slots=True)
class Findings:
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def target(self, name: str, value: float, op: str, goal: float) -> None:
        self.targets.append(Target(name, readable(value), op, goal))


def measure(load: GpuWorkload, device: torch.device, chunk: int, times: int) -> Findings:
    found, rates = Findings(), device_rates(load, device, times)
    tokens_max = max(load.prefix_tokens, max(BATCHES) * DECODE_CONTEXT_TOKENS)
    own = DeviceEngine(load.config, device, tokens_max)
    found.rows.append(
        {
            "what": "device",
            "name": name_of(device),
            "torch": torch.__version__,
            **own.ways[0].cells,
            "read_gb_per_s": round(rates.read_bytes_per_s / 1e9, 1),
            "tflops": round(rates.flops_per_s / 1e12, 2),
            "host_to_device_gb_per_s": round(rates.host_to_device_bytes_per_s / 1e9, 2),
        }
    )
    for way in own.ways:
        progress(f"decode, {way.attention}, {'recorded' if way.is_recorded else 'launched'}")
        own.take(way)
        measure_decode(found, own, way, rates, times)
    for way in own.ways:
        if not way.is_recorded:  # prompts are never recorded
            progress(f"prefill, {way.attention}")
            own.take(way)
            measure_prefill(found, own, way, load, rates, chunk, times)
    own.take(own.ways[0])
    progress("prefix")
    measure_prefix(found, own, load, rates, chunk, times)
    return found


def measure_decode(
    found: Findings, own: DeviceEngine, way: Way, rates: DeviceRates, times: int
) -> None:
    for batch in BATCHES:
        step_s = seconds(
            lambda batch=batch: own.decode(batch, DECODE_CONTEXT_TOKENS),  # type: ignore[misc]
            own.device,
            times,
        )
        least_bytes = step_bytes(own.config, own.layout, batch, DECODE_CONTEXT_TOKENS)
        share = least_bytes / step_s / rates.read_bytes_per_s
        found.rows.append(
            {
                "what": "decode",
                **way.cells,
                "batch": batch,
                "context_tokens": DECODE_CONTEXT_TOKENS,
                "ms": round(step_s * 1e3, 3),
                "share": readable(share),
            }
        )
        if way == own.ways[0]:
            found.target(f"decode_{batch}_over_memory_bandwidth", share, ">=", DECODE_GOAL)


def measure_prefill(
    found: Findings,
    own: DeviceEngine,
    way: Way,
    load: GpuWorkload,
    rates: DeviceRates,
    chunk: int,
    times: int,
) -> None:
    tokens, few = load.prefill_tokens, max(3, times // 4)
    for is_out in (False, True):
        on_layer = _unread if is_out else None
        prefill_s = seconds(
            lambda on_layer=on_layer: own.prefill(0, tokens, chunk, on_layer),  # type: ignore[misc]
            own.device,
            few,
        )
        share = own.prompt_flops(tokens) / prefill_s / rates.flops_per_s
        found.rows.append(
            {
                "what": "prefill",
                "attention": way.attention,
                "tokens": tokens,
                "chunk_tokens": chunk,
                "kv_copied_out": is_out,
                "ms": round(prefill_s * 1e3, 1),
                "share": readable(share),
            }
        )
        if way.kernels is own.ways[0].kernels and not is_out:
            found.target("prefill_8k_over_matrix_rate", share, ">=", PREFILL_GOAL)


def _unread(layer: int) -> None:
    """Stands for a reader of a layer's KV in host memory."""


def measure_prefix(
    found: Findings,
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
    found.rows += [
        {"what": "load", "tokens": tokens, "ms": round(load_s * 1e3, 2), "share": readable(share)},
        {"what": "ttft", "tokens": tokens, "cached_tokens": 0, "ms": round(whole_s * 1e3, 1)},
        {"what": "ttft", "tokens": tokens, "cached_tokens": cached, "ms": round(cached_s * 1e3, 1)},
    ]
    found.target("load_32k_over_host_to_device", share, ">=", LOAD_GOAL)
    found.target("ttft_32k_cached_over_whole", cached_s / whole_s, "<=", TTFT_GOAL)


def progress(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def checked(name: str) -> torch.device:
    """The device; exits when it is missing."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"cannot measure: torch {torch.__version__} sees no GPU here; --shape tiny --device "
            "cpu tries the script"
        )
    return device


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the torch engine on a GPU; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_gpu", description=main.__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu.")
    parser.add_argument(
        "--shape",
        default=GpuModelShape.LLAMA_3_8B.value,
        help="Size of the model.",
        choices=[shape.value for shape in GpuModelShape],
    )
    parser.add_argument("--chunk-tokens", type=int, default=8_192, help="Tokens of a prefill step.")
    parser.add_argument("--times", type=int, default=20, help="Repetitions of a median.")
    asked = parser.parse_args(arguments)
    started_s = time.perf_counter()
    workload = WORKLOADS[GpuModelShape(asked.shape)]
    found = measure(workload, checked(asked.device), asked.chunk_tokens, asked.times)
    Result("engine_gpu", time.perf_counter() - started_s, found.rows, found.targets).print()


if __name__ == "__main__":
    main()
