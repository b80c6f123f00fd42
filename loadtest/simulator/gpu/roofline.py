"""Seconds from published numbers: what the hardware can do, what the model needs, how well it does.

    prefill   the greater of computing and reading:
              FLOP = layers * (4 d * (query, key) pairs + 22 d^2 * tokens), Eq. 1 of the Mooncake
              paper (FAST'25) with causal attention: half of its n^2 pairs;  at G * MFU
    decode    overhead + (weights + KV of the batch) / (bandwidth * MBU) + per sequence
    mixed     one pass over weights and KV that also computes the chunks: the greater of the two,
              plus the decode overheads

Where the constants come from:

- 8x A800-SXM4-80GB (NVIDIA data sheet, the A100 with slower NVLink): 312 TFLOP/s BF16 dense and
  2,039 GB/s of HBM2e each, 80 GB. The paper's own G = 8 x 312 TFLOP/s.
- LLaMA3-70B (its config.json): 80 layers, d = 8,192, 64 heads, 8 KV heads of 128, bfloat16;
  70.6 G parameters. KV: 80 * 2 * 8 * 128 * 2 B = 320 KiB a token, as in the paper.
- MFU 0.5: with it the prefill times of Fig 14 (8k to 128k tokens) come out within 15 %.
- MBU 0.6 and 11.5 ms of overhead a step: 30 ms for one sequence, 26 of them without it.
- 3 ms per sequence and step. A pure roofline has no such cost; the paper's points have one. It is
  calibrated on Fig 15 (TBT from 31 to 58 ms as decode nodes get fewer: 2.9 and 3.3 ms, if those are
  12 and 4 nodes) and used everywhere; what it gives for Fig 1 (median 75 ms) is not recorded.

One set for everything: no experiment changes any of them. Not here: measured coefficients
(table.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.simulator.gpu.steps import Span, Tokens

PAIR_FLOP = 4  # per layer, unit of d and (query, key) pair: Q K^T and P V
TOKEN_FLOP = 22  # per layer, d^2 and token: the paper's b


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node's accelerators together."""

    name: str
    flop_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    usable_share: float  # of memory, for weights and KV: vLLM's gpu_memory_utilization


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: int
    width: int  # d
    kv_heads: int
    head_dim: int
    scalar_bytes: int
    parameters: float

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.scalar_bytes

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.scalar_bytes


@dataclass(frozen=True, slots=True)
class Efficiency:
    compute: float  # MFU
    bandwidth: float  # MBU
    step_overhead_s: float
    sequence_s: float


A800_X8 = Hardware("8x A800-SXM4-80GB", 8 * 312e12, 8 * 2.039e12, 8 * 80 * 10**9, 0.9)
LLAMA3_70B = Model("LLaMA3-70B", 80, 8_192, 8, 128, 2, 70.6e9)
AS_MEASURED = Efficiency(compute=0.5, bandwidth=0.6, step_overhead_s=0.0115, sequence_s=0.003)


class Roofline:
    """A GpuModel (steps.py) of one node."""

    def __init__(
        self,
        hardware: Hardware = A800_X8,
        model: Model = LLAMA3_70B,
        efficiency: Efficiency = AS_MEASURED,
    ) -> None:
        flop_per_s = hardware.flop_per_s * efficiency.compute
        bytes_per_s = hardware.memory_bytes_per_s * efficiency.bandwidth
        self.token_bytes = model.token_bytes
        self.pages_bytes = int(hardware.memory_bytes * hardware.usable_share - model.weight_bytes)
        assert self.pages_bytes > 0, f"{model.name} does not fit into {hardware.name}"
        self._pair_s = model.layers * PAIR_FLOP * model.width / flop_per_s
        self._token_s = model.layers * TOKEN_FLOP * model.width**2 / flop_per_s
        self._weights_s = model.weight_bytes / bytes_per_s
        self._read_token_s = model.token_bytes / bytes_per_s
        self._overhead_s = efficiency.step_overhead_s
        self._sequence_s = efficiency.sequence_s

    def _compute_s(self, spans: Sequence[Span]) -> float:
        pair_s, token_s = self._pair_s, self._token_s
        return sum(new * (token_s + pair_s * (there + new / 2)) for there, new in spans)

    def prefill_s(self, spans: Sequence[Span]) -> float:
        read = sum(there + new for there, new in spans)
        return max(self._compute_s(spans), self._weights_s + read * self._read_token_s)

    def decode_s(self, sequences: int, context_tokens: Tokens) -> Tokens:
        fixed_s = self._overhead_s + self._weights_s + self._sequence_s * sequences
        return fixed_s + self._read_token_s * context_tokens

    def mixed_s(self, spans: Sequence[Span], sequences: int, context_tokens: float) -> float:
        if not sequences:
            return self.prefill_s(spans)
        read = context_tokens + sum(there + new for there, new in spans)
        compute_s = self._compute_s(spans) + self._token_s * sequences
        pass_s = max(compute_s, self._weights_s + self._read_token_s * read)
        return self._overhead_s + self._sequence_s * sequences + pass_s
