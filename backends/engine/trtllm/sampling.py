"""Sampling parameters for TensorRT-LLM, and what the sampler of a release supports.

TensorRT-LLM's sampler draws tokens by itself, so sampled tokens differ from the torch engine's. Its
SamplingParams takes every parameter in every release, but a sampler may ignore some, by upstream's
sources and pull requests:

    TorchSampler (the default)   penalties: ignored before PR 16485, min_p: before 16590 (July 2026;
                                 in 1.3.0rc24, in no 1.2.x)
                                 seed: ignored before 17172 (August 2026), and since then used for
                                 the first request of a batch only: its kernels take one seed a call
                                 (_SeedManager's own warning; flashinfer issue 2345)
    TRTLLMSampler                uses all of them: DecodingMode.TopKTopP has kUsePenalties and
                                 kUseMinP, and each request has a random state of its own;
                                 `sampler_type`, until it was removed (1.3.0rc25 or rc26)

An ignored parameter is refused by name, with the release and the remedy. A seed of 0 is the default
of our protocol and requests nothing. `stop_words` are matched on text, as for every engine. Pure.

Not here: the limits (../sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.engine.sampling_params import SamplingParams
from backends.engine.trtllm.package import accepted
from backends.engine.trtllm.releases import Release, release
from backends.engine.trtllm.settings import GUIDED_BACKEND
from backends.errors import InvalidRequest

NEVER = -1  # the id of no token


def llm_sampling(
    cls: Any,
    sampler: Sampler,
    params: SamplingParams,
    position: int,
    tokens: int,
    prompt_tokens: int,
    guided: Any = None,
) -> Any:
    """`cls` (tensorrt_llm.SamplingParams) for `tokens` tokens after `position` generated ones.

    The seed depends on the position. Otherwise the tokens of prefill and the first of decode would
    be drawn by the same random number. An engine gets generated tokens as part of its prompt, so
    presence and frequency count after the client's own prompt.
    """
    if refusal := sampler.refusal(params):
        raise InvalidRequest(refusal)
    if params.wants_logprobs:
        raise InvalidRequest(
            "workers with TensorRT-LLM say no logprobs: leave return_log_probs out"
        )
    if params.scores_prompt:
        raise InvalidRequest("prompt_logprobs is not supported by workers with TensorRT-LLM")
    if params.logit_bias:
        raise InvalidRequest("logit_bias is not supported by workers with TensorRT-LLM")
    keywords: dict[str, Any] = {
        "max_tokens": tokens,
        "end_id": params.end_ids[0] if params.end_ids else NEVER,
        "pad_id": params.end_ids[0] if params.end_ids else 0,
        "detokenize": False,
    }
    wanted: dict[str, Any] = {}  # must not be left out
    if not params.end_ids:
        wanted["ignore_eos"] = True
    if len(params.end_ids) > 1:
        wanted["stop_token_ids"] = list(params.end_ids[1:])
        wanted["include_stop_str_in_output"] = True  # our answers include the end token
    if params.min_tokens > position:
        wanted["min_tokens"] = min(params.min_tokens - position, tokens)
    for name in PENALTIES:
        if getattr(params, name) != NEUTRAL[name]:
            wanted[name] = getattr(params, name)
    if guided is not None:
        wanted["guided_decoding"] = guided
    if params.presence_penalty or params.frequency_penalty:
        wanted["prompt_ignore_length"] = prompt_tokens
    if params.is_greedy:
        wanted["top_k"] = 1  # the default differs between releases
    else:
        wanted |= {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        if sampler.heeds("seed"):
            wanted["seed"] = params.seed_at(position)
        if params.min_p:
            wanted["min_p"] = params.min_p
    known = accepted(cls)
    if known is not None:
        if missing := sorted(set(wanted) - known):
            raise InvalidRequest(f"this TensorRT-LLM does not support {', '.join(missing)}")
        keywords = {name: value for name, value in keywords.items() if name in known}
    return cls(**keywords, **wanted)


def guided_refusal(options: Mapping[str, Any], handoff: str, position: int) -> str:
    """Why an answer cannot follow a grammar, as text after the input's name, or an empty string.

    TensorRT-LLM's grammar begins with the first generated token of its request. A decode engine
    gets the first token of an answer as a generated one only with native hand-over. Otherwise it is
    the end of the prompt, like the tokens of a lost attempt.
    """
    if not options.get(GUIDED_BACKEND):
        return f"needs {GUIDED_BACKEND} in llm_options of the workers"
    if handoff != "native":
        return "needs handoff native: TensorRT-LLM begins its grammar anew in decode"
    if position:
        return "cannot go on with an answer that was begun (TensorRT-LLM); ask again"
    return ""


HEEDS_ALL = "TRTLLMSampler"
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# The first release whose TorchSampler uses the parameter.
HEEDED_SINCE: dict[str, Release] = dict.fromkeys((*PENALTIES, "min_p"), (1, 3, 0, 24.0))
NEUTRAL = {**dict.fromkeys(PENALTIES, 0.0), "repetition_penalty": 1.0, "min_p": 0.0, "seed": 0}
WHEN_DRAWN = ("min_p", "seed")  # without effect on greedy tokens


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampler of an engine."""

    version: str
    name: str = "TorchSampler"

    @classmethod
    def of(cls, version: str, options: Mapping[str, Any]) -> Sampler:
        """Of `llm_options`. All names but TRTLLMSampler, "auto" too, mean TorchSampler."""
        asked = str(options.get("sampler_type", "auto"))
        return cls(version, HEEDS_ALL if asked == HEEDS_ALL else "TorchSampler")

    def heeds(self, name: str) -> bool:
        since = HEEDED_SINCE.get(name)
        return self.name == HEEDS_ALL or (since is not None and release(self.version) >= since)

    def refusal(self, params: SamplingParams) -> str:
        """Why this request cannot be served, or an empty string."""
        ignored = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, neutral in NEUTRAL.items()
            if (value := getattr(params, name)) != neutral
            and not (params.is_greedy and name in WHEN_DRAWN)
            and not self.heeds(name)
        ]
        if not ignored:
            return ""
        return (
            f"TensorRT-LLM {self.version} with {self.name} would ignore {', '.join(ignored)}: "
            "leave it out, or let the operator set sampler_type to TRTLLMSampler in llm_options, "
            "where the release has it"
        )
