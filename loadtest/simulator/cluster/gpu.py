"""How long a GPU takes for a step: from published numbers or measured ones.

A GPU model gives the seconds of a prefill step, of a decode step and of a mixed step. A decode step
must be linear in the context, so that thousands of steps can be computed at once. `calibrate`
measures such a model as `mooncake profile` measures a real worker. So the conductor has the same
input as with a real worker: coefficients fitted to samples, with their error.

Roofline: the peak of the hardware, the need of the model, and the share of the peak that is
reached.

    prefill   the greater of computing and reading:
              FLOP = layers * (4 d * (query, key) pairs + 22 d^2 * tokens), Eq. 1 of the Mooncake
              paper (FAST'25) with causal attention: half of its n^2 pairs;  at G * MFU
    decode    overhead + (weights + KV of the batch) / (bandwidth * MBU) + per sequence
    mixed     one pass over weights and KV that also computes the chunks: the greater of the two,
              plus the decode overheads

Where the constants come from (data sheets of nodes and models: hardware.py):

- 8x A800 and LLaMA3-70B are the paper's, and every experiment runs on them. G is 8 x 312 TFLOP/s.
  A token has 80 * 2 * 8 * 128 * 2 B = 320 KiB of KV.
- MFU 0.5: the prefill times of Fig 14 (8k to 128k tokens) come out within 15 %.
- MBU 0.6 and 11.5 ms of overhead a step: 30 ms for one sequence, 26 of them without it.
- 3 ms per sequence and step. A pure roofline has no such cost; the paper's points have one. It
  is calibrated on Fig 15: TBT rises from 31 to 58 ms with fewer decode nodes. If those are 12 and 4
  nodes, it comes out at 2.9 and 3.3 ms. Its result for Fig 1 (median 75 ms) is not recorded.
- For another model, 22 d^2 becomes the paper's count for each weight of LLaMA3-70B's layers, and
  4 d the width of its attention. The overheads of a step are taken to be those of its layers, so
  they shrink with them; that they are the same on other hardware is a conservative guess.

All experiments use this one set of constants.

MeasuredWorker: the coefficients that a worker publishes, and `mooncake profile` writes.

    prefill   base + per_token * new + per_token_pair * new * (cached + new / 2)
    decode    base + per_sequence * sequences + per_context_token * context

`base` of a prefill is paid once a step, however many chunks share it. A mixed step is a prefill and
a decode step in one: the greater of the two bases is paid. Not here: fitting (conductor/estimates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    Fit,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from loadtest.simulator.cluster.hardware import A800, LLAMA_3_70B, GpuNode, LlmModel

Span = tuple[int, int]  # one chunk of one prompt: (tokens before it, new tokens)
Tokens = TypeVar("Tokens", float, npt.NDArray[np.float64])

PROMPTS = (2_048, 8_192, 32_768, 65_536, 131_072)
PREFIX_SHARES = (0.0, 0.5, 0.9)
BATCHES = (1, 4, 16, 64)
CONTEXTS = (1_024, 8_192, 32_768)

PAIR_FLOP = 4  # per layer, unit of d and (query, key) pair: Q K^T and P V
TOKEN_FLOP = 22  # per layer, d^2 and token: the paper's b

USABLE_SHARE = 0.9  # of memory, for weights and KV: vLLM's gpu_memory_utilization
# Shares of the peak and overheads reached by 8x A800 with LLaMA3-70B.
MFU, MBU, STEP_OVERHEAD_S, SEQUENCE_S = 0.5, 0.6, 0.0115, 0.003


class GpuModel(Protocol):
    @property
    def token_bytes(self) -> int: ...  # KV of one token
    @property
    def pages_bytes(self) -> int: ...  # bytes of memory left for KV after weights and buffers
    @property
    def hidden_bytes(self) -> int: ...  # hidden-state bytes of one token between two layers

    def prefill_s(self, spans: Sequence[Span]) -> float:
        """One step that computes these chunks."""
        ...

    def decode_s(self, sequences: int, context_tokens: Tokens) -> Tokens:
        """One step of `sequences` whose contexts add up to `context_tokens`."""
        ...

    def mixed_s(self, spans: Sequence[Span], sequences: int, context_tokens: float) -> float:
        """One step of a coupled engine: chunks of prompts and decoding sequences together."""
        ...


@dataclass(frozen=True, slots=True)
class Calibration:
    prefill: Fit[PrefillEstimate]
    decode: Fit[DecodeEstimate]


def calibrate(gpu: GpuModel, chunk_tokens: int) -> Calibration:
    """The values that a worker with this GPU would measure when it starts."""
    prefills = []
    for prompt in PROMPTS:
        for share in PREFIX_SHARES:
            prefix = int(prompt * share)
            seconds = prompt_s(gpu, prefix, prompt, chunk_tokens)
            prefills.append(PrefillSample(prompt - prefix, prefix, seconds))
    decodes = [
        DecodeSample(batch, batch * context, gpu.decode_s(batch, float(batch * context)))
        for batch in BATCHES
        for context in CONTEXTS
    ]
    return Calibration(fit_prefill(prefills), fit_decode(decodes))


def prompt_s(gpu: GpuModel, prefix_tokens: int, prompt_tokens: int, chunk_tokens: int) -> float:
    """Seconds of one prompt on an idle worker, in steps of at most `chunk_tokens`."""
    starts = range(prefix_tokens, prompt_tokens, chunk_tokens)
    return sum(gpu.prefill_s([(at, min(chunk_tokens, prompt_tokens - at))]) for at in starts)


class Roofline:
    """A GpuModel of one node; by default the paper's."""

    def __init__(self, node: GpuNode = A800, model: LlmModel = LLAMA_3_70B) -> None:
        flop_per_s, bytes_per_s = node.flop_per_s * MFU, node.memory_bytes_per_s * MBU
        self.token_bytes = model.token_bytes
        self.hidden_bytes = model.width * model.scalar_bytes
        self.pages_bytes = int(node.memory_bytes * USABLE_SHARE - model.weight_bytes)
        token_flop = TOKEN_FLOP * LLAMA_3_70B.width**2 / LLAMA_3_70B.layer_weights
        self._pair_s = model.layers * PAIR_FLOP * model.attention_width / flop_per_s
        self._token_s = model.layers * (token_flop * model.layer_weights) / flop_per_s
        self._weights_s = model.weight_bytes / bytes_per_s
        depth = model.layers / LLAMA_3_70B.layers
        self._overhead_s, self._sequence_s = STEP_OVERHEAD_S * depth, SEQUENCE_S * depth
        self._read_token_s = self.token_bytes / bytes_per_s

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


@dataclass(frozen=True)
class MeasuredWorker:
    """A GpuModel of one worker, from the coefficients of WorkerInfo. Its repr names a run, so every
    field is shown."""

    prefill_coefficients: tuple[float, ...]
    decode_coefficients: tuple[float, ...]
    token_bytes: int
    pages_bytes: int
    hidden_bytes: int = 0  # used in pipeline groups only

    @cached_property
    def _prefill(self) -> PrefillEstimate:
        return PrefillEstimate.of(self.prefill_coefficients)

    @cached_property
    def _decode(self) -> DecodeEstimate:
        return DecodeEstimate.of(self.decode_coefficients)

    def prefill_s(self, spans: Sequence[Span]) -> float:
        estimate, base_s = self._prefill, self._prefill.base_s
        return base_s + sum(estimate.seconds(new, there) - base_s for there, new in spans)

    def decode_s(self, sequences: int, context_tokens: Tokens) -> Tokens:
        decode = self._decode
        fixed_s = decode.base_s + decode.per_sequence_s * sequences
        return fixed_s + decode.per_context_token_s * context_tokens

    def mixed_s(self, spans: Sequence[Span], sequences: int, context_tokens: float) -> float:
        bases_s = [self._prefill.base_s] * bool(spans) + [self._decode.base_s] * bool(sequences)
        prefill_s = self.prefill_s(spans) - self._prefill.base_s
        decode_s = self.decode_s(sequences, context_tokens) - self._decode.base_s
        return max(bases_s, default=0.0) + prefill_s + decode_s
