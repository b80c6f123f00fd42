"""Sampling parameters for vLLM.

vLLM draws tokens by itself, so sampled tokens differ from the torch engine's. Its random numbers
cannot be moved to a position. So the seed of a request depends on the number of tokens that the
answer already has, and a sampled answer differs if another worker continues it.
`stop_words` are matched on text, as for every engine. Pure.

vLLM masks logits by the grammar before it computes logprobs, so its logprobs are not ours there. A
request that wants both is refused. A structural tag is then left out: it is a help, and the parser
of tool calls reads calls without it too.

Not here: the limits (../sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.sampling_params import SamplingParams
from backends.engine.vllm.given_tokens import GIVEN, counts_generated
from backends.engine.vllm.guided import structured_outputs
from backends.errors import InvalidRequest
from backends.tensors import STRUCTURAL_TAG, guide_name

VLLM_SEED_MAX = 2**63 - 1  # a signed 64-bit integer of vLLM
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def vllm_sampling(
    params: SamplingParams, position: int, tokens: int, special_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Keywords of vLLM's SamplingParams for `tokens` tokens after `position` generated ones, which
    are the end of the prompt. `special_ids`: as for `structured_outputs`. Raises InvalidRequest."""
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
    if params.wants_logprobs:
        keywords["logprobs"] = params.top_logprobs
    elif params.guide:
        keywords["structured_outputs"] = structured_outputs(
            params.guide_kind, params.guide, special_ids
        )
    for name, neutral in PENALTIES.items():
        if (value := getattr(params, name)) != neutral:
            keywords[name] = value
    if position and (counts_generated(params) or "structured_outputs" in keywords):
        keywords["extra_args"] = {GIVEN: position}
    if not params.is_greedy:
        keywords |= {name: getattr(params, name) for name in ("top_k", "top_p", "min_p")}
        keywords["seed"] = params.seed_at(position) & VLLM_SEED_MAX
    return keywords


def _refusal(params: SamplingParams) -> str:
    if params.scores_prompt:
        return "prompt_logprobs"
    if params.guide and params.wants_logprobs and params.guide_kind != STRUCTURAL_TAG:
        return f"return_log_probs together with {guide_name(params.guide_kind)}"
    return ""
