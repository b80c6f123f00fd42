"""The profile of a worker pair as a record and as a JSON file.

    {"version": 4, "machine": ..., "settings": {...},
     "prefill": {"coefficients": [base_s, per_token_s, per_token_pair_s], "error_mean": ...,
                 "error_max": ..., "samples": [[new_tokens, prefix_tokens, seconds], ...]},
     "decode":  {"coefficients": [base_s, per_sequence_s, per_context_token_s], "error_mean": ...,
                 "error_max": ..., "samples": [[sequences, context_tokens, seconds], ...]},
     "serving": {"base_s": ..., "per_cached_token_s": ..., "handover_s": ...},
     "sharing": {"prefill": ..., "decode": ..., "second_prefill": ..., "second_decode": ...},
     "burst": {"prompt_tokens": [...], "output_tokens": ..., "ttft_s": ...,
               "first_interval_s": ..., "step_s": ...},
     "sources": {"node_bytes_per_s": ..., "node_path": ..., "ssd_bytes_per_s": ...}}

`coefficients` are those of conductor/estimates/estimates.py, fitted with its relative error:
`error_mean` is the MAPE as a fraction. Prefill coefficients are of one step: a prompt longer than
`chunk_tokens` pays base_s once a step (`prompt_s`). Samples are of whole prompts, as measured.

`serving` is the time added to the prefill in a client's TTFT: Triton, the frontend, and loading a
cached prefix from the worker's own node. `handover_s` is the time between the first token and the
second, less a decode step: putting, calling and reading. `sharing` is the factor by which a step is
longer while one other worker computes: of the other role, and of its own role if the server has a
second one. It is 1 where each worker has a device of its own.

`burst` is the clients' average over prompts sent at once, when KV and tokens of others move and
engines, frontend, client and nodes share the cores. It has means instead of medians, because a few
very late tokens count. `sources` is the rate of a prefix from another node's memory and from the
own node's SSD; 0: not measured.

Not here: measuring (measure.py), the command (command.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    Fit,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)

VERSION = 4


@dataclass(frozen=True, slots=True)
class Serving:
    """Seconds that serving adds to the engines on an idle server."""

    base_s: float  # before the first token
    per_cached_token_s: float
    handover_s: float = 0.0  # between the first token and the second


@dataclass(frozen=True, slots=True)
class Sharing:
    """The factor by which a step is longer while one other worker computes; at least 1."""

    prefill: float = 1.0  # beside a decode worker
    decode: float = 1.0  # beside a prefill worker
    second_prefill: float = 1.0  # a prefill step beside another prefill worker; 1: not measured
    second_decode: float = 1.0  # a decode step beside another decode worker


@dataclass(frozen=True, slots=True)
class BurstMeans:
    """Means of prompts that were sent at once; without lengths nothing was measured."""

    prompt_tokens: tuple[int, ...] = ()
    output_tokens: int = 0
    ttft_s: float = 0.0
    first_interval_s: float = 0.0  # from the first token to the second
    step_s: float = 0.0  # between all later ones


@dataclass(frozen=True, slots=True)
class PrefixSources:
    """The rate of a prefix that a prefill worker's own DRAM lacks; 0: not measured."""

    node_bytes_per_s: float = 0.0  # from another node
    node_path: str = ""  # its transport: mapped, nixl or tcp
    ssd_bytes_per_s: float = 0.0  # from the SSD of the own node


# Parameters of a worker that decide its speed and that a planned worker repeats.
OF_ENGINE = (
    "checkpoint",
    "engine",
    "engine_python",
    "dtype",
    "kv_dtype",
    "device",
    "threads",
    "tp_size",
    "page_tokens",
    "llm_options",
    "vllm_options",
)


@dataclass(frozen=True, slots=True)
class Profile:
    machine: str
    settings: Mapping[str, str]  # of the two workers' config.pbtxt: threads, chunk_tokens, ...
    prefill_samples: Sequence[PrefillSample]
    decode_samples: Sequence[DecodeSample]
    serving: Serving
    sharing: Sharing = Sharing()
    burst: BurstMeans = BurstMeans()
    sources: PrefixSources = PrefixSources()

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """ValueError for text that is no profile of this version."""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ValueError(
                    f"version {found['version']}instead of {VERSION}: measure it again"
                )
            return cls(
                found["machine"],
                found["settings"],
                [PrefillSample(*sample) for sample in found["prefill"]["samples"]],
                [DecodeSample(*sample) for sample in found["decode"]["samples"]],
                Serving(**found["serving"]),
                Sharing(**found["sharing"]),
                BurstMeans(tuple(found["burst"].pop("prompt_tokens")), **found["burst"]),
                PrefixSources(**found["sources"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as missing:
            raise ValueError(f"no profile of `mooncake profile`: {missing!r}") from None

    @property
    def chunk_tokens(self) -> int:
        """The longest prefill step; if it is unknown, every prompt is one step."""
        return int(self.settings.get("chunk_tokens", 0)) or 2**31

    @property
    def prefill(self) -> Fit[PrefillEstimate]:
        return fit_prefill([_mean_step(s, self.chunk_tokens) for s in self.prefill_samples])

    def prompt_s(self, new_tokens: int, prefix_tokens: int) -> float:
        estimate, end = self.prefill.estimate, prefix_tokens + new_tokens
        starts = range(prefix_tokens, end, self.chunk_tokens)
        return sum(estimate.seconds(min(self.chunk_tokens, end - at), at) for at in starts)

    @property
    def decode(self) -> Fit[DecodeEstimate]:
        return fit_decode(self.decode_samples)

    def to_json(self) -> str:
        prefills = [(s.new_tokens, s.prefix_tokens, s.seconds) for s in self.prefill_samples]
        decodes = [(s.sequences, s.context_tokens, s.seconds) for s in self.decode_samples]
        return json.dumps(
            {
                "version": VERSION,
                "machine": self.machine,
                "settings": dict(self.settings),
                "prefill": _fitted(self.prefill, prefills),
                "decode": _fitted(self.decode, decodes),
                "serving": asdict(self.serving),
                "sharing": asdict(self.sharing),
                "burst": asdict(self.burst),
                "sources": asdict(self.sources),
            }
        )


def _mean_step(sample: PrefillSample, chunk_tokens: int) -> PrefillSample:
    """The step whose fitted cost is the mean cost of this prompt's steps."""
    steps = -(-sample.new_tokens // chunk_tokens)
    if steps == 1:
        return sample
    new_tokens = sample.new_tokens / steps
    # keys that the mean new token attends to
    seen_by_each = sample.prefix_tokens + sample.new_tokens / 2
    prefix_tokens = seen_by_each - new_tokens / 2
    return PrefillSample(round(new_tokens), round(prefix_tokens), sample.seconds / steps)


def _fitted(
    fit: Fit[PrefillEstimate] | Fit[DecodeEstimate], samples: Sequence[tuple[int, int, float]]
) -> dict[str, Any]:
    return {
        "coefficients": list(fit.estimate.coefficients),
        "error_mean": fit.error_mean,
        "error_max": fit.error_max,
        "samples": [list(sample) for sample in samples],
    }
