"""How probable the model found a token: natural logarithms, from its raw logits.

Raw: as the model computed them, before penalties, temperature and a grammar's mask. So the numbers
say what the model thinks, not what the request made of it, and a token that was masked may be among
the best. The log-softmax is computed in float64; clients get float32.

Not here: drawing a token (engine/sampling.py), which tokens leave when (text/text_stream.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOP_LOGPROBS_MAX = 20  # as in OpenAI's interface
PART_TOKENS = 256
NO_LOGPROBS = -1  # instead of a number of best tokens: the request wants no logprobs at all


class TokenLogprobs(NamedTuple):
    """Of one output token, and of the best tokens at its position, best first."""

    log_prob: float
    top_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


def token_logprobs(logits: NDArray[Any], token_id: int, top: int) -> TokenLogprobs:
    """Among equal logits the lower ids are better, as in greedy sampling."""
    below = logits.astype(np.float64) - float(logits.max())
    below -= np.log(np.exp(below).sum())
    best = _best(logits, min(top, len(logits))).tolist() if top > 0 else []
    return TokenLogprobs(float(below[token_id]), tuple(best), tuple(below[best].tolist()))


def _best(logits: NDArray[Any], few: int) -> NDArray[np.intp]:
    """The ids of the largest. So many parts of the vocabulary have their largest above a limit that
    is quickly found, and few other tokens are above it: to sort out a whole one takes a
    millisecond."""
    values = np.maximum.reduceat(logits, np.arange(0, len(logits), PART_TOKENS))
    if len(values) < few:
        values = logits
    limit = np.partition(values, len(values) - few)[len(values) - few]
    candidates = np.flatnonzero(logits >= limit)
    order = np.argsort(-logits[candidates], kind="stable")[:few]
    return candidates[order]
