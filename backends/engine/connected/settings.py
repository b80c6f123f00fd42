"""Settings that engines with a process of their own have in common.

Not here: the parameters of one engine (its folder), parameters of all workers (config_pbtxt.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Parameters that workers of all engines have."""

    role: str  # prefill | decode
    dtype: str
    block_tokens: int
    kv_pages: int  # of block_tokens tokens
    context_tokens_max: int  # 0: what the checkpoint allows
    requests_max: int  # in one step
    chunk_tokens: int = 0  # computed in one step of prefill
    kv_dtype: str = "auto"  # auto: as the checkpoint asks, else as dtype | fp8

    @property
    def pages_tokens(self) -> int:
        return self.kv_pages * self.block_tokens


def page_problems(worker: Any, of_engine: Any) -> Iterator[str]:
    """Conflicts of parameters. `worker`: a config of config_pbtxt.py, `of_engine`: one with
    page_tokens."""
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
