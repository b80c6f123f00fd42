"""Logprobs of a prompt's tokens, from the hidden states of a step.

The head is computed in parts of a few rows, because logits of a whole prompt may have gigabytes.
Only numbers of the tokens leave the device. Of equal logits, the lowest id is best, as in
backends/token_logprobs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from backends.engine.torch.gpu.staging import fetched
from backends.token_logprobs import PromptScores, best_ids

PART_SCALARS = 4 * 2**20  # logits of a part; float32: 16 MiB, float64: 32 MiB


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Consecutive rows of one prompt whose next tokens are known."""

    scores: PromptScores
    start: int  # position in the prompt of the first row's token
    first: int  # first row in the hidden states that `score` gets
    rows: int  # >= 1


def score(
    span: ScoredSpan,
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary_tokens: int,
) -> None:
    """Write the logprobs of the span's next tokens into its `scores`. hidden [rows, any]."""
    scores, own = span.scores, slice(span.start + 1, span.start + 1 + span.rows)
    targets = torch.from_numpy(scores.token_ids[own]).long().to(hidden.device)
    of_span = hidden[span.first : span.first + span.rows]
    rows_max = max(1, PART_SCALARS // vocabulary_tokens)
    found = [
        _scored(head(rows).float(), ids, scores.top)
        for rows, ids in zip(of_span.split(rows_max), targets.split(rows_max), strict=True)
    ]
    arrays = (scores.log_probs, scores.top_ids, scores.top_log_probs, scores.ranks)
    for array, parts in zip(arrays, zip(*found, strict=True), strict=True):
        array[own] = fetched(torch.cat(parts))


def _scored(
    logits: torch.Tensor, targets: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs, best ids, their logprobs, ranks) of logits [rows, vocabulary]."""
    own = logits.gather(1, targets[:, None])
    ranks = torch.count_nonzero(logits > own, 1) + 1
    log_probs = torch.log_softmax(logits.double(), 1)
    best = _best(logits, top)
    return log_probs.gather(1, targets[:, None])[:, 0], best, log_probs.gather(1, best), ranks


def _best(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Ids [rows, top] of the largest logits, best first."""
    if top == 0:
        return logits.new_empty((len(logits), 0), dtype=torch.int64)
    if logits.is_cuda:
        return _best_by_keys(logits, top)
    return torch.from_numpy(np.stack([best_ids(row, top) for row in logits.numpy()]))


def _best_by_keys(logits: torch.Tensor, top: int) -> torch.Tensor:
    """`_best` without a loop. torch's `topk` has no order of equal values, so the logits become
    integers of the same order, with the id in the lower 32 bits. On a CPU it takes 5 times as long.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    in_order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (in_order - ids).topk(top, dim=1).indices
