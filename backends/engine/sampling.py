"""Sampling: a pure function from (logits, params, position, history) to a token.

Prefill samples token 0 on one machine, and decode samples the other tokens on another machine. A
resumed request may continue on a third machine. So a token must not depend on when or where it is
sampled. The only randomness is one uniform number of a counter-based generator (Philox). The
generator's key is the request's seed, and its counter is the token's position in the output.

Steps, in this order, as in transformers' logits processors except where stated:

1. logit_bias: a number is added to the logit of each listed token id (OpenAI, vLLM).
2. repetition_penalty: for each token id of the prompt or output, once. A positive logit is divided
   by the penalty, and a negative logit is multiplied by it (transformers, vLLM).
3. frequency_penalty, presence_penalty: for token ids of the *output* only. The logit is reduced by
   frequency_penalty x count + presence_penalty (OpenAI, vLLM; not in transformers).
4. min_tokens: end ids are impossible before this many output tokens. Tokens that the grammar
   matcher rejects are impossible too.
5. If temperature is 0 or top_k is 1, the result is the token with the largest logit. Among equal
   logits, the lowest id is chosen. Steps 6 and 7 are left out.
6. temperature, top_k (0: off), top_p, min_p, in this order. Where top_k or top_p cuts between equal
   logits, the lower ids are kept. vLLM applies min_p before top_p, which matters if both are set.
7. The kept tokens are put in order of their ids. The token is the first one whose cumulative
   probability exceeds the random number.

Logprobs are computed from the logits before all steps (token_logprobs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.sampling_params import SamplingParams
from backends.token_logprobs import TokenLogprobs, token_logprobs

Integers = NDArray[np.int64]
Floats = NDArray[Any]  # float32 or float64

CANDIDATES_FEW = 1024  # `_top_p` sorts only this many best tokens if they suffice; saves 10 ms


class Guide(Protocol):
    """Grammar matcher of one request; its state follows the output tokens (text/guides.py)."""

    def allowed(self) -> NDArray[np.bool_]:
        """[vocabulary]: whether each token id may be the next token."""

    def advance(self, token_id: int) -> None: ...

    def copy(self) -> Guide:
        """A matcher with the same state, which advances by itself."""


class Drawn(NamedTuple):
    """A sampled token."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: not requested


def largest_rows(
    logits: Floats, asked: Sequence[tuple[SamplingParams, int, Guide | None]]
) -> list[int] | None:
    """The argmax of each row of logits [rows, vocabulary], if `draw` would return just that.

    `asked`: (params, position, grammar matcher) of each row. Returns None if any row needs a random
    number, a bias, a penalty, a grammar matcher, logprobs or min_tokens.
    """
    if not all(_is_largest(*each) for each in asked):
        return None
    found: list[int] = logits.argmax(axis=1).tolist()
    return found


def _is_largest(params: SamplingParams, position: int, guide: Guide | None) -> bool:
    if guide is not None or not params.is_greedy or params.wants_logprobs:
        return False
    has_penalty = params.presence_penalty or params.frequency_penalty or params.logit_bias
    if has_penalty or params.repetition_penalty != 1.0:
        return False
    return position >= params.min_tokens or not params.end_ids


def draw(
    logits: Floats,
    params: SamplingParams,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    guide: Guide | None = None,
) -> Drawn:
    """Sample a token, with logprobs if requested, and advance the grammar matcher by this token.
    Raises InvalidRequest if the matcher does."""
    allowed = None if guide is None else guide.allowed()
    token_id = sample(logits, params, position, prompt_ids, output_ids, allowed)
    if guide is not None:
        guide.advance(token_id)
    if not params.wants_logprobs:
        return Drawn(token_id, None)
    return Drawn(token_id, token_logprobs(logits, token_id, params.top_logprobs))


def sample(
    logits: Floats,
    params: SamplingParams,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token at `position` of the output (0: the first). Does not change `logits` [vocabulary].

    `output_ids`: the output tokens before `position`. Only penalties use `prompt_ids` and
    `output_ids`. `allowed` [vocabulary]: result of the grammar matcher, with at least one True.
    """
    assert logits.ndim == 1, logits.shape
    assert position >= 0, position
    scores = adjusted_logits(logits, params, position, prompt_ids, output_ids)
    if allowed is not None:
        scores = np.where(allowed, scores, scores.dtype.type(-np.inf))
    if params.is_greedy:
        return int(np.argmax(scores))
    token_ids, probabilities = distribution(scores, params)
    if allowed is not None:  # `distribution` may have kept rejected tokens, with probability 0
        is_possible = probabilities > 0.0
        token_ids, probabilities = token_ids[is_possible], probabilities[is_possible]
    cumulative = np.cumsum(probabilities)
    drawn = uniform(params.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, drawn, side="right"))
    return int(token_ids[min(index, len(token_ids) - 1)])


def uniform(seed: int, position: int) -> float:
    """The random number of this seed and position, in [0, 1)."""
    # The generator increments word 0 of the counter, so the position is in word 1.
    bits = int(np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw())
    return (bits >> 11) * 2.0**-53


def adjusted_logits(
    logits: Floats,
    params: SamplingParams,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> Floats:
    """Steps 1 to 4 of this module, without the grammar matcher. Does not change `logits`."""
    scores = logits
    if params.logit_bias:
        scores = scores.copy()
        token_ids, biases = zip(*params.logit_bias, strict=True)
        scores[list(token_ids)] += np.array(biases, scores.dtype)
    if params.repetition_penalty != 1.0:
        scores = scores.copy() if scores is logits else scores
        seen = np.unique(np.concatenate([_array(prompt_ids), _array(output_ids)]))
        values = scores[seen]
        penalty = scores.dtype.type(params.repetition_penalty)
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(output_ids):
        scores = scores.copy() if scores is logits else scores
        seen, counts = np.unique(_array(output_ids), return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        scores[seen] -= penalties.astype(scores.dtype)
    if position < params.min_tokens and params.end_ids:
        scores = scores.copy() if scores is logits else scores
        scores[list(params.end_ids)] = -np.inf
    return scores


def distribution(scores: Floats, params: SamplingParams) -> tuple[Integers, Floats]:
    """Step 6 of this module: the ids of the kept tokens, ascending, and their probabilities.

    The probabilities are relative to all tokens that top_k keeps. So their sum may be below 1.
    """
    token_ids, scores = _top_k(scores, params.top_k)
    below = scores.astype(np.float64) - float(scores.max())
    with np.errstate(over="ignore"):  # a tiny temperature gives -inf, whose weight is 0
        weights = np.exp(below / params.temperature)
    probabilities = weights / weights.sum()
    if params.top_p < 1.0:
        kept = _top_p(probabilities, params.top_p)
        token_ids, probabilities = token_ids[kept], probabilities[kept]
    if params.min_p > 0.0:
        kept = probabilities >= params.min_p * probabilities.max()
        token_ids, probabilities = token_ids[kept], probabilities[kept]
    return token_ids, probabilities


def _top_k(scores: Floats, top_k: int) -> tuple[Integers, Floats]:
    """The ids of the k largest scores, ascending, and their scores."""
    if top_k == 0 or top_k >= len(scores):
        return np.arange(len(scores)), scores
    threshold = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)[: top_k - len(above)]
    token_ids = np.sort(np.concatenate([above, equal]))
    return token_ids, scores[token_ids]


def _top_p(probabilities: Floats, top_p: float) -> Integers:
    """Ascending indices of the fewest largest probabilities whose sum is at least `top_p`."""
    few = min(CANDIDATES_FEW, len(probabilities))
    threshold = np.partition(probabilities, len(probabilities) - few)[len(probabilities) - few]
    candidates = np.flatnonzero(probabilities >= threshold)
    if probabilities[candidates].sum() < top_p:
        candidates = np.arange(len(probabilities))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < top_p]  # always includes the largest probability
    return np.sort(kept)


def _array(token_ids: Sequence[int]) -> Integers:
    return np.asarray(token_ids, dtype=np.int64)
