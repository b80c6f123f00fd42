"""Linear cost models of prefill and decode steps, and their non-negative least-squares fits.

The conductor computes the times of prefill and decode steps with these two models. Both are linear
in their coefficients. Each coefficient thus has a unit, and a dozen samples at the start of a
worker suffice for a fit:

    prefill(new, prefix) = base + per_token * new + per_token_pair * new * (prefix + new / 2)
    decode(batch)        = base + per_sequence * sequences + per_context_token * context_tokens

`new * (prefix + new / 2)` counts the (query, key) pairs of causal attention. Each new token attends
to the whole prefix and, on average, to half of the new tokens. This is the quadratic term of Eq. 1
of the Mooncake paper with a = 2 (causal) instead of a = 4. In the paper, a decode step is bound by
reading weights (base) and KV (per_context_token). Its figures also imply a cost per sequence.

The fit minimises the *relative* error, sum(((estimate - y) / y)^2), so a 10 ms prompt weighs as
much as a 10 s prompt. A sample y that was slow by accident (a warm-up, a busy core) adds at most 1
to this sum. Coefficients are non-negative, because a negative coefficient would predict a negative
time somewhere. Three columns have seven non-empty subsets. The exact solution is the best of the
seven least-squares fits without a negative coefficient, so no iterative solver is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from conductor.queue_order import ALWAYS

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    base_s: float
    per_token_s: float
    per_token_pair_s: float

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> PrefillEstimate:
        """From WorkerInfo.prefill_coefficients; an empty tuple means not calibrated."""
        return cls(*coefficients) if coefficients else UNCALIBRATED_PREFILL

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return (self.base_s, self.per_token_s, self.per_token_pair_s)

    @property
    def overhead_tokens(self) -> float:
        """Number of tokens whose computation takes as long as `base_s` (queue_order.py)."""
        return self.base_s / self.per_token_s if self.per_token_s > 0 else ALWAYS

    def seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        """Seconds to compute `new_tokens` after a cached prefix; 0 without new tokens."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return self.base_s + self.per_token_s * new_tokens + self.per_token_pair_s * pairs


@dataclass(frozen=True, slots=True)
class DecodeEstimate:
    base_s: float
    per_sequence_s: float
    per_context_token_s: float

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> DecodeEstimate:
        """From WorkerInfo.decode_coefficients; an empty tuple means not calibrated."""
        return cls(*coefficients) if coefficients else UNCALIBRATED_DECODE

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return (self.base_s, self.per_sequence_s, self.per_context_token_s)

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of a step with one token for each sequence. `context_tokens`: summed over all."""
        return (
            self.base_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )


# Coefficients of a worker without measurements. The times are wrong for any machine, but longer
# prompts and fuller batches take longer. Routing thus still balances load and prefers cached KV.
UNCALIBRATED_PREFILL = PrefillEstimate(base_s=0.01, per_token_s=1e-3, per_token_pair_s=0.0)
UNCALIBRATED_DECODE = DecodeEstimate(base_s=0.01, per_sequence_s=1e-3, per_context_token_s=1e-6)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    new_tokens: int
    prefix_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    sequences: int
    context_tokens: int  # KV tokens of all sequences
    seconds: float


Estimate = TypeVar("Estimate", PrefillEstimate, DecodeEstimate)


@dataclass(frozen=True, slots=True)
class Fit(Generic[Estimate]):
    """A fitted estimate with its errors on its own samples."""

    estimate: Estimate
    error_mean: float  # mean of |estimate - measured| / measured
    error_max: float
    samples: int


def fit_prefill(samples: Sequence[PrefillSample]) -> Fit[PrefillEstimate]:
    """Samples should have several lengths, some with a prefix. ValueError if none is usable."""
    usable = [s for s in samples if s.seconds > 0 and s.new_tokens > 0]
    rows = [
        (1.0, s.new_tokens, s.new_tokens * (s.prefix_tokens + s.new_tokens / 2)) for s in usable
    ]
    weights, errors = _fit(rows, [s.seconds for s in usable])
    return Fit(PrefillEstimate(*weights), float(errors.mean()), float(errors.max()), len(usable))


def fit_decode(samples: Sequence[DecodeSample]) -> Fit[DecodeEstimate]:
    """Samples should have several batch sizes and contexts. ValueError if none is usable."""
    usable = [s for s in samples if s.seconds > 0 and s.sequences > 0]
    rows = [(1.0, s.sequences, s.context_tokens) for s in usable]
    weights, errors = _fit(rows, [s.seconds for s in usable])
    return Fit(DecodeEstimate(*weights), float(errors.mean()), float(errors.max()), len(usable))


def _fit(
    rows: Sequence[tuple[float, ...]], seconds: Sequence[float]
) -> tuple[tuple[float, ...], Matrix]:
    """Non-negative weights of least relative squared error, and each sample's relative error."""
    if not rows:
        raise ValueError("no sample has a positive time and size; measure at least three prompts")
    measured = np.asarray(seconds, dtype=np.float64)
    # After dividing each row by its measured time, the target is 1 and errors are relative.
    relative: Matrix = np.asarray(rows, dtype=np.float64) / measured[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    best, best_loss = np.zeros(relative.shape[1]), float(len(rows))
    terms = range(relative.shape[1])
    for columns in map(list, chain.from_iterable(combinations(terms, n + 1) for n in terms)):
        part = relative[:, columns] / scale[columns]
        solution = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
        if (solution < 0).any():
            continue
        loss = float(((part @ solution - 1.0) ** 2).sum())
        if loss < best_loss - 1e-9:  # among equal losses, the fit with the fewest terms wins
            best_loss, best = loss, np.zeros(relative.shape[1])
            best[columns] = solution / scale[columns]
    return tuple(float(w) for w in best), np.abs(relative @ best - 1.0)
