"""Settings that engines with a process of their own have in common.

Not here: the parameters of one engine (its folder), parameters of all workers (config_pbtxt.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import ConfigError

PREFILL_BATCH_MAX = 64  # prompts in a step; chunk_tokens bounds their tokens
DECODE_STEP_TOKENS_MIN = 2048  # a step computes the last tokens of so many prompts
# Option -> (its only allowed values, the reason).
AllowedValues = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Parameters that workers of all engines have."""

    role: str  # prefill | decode | both
    dtype: str
    block_tokens: int
    kv_pages: int  # of block_tokens tokens
    context_tokens_max: int  # 0: what the checkpoint allows
    requests_max: int  # in one step
    chunk_tokens: int = 0  # computed in one step of prefill; 0: the engine only decodes
    kv_dtype: str = "auto"  # auto: as the checkpoint asks, else as dtype | fp8

    @property
    def pages_tokens(self) -> int:
        return self.kv_pages * self.block_tokens

    @property
    def step_requests_max(self) -> int:
        """Most requests in a step."""
        is_prefill = self.role == "prefill"
        return min(PREFILL_BATCH_MAX, self.requests_max) if is_prefill else self.requests_max

    @property
    def step_tokens_max(self) -> int:
        """Most tokens in a step."""
        return self.chunk_tokens or max(DECODE_STEP_TOKENS_MIN, self.requests_max)


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError with all of them, if there are any."""
    if problems:
        raise ConfigError("\n".join(f"  - {line}" for line in problems))


def device_problems(gpus: str, tp_size: int, page_tokens: int) -> Iterator[str]:
    """Mistakes in parameters that engines with ranks and pages have in common."""
    devices = gpus.split(",") if gpus else []
    if not all(device.strip().isdecimal() for device in devices):
        yield f"gpus is {gpus!r}; use CUDA device numbers, 0 or 0,1 say"
    if tp_size < 1:
        yield f"tp_size is {tp_size}; use 1, or the number of GPUs"
    elif devices and len(devices) != tp_size:
        yield f"gpus names {len(devices)} devices, tp_size is {tp_size}"
    if page_tokens < 1 or page_tokens & (page_tokens - 1):
        yield f"page_tokens is {page_tokens}; use a power of two, 32 is usual"


def visible_devices(environment: Mapping[str, str], gpus: str) -> str:
    """CUDA_VISIBLE_DEVICES for the devices `gpus`, numbered as this process sees them; "": all.
    Raises ValueError."""
    if not gpus:
        return ""
    wanted = [int(device) for device in gpus.split(",")]
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible and max(wanted) >= len(visible):
        raise ValueError(f"gpus is {gpus}, but this process sees only {','.join(visible)}")
    return ",".join(visible[device] if visible else str(device) for device in wanted)


def page_problems(*configs: Any) -> Iterator[str]:
    """Conflicts of parameters. The first of `configs` is of config_pbtxt.py, the last has
    page_tokens."""
    worker, of_engine = configs[0], configs[-1]
    if of_engine.page_tokens > 0 and worker.block_tokens % of_engine.page_tokens:
        yield (
            f"block_tokens ({worker.block_tokens}) must be a multiple of page_tokens "
            f"({of_engine.page_tokens}): a block is moved in whole pages"
        )


def context_problems(spec: EngineSpec, of_model: int, model: str) -> Iterator[str]:
    """`of_model`: longest prompt and output in tokens that the checkpoint allows."""
    asked, of_pages = spec.context_tokens_max, spec.pages_tokens
    if asked > of_model:
        yield (
            f"context_tokens_max is {asked}, but {model} allows {of_model}; lower it or leave it 0"
        )
    if asked > of_pages:
        yield (
            f"context_tokens_max is {asked}, but the pages of kv_bytes hold {of_pages}; lower it, "
            "leave it 0, or raise kv_bytes"
        )


def flat_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each option, and each key of an option that is an object."""
    for name, value in options.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())


def refused_options(
    parameter: str, options: Mapping[str, Any], said_by: Mapping[str, str], only: AllowedValues
) -> Iterator[str]:
    """Options of `parameter` that another parameter sets (`said_by`), or that have a value that
    `only` does not allow."""
    for name, value in flat_options(options):
        if name in said_by:
            yield f"{parameter} sets {name}; that is said by {said_by[name]}"
        elif name in only:
            values, why = only[name]
            if value not in values:
                allowed = " or ".join(repr(each) for each in values)
                yield f"{parameter} sets {name} to {value!r}; only {allowed}: {why}"


def read_options(parameter: str, text: str, repository: str, found: list[str]) -> dict[str, Any]:
    """`text` is a JSON object or a path, relative to the folder of the model repository. Appends a
    problem to `found`."""
    if not text:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            path = Path(text).expanduser()
            path = path if path.is_absolute() else Path(repository).parent / path
            text = path.read_text("utf-8")
        options = json.loads(text)
        if isinstance(options, dict):
            return options
        problem = f"is {options!r:.40}; it must be a JSON object"
    except OSError as error:
        problem = f"cannot be read: {error}"
    except ValueError as error:
        problem = f"is no JSON: {error}"
    found.append(f"{parameter} {problem}")
    return {}
