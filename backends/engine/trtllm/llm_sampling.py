"""Our sampling parameters in TensorRT-LLM's words.

Where a token is drawn by its own sampler the draws are its own too, and not the torch engine's;
whether the same request gives the same answer again depends on the sampler. Greedy tokens are the
model's. What its sampler would ignore is refused.
`stop_words` are not passed on: they are matched on text, as for every engine.

Not here: the limits (../sampling_params.py), what a sampler heeds (sampler_support.py).
"""

from __future__ import annotations

from typing import Any

from backends.engine.sampling_params import SEED_MAX, SamplingParams
from backends.engine.trtllm.package import accepted
from backends.engine.trtllm.sampler_support import Sampler
from backends.errors import RequestInvalid

GOLDEN = 0x9E3779B97F4A7C15  # spreads positions over all seeds
NEVER = -1  # an end id that no token has


def llm_sampling(
    cls: Any, sampler: Sampler, params: SamplingParams, position: int, tokens: int,
    prompt_tokens: int,
) -> Any:  # fmt: skip
    """`cls` (tensorrt_llm.SamplingParams) for the next `tokens` tokens after `position` of them.

    Each worker draws from a seed of its own position: with one seed for both, prefill's token and
    decode's first would be drawn by the same random number. What was generated before comes to an
    engine as part of its prompt: presence and frequency count from behind the client's own prompt.
    """
    if refusal := sampler.refusal(params):
        raise RequestInvalid(refusal)
    keywords: dict[str, Any] = {
        "max_tokens": tokens,
        "end_id": params.end_ids[0] if params.end_ids else NEVER,
        "pad_id": params.end_ids[0] if params.end_ids else 0,
        "detokenize": False,
    }
    wanted: dict[str, Any] = {}  # what would be wrong to leave out
    if not params.end_ids:
        wanted["ignore_eos"] = True
    if len(params.end_ids) > 1:
        wanted["stop_token_ids"] = list(params.end_ids[1:])
        wanted["include_stop_str_in_output"] = True  # the end token is part of our answers
    if params.min_tokens > position:
        wanted["min_tokens"] = min(params.min_tokens - position, tokens)
    for name, neutral in (
        ("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0),
    ):  # fmt: skip
        if getattr(params, name) != neutral:
            wanted[name] = getattr(params, name)
    if params.presence_penalty or params.frequency_penalty:
        wanted["prompt_ignore_length"] = prompt_tokens
    if params.is_greedy:
        wanted["top_k"] = 1  # what nothing at all means differs between releases
    else:
        wanted["temperature"] = params.temperature
        wanted["top_k"] = params.top_k
        wanted["top_p"] = params.top_p
        if sampler.heeds_seeds:
            wanted["seed"] = (params.seed + position * GOLDEN) & SEED_MAX
        if params.min_p:
            wanted["min_p"] = params.min_p
    known = accepted(cls)
    if known is not None:
        if missing := sorted(set(wanted) - known):
            raise RequestInvalid(f"this TensorRT-LLM does not support {', '.join(missing)}")
        keywords = {name: value for name, value in keywords.items() if name in known}
    return cls(**keywords, **wanted)
