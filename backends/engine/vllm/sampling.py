"""Sampling parameters for vLLM.

vLLM draws tokens by itself, so sampled tokens differ from the torch engine's. Its random numbers
cannot be moved to a position. So the seed of a request depends on the number of tokens that the
answer already has, and a sampled answer differs if another worker continues it.
`stop_words` are matched on text, as for every engine. Pure.

Not here: the limits (../sampling_params.py).
"""

from __future__ import annotations

from typing import Any

from backends.engine.sampling_params import SamplingParams
from backends.errors import InvalidRequest
from backends.tensors import STRUCTURAL_TAG, guide_name

VLLM_SEED_MAX = 2**63 - 1  # a signed 64-bit integer of vLLM


def vllm_sampling(params: SamplingParams, position: int, tokens: int) -> dict[str, Any]:
    """Keywords of vLLM's SamplingParams for `tokens` tokens after `position` generated ones. Raises
    InvalidRequest."""
    if refusal := _refusal(params):
        raise InvalidRequest(f"{refusal} is not supported by workers with vLLM")
    keywords: dict[str, Any] = {
        "max_tokens": tokens,
        "ignore_eos": True,  # only the request's own end tokens count
        "stop_token_ids": list(params.end_ids),
        "temperature": 0.0 if params.is_greedy else params.temperature,
    }
    if params.min_tokens > position:
        keywords["min_tokens"] = min(params.min_tokens - position, tokens)
    if params.logit_bias:
        keywords["logit_bias"] = dict(params.logit_bias)
    if not params.is_greedy:
        keywords |= {name: getattr(params, name) for name in ("top_k", "top_p", "min_p")}
        keywords["seed"] = params.seed_at(position) & VLLM_SEED_MAX
    return keywords


def _refusal(params: SamplingParams) -> str:
    if params.wants_logprobs:
        return "return_log_probs"
    if params.scores_prompt:
        return "prompt_logprobs"
    if params.guide and params.guide_kind != STRUCTURAL_TAG:
        return guide_name(params.guide_kind)
    if params.repetition_penalty != 1.0:
        return "repetition_penalty"
    if params.presence_penalty or params.frequency_penalty:
        return "a penalty"
    return ""
