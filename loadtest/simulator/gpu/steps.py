"""What a model of a GPU must tell: seconds of a prefill step, of a decode step, of a mixed one.

A decode step must be linear in the context, so that thousands of them can be computed at once.
`calibrate` measures such a model as `mooncake profile` measures a real worker, so the conductor
knows of it what it would know of a real one: coefficients fitted to samples, with their error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

Span = tuple[int, int]  # (tokens that are there already, new tokens): one chunk of one prompt
Tokens = TypeVar("Tokens", float, npt.NDArray[np.float64])

PROMPTS = (2_048, 8_192, 32_768, 65_536, 131_072)
PREFIX_SHARES = (0.0, 0.5, 0.9)
BATCHES = (1, 4, 16, 64)
CONTEXTS = (1_024, 8_192, 32_768)


class GpuModel(Protocol):
    token_bytes: int  # KV of one token
    pages_bytes: int  # memory for KV, weights and buffers taken off

    def prefill_s(self, spans: Sequence[Span]) -> float:
        """One step that computes these chunks."""
        ...

    def decode_s(self, sequences: int, context_tokens: Tokens) -> Tokens:
        """One step that gives a token to each of `sequences`, which have that context together."""
        ...

    def mixed_s(self, spans: Sequence[Span], sequences: int, context_tokens: float) -> float:
        """One step of a coupled engine: chunks of prompts and decoding sequences together."""
        ...


@dataclass(frozen=True, slots=True)
class Calibration:
    prefill: Fit[PrefillEstimate]
    decode: Fit[DecodeEstimate]


def calibrate(gpu: GpuModel, chunk_tokens: int) -> Calibration:
    """What a worker with this GPU would measure of itself when it starts."""
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
    """A whole prompt, alone, in steps of at most `chunk_tokens`."""
    starts = range(prefix_tokens, prompt_tokens, chunk_tokens)
    return sum(gpu.prefill_s([(at, min(chunk_tokens, prompt_tokens - at))]) for at in starts)
