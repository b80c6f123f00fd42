"""Messages between a worker and the process that runs vLLM's AsyncLLM.

The process gets a `Setup` as JSON on its standard input, and ends when that is closed: so it never
outlives its worker. It describes the KV, gets `Begin` with the worker's sizes, and starts vLLM.

Not here: KV, which vLLM's own processes copy (../connected/messages.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.token_logprobs import TokenLogprobs


class Setup(msgspec.Struct, frozen=True):
    address: str  # ipc address of the worker's inbox; the process's own has OWN behind it
    arguments: dict[str, Any]  # of AsyncEngineArgs


OWN = "-llm"

# -- from the worker


class Begin(msgspec.Struct, tag="begin", frozen=True):
    arguments: dict[str, Any]  # further ones, which depend on the description
    environment: dict[str, str]  # of vLLM's processes


class Generate(msgspec.Struct, tag="generate", frozen=True):
    number: int  # names the generation in this channel
    request_id: str  # the worker's; "": nothing is staged for it
    token_ids: bytes  # little-endian uint32
    sampling: dict[str, Any]  # of vLLM's SamplingParams
    cache_salt: str = ""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    number: int


# -- from the process


class DescribedKv(msgspec.Struct, tag="described", frozen=True):
    """What vLLM makes of the checkpoint and the arguments."""

    version: str
    architecture: str
    layers: int
    hidden: int
    kv_heads: int  # of all ranks; 1 with latent attention
    head_dim: int
    is_latent: bool
    kv_dtype: str  # float32 | bfloat16 | float16 | fp8
    page_tokens: int
    vocabulary_tokens: int
    context_tokens_max: int
    platform: str  # cpu | cuda | ...
    pages_id: str  # all that decides the bytes of a page, but the checkpoint
    windows: bool  # layers with a sliding window keep all tokens


class Started(msgspec.Struct, tag="started", frozen=True):
    pass


class VllmFailed(msgspec.Struct, tag="failed", frozen=True):
    """vLLM did not start, or has died."""

    reason: str


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one generation."""

    number: int
    token_ids: list[int]
    finish_reason: str = ""  # stop | length | abort | error; "": it goes on
    error: str = ""
    is_refused: bool = False  # the error is the request's
    logprobs: list[TokenLogprobs] = []  # of each of `token_ids`, if requested


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """The news of one step."""

    news: list[Output]


class StepNumbers(msgspec.Struct, tag="stats", frozen=True):
    """Numbers of vLLM's newest step."""

    step_s: float  # since the step before, if there was work; 0: unknown
    running: int
    waiting: int
    kv_usage: float  # share of the pages that are in use
    cached_tokens: int  # of its own prefix cache, since the start
    prompt_tokens: int  # computed or cached, since the start
    preempted: int  # requests, since the start


FromWorker = Begin | Generate | Abort
FromProcess = DescribedKv | Started | VllmFailed | Outputs | StepNumbers
