"""What the sampler inside a release of TensorRT-LLM does with sampling parameters, and what not.

Its SamplingParams takes every parameter in every release; the sampler that draws may ignore some
without a word. Which ones, as upstream's sources and pull requests say:

    TorchSampler (the default)   penalties: ignored before PR 16485, min_p: before 16590 (July 2026;
                                 in 1.3.0rc24, in no 1.2.x)
                                 seed: ignored before 17172 (August 2026), and since then heeded for
                                 the first request of a batch only: its kernels take one seed a call
                                 (_SeedManager's own warning; flashinfer issue 2345)
    TRTLLMSampler                heeds them all: DecodingMode.TopKTopP has kUsePenalties and
                                 kUseMinP, and draws have a state of their own for each request;
                                 `sampler_type`, until it was removed (1.3.0rc25 or rc26)

So what would be ignored is refused by name, with the release and the remedy. A seed of 0 is the
default of our protocol and asks for nothing. Pure.

Not here: the words that tensorrt_llm uses for parameters (llm_sampling.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backends.engine.sampling_params import SamplingParams

HEEDS_ALL = "TRTLLMSampler"
Release = tuple[int, int, int, float]  # the last: of which candidate; a final release is infinite
FINAL = float("inf")
UNKNOWN: Release = (0, 0, 0, 0.0)
HEEDED_SINCE: dict[str, Release] = {  # by TorchSampler
    "repetition_penalty": (1, 3, 0, 24.0),
    "presence_penalty": (1, 3, 0, 24.0),
    "frequency_penalty": (1, 3, 0, 24.0),
    "min_p": (1, 3, 0, 24.0),
}
NEUTRAL = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
    "seed": 0,
}  # fmt: skip
WHEN_DRAWN = ("min_p", "seed")  # where tokens are greedy these change nothing


@dataclass(frozen=True, slots=True)
class Sampler:
    """The one that an engine draws with."""

    version: str
    name: str = "TorchSampler"

    @classmethod
    def of(cls, version: str, options: Mapping[str, Any]) -> Sampler:
        """By `llm_options`; everything but TRTLLMSampler ("auto" too) is TorchSampler."""
        asked = str(options.get("sampler_type", "auto"))
        return cls(version, HEEDS_ALL if asked == HEEDS_ALL else "TorchSampler")

    @property
    def heeds_seeds(self) -> bool:
        return self.name == HEEDS_ALL

    def ignored(self, params: SamplingParams) -> Iterator[str]:
        """What this request asks for and would not get."""
        if self.name == HEEDS_ALL:
            return
        here = release(self.version)
        for name, neutral in NEUTRAL.items():
            value = getattr(params, name)
            if value == neutral or (params.is_greedy and name in WHEN_DRAWN):
                continue
            since = HEEDED_SINCE.get(name)
            if since is None or here < since:
                yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"

    def refusal(self, params: SamplingParams) -> str:
        """Why this request cannot be served as asked, or nothing."""
        ignored = list(self.ignored(params))
        if not ignored:
            return ""
        return (
            f"TensorRT-LLM {self.version} with {self.name} would ignore {', '.join(ignored)}: "
            "leave it out, or let the operator set sampler_type to TRTLLMSampler in llm_options, "
            "where the release has it"
        )


def release(version: str) -> Release:
    """1.3.0rc24 -> (1, 3, 0, 24.0); comparable. What cannot be read is older than everything."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", version)
    if found is None:
        return UNKNOWN
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch), float(candidate) if candidate else FINAL
