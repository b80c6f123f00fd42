"""How long things take: prefill and one decode step; and fitting both.

Every figure that the conductor compares is in seconds and comes from here. Both models are linear
in their coefficients, because that is what makes them explainable (each coefficient has a unit),
fittable from a dozen samples when a worker starts, and safe to extrapolate:

    prefill(new, prefix) = base + per_token * new + per_token_pair * new * (prefix + new / 2)
    decode(batch)        = base + per_sequence * sequences + per_context_token * context_tokens

`new * (prefix + new / 2)` counts the (query, key) pairs of causal attention: each of the new
tokens looks at the whole prefix and, on average, at half of the new ones. It is the quadratic
term of Eq. 1 of the Mooncake paper with a = 2 (causal) instead of a = 4. The paper fits prefill
offline on (length, prefix length); its decode step is bound by reading weights (base) and KV
(per_context_token), and its own figures imply a cost per sequence on top.

The fit minimises *relative* error, sum(((estimate - y) / y)^2), so that a 10 ms prompt weighs as
much as a 10 s one; and a sample that was slow by accident (a warm-up, a busy core) has a residual
of at most 1 instead of dominating. Coefficients must not be negative: a negative one would predict
a negative time somewhere. With three unknowns the exact non-negative solution is the best of the
seven ordinary least squares over subsets of columns, so no iterative solver is needed.

Not here: for whom these seconds are reserved (prefill_queue.py, decode_batch.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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
        """How many tokens take as long as one step's overhead (queue_order.py)."""
        return self.base_s / self.per_token_s if self.per_token_s > 0 else ALWAYS

    def seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        """Time to compute `new_tokens` behind a cached prefix; nothing to do takes no time."""
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
        """One step, which gives one token to each sequence of the batch."""
        return (
            self.base_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )


# A worker that measured nothing. Wrong for any machine, but of the right shape: longer prompts
# and fuller batches take longer, so routing still spreads load and still values a cached prefix.
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
    context_tokens: int  # KV tokens of all sequences together
    seconds: float


Estimate = TypeVar("Estimate", PrefillEstimate, DecodeEstimate)


@dataclass(frozen=True, slots=True)
class Fit(Generic[Estimate]):
    """A fitted estimate and how far it is from its own samples."""

    estimate: Estimate
    error_mean: float  # mean absolute error / measured seconds (MAPE as a fraction)
    error_max: float
    samples: int


def fit_prefill(samples: Sequence[PrefillSample]) -> Fit[PrefillEstimate]:
    """Needs a few lengths, some behind a prefix; raises ValueError without a usable sample."""
    usable = [s for s in samples if s.seconds > 0 and s.new_tokens > 0]
    rows = [
        (1.0, s.new_tokens, s.new_tokens * (s.prefix_tokens + s.new_tokens / 2)) for s in usable
    ]
    weights, errors = _fit(rows, [s.seconds for s in usable])
    return Fit(PrefillEstimate(*weights), float(errors.mean()), float(errors.max()), len(usable))


def fit_decode(samples: Sequence[DecodeSample]) -> Fit[DecodeEstimate]:
    """Needs a few batch sizes and context lengths; raises ValueError without a usable sample."""
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
    # Dividing each row by its time turns relative error into ordinary error against 1.
    relative: Matrix = np.asarray(rows, dtype=np.float64) / measured[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    best, best_loss = np.zeros(relative.shape[1]), float(len(rows))
    for columns in _subsets(relative.shape[1]):
        part = relative[:, columns] / scale[columns]
        solution = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
        if (solution < 0).any():
            continue
        loss = float(((part @ solution - 1.0) ** 2).sum())
        if loss < best_loss - 1e-9:  # of equally good ones, the one with fewer terms came first
            best_loss, best = loss, np.zeros(relative.shape[1])
            best[columns] = solution / scale[columns]
    return tuple(float(w) for w in best), np.abs(relative @ best - 1.0)


def _subsets(count: int) -> list[list[int]]:
    """All non-empty sets of columns, small ones first."""
    return [
        list(chosen)
        for size in range(1, count + 1)
        for chosen in itertools.combinations(range(count), size)
    ]
