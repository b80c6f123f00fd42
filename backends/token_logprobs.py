"""Logprobs of tokens: natural logarithms of probabilities, from the model's raw logits.

Raw logits are logits before penalties, temperature and the mask of the grammar matcher. So logprobs
do not depend on the request's sampling parameters, and a masked token may be among the best tokens.
The log-softmax is computed in float64; clients get float32.

The rows of a prompt are scored by the engine, on its device (engine/torch/scoring.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOP_LOGPROBS_MAX = 20  # as in OpenAI's interface
PART_TOKENS = 256  # tokens of one part of the vocabulary (`_best`)
NO_LOGPROBS = -1  # value of `top_logprobs` for a request without logprobs


class TokenLogprobs(NamedTuple):
    """The logprob of an output token, and those of the best tokens at its position, best first."""

    log_prob: float
    top_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


class PromptLogprobs(NamedTuple):
    """The arrays of `PromptScores`, as bytes; empty if they were not requested."""

    log_probs: bytes = b""
    top_ids: bytes = b""
    top_log_probs: bytes = b""
    ranks: bytes = b""


class PromptScores:
    """Logprobs of a prompt's tokens, each given the tokens before it. An engine fills the arrays.

    The first token has none: its values are 0.
    """

    def __init__(self, token_ids: NDArray[np.int32], top: int) -> None:
        """`top`: number of best tokens of each position, at most the size of the vocabulary."""
        self.token_ids, self.top = token_ids, top
        self.log_probs = np.zeros(len(token_ids), np.float32)
        self.top_ids = np.zeros((len(token_ids), top), np.int32)  # best first
        self.top_log_probs = np.zeros((len(token_ids), top), np.float32)
        self.ranks = np.zeros(len(token_ids), np.int32)  # 1: no token has a larger logit

    def packed(self) -> PromptLogprobs:
        arrays = (self.log_probs, self.top_ids, self.top_log_probs, self.ranks)
        return PromptLogprobs(*(array.tobytes() for array in arrays))


def token_logprobs(logits: NDArray[Any], token_id: int, top: int) -> TokenLogprobs:
    """Logprobs of a token and of the `top` best tokens. Of equal logits, the lowest id is best."""
    below = logits.astype(np.float64) - float(logits.max())
    below -= np.log(np.exp(below).sum())
    best = best_ids(logits, min(top, len(logits))).tolist() if top > 0 else []
    return TokenLogprobs(float(below[token_id]), tuple(best), tuple(below[best].tolist()))


def best_ids(logits: NDArray[Any], few: int) -> NDArray[np.intp]:
    """The ids of the `few` largest logits. Partitioning all logits would take a millisecond.

    The vocabulary is divided into parts. The `few`-th largest of the parts' maxima is a lower bound
    for the result's logits. Only tokens whose logits reach this bound are sorted.
    """
    values = np.maximum.reduceat(logits, np.arange(0, len(logits), PART_TOKENS))
    if len(values) < few:
        values = logits
    limit = np.partition(values, len(values) - few)[len(values) - few]
    candidates = np.flatnonzero(logits >= limit)
    order = np.argsort(-logits[candidates], kind="stable")[:few]
    return candidates[order]
