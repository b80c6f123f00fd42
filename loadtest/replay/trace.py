"""Reads the request traces that the Mooncake project published (JSON lines).

One request a line: when it came (`timestamp`, ms), how long its prompt and its answer were
(`input_length`, `output_length`, tokens), and one `hash_ids` entry for each 512-token block of the
prompt. An id names the block *and its whole prefix*, so two requests that share their first k ids
share k blocks. `conversation_trace`, `synthetic_trace`, `toolagent_trace` and `mooncake_trace` all
have this format; fields that other tools add (`session_id`, `delay`, ...) are left alone.

At a scale, a prompt keeps all of its blocks, and the last one is cut so that the whole is
`round(input_length x length_scale)` tokens long. Where rounding 512 x scale makes that impossible
(28 blocks of 51 tokens cannot hold 1,434), sharing wins over length: the last block keeps between
one token and all of its tokens.

A line that does not make sense is refused with its position, `FILE:LINE`, and what is wrong: a
trace that is silently repaired measures something else than it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
HASH_ID_MAX = 2**64 - 1


class TraceError(ValueError):
    """The trace file is wrong; the message begins with FILE:LINE."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, in the trace's own units (nothing scaled)."""

    line: int
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaledLengths:
    """A row's lengths at some scale: `block_tokens` for each id, less in the last."""

    block_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def scaled_lengths(row: TraceRow, length_scale: float) -> ScaledLengths:
    assert length_scale > 0, f"length_scale {length_scale} must be positive"
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS * length_scale))
    blocks = len(row.hash_ids)
    prompt_tokens = round(row.input_tokens * length_scale)
    prompt_tokens = min(max(prompt_tokens, (blocks - 1) * block_tokens + 1), blocks * block_tokens)
    return ScaledLengths(
        block_tokens, prompt_tokens, max(1, round(row.output_tokens * length_scale))
    )


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which part of which trace, how fast and large, and the seed of its tokens."""

    path: Path
    requests_max: int | None = None
    length_scale: float = 1.0
    speed: float = 1.0
    seed: int = 0


def read_trace(path: Path, requests_max: int | None = None) -> list[TraceRow]:
    """The first `requests_max` rows of `path` (all by default), in order of arrival.

    Rows are sorted by timestamp, stably: the published files already are, a concatenation of two
    recordings is not.
    """
    assert requests_max is None or requests_max > 0
    rows: list[TraceRow] = []
    for row in _rows(path):
        rows.append(row)
        if len(rows) == requests_max:
            break
    if not rows:
        raise TraceError(f"{path}:1: the trace is empty; expected one JSON object a line")
    return sorted(rows, key=lambda row: row.timestamp_ms)


def _rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            problems: list[str] = []
            row = _parse(text, line, problems)
            if row is None:
                raise TraceError(f"{path}:{line}: " + "; ".join(problems))
            yield row


def _parse(text: str, line: int, problems: list[str]) -> TraceRow | None:
    """The row in `text`, or None with every mistake of the line added to `problems`."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"not JSON: {error.msg} at column {error.colno}")
        return None
    if not isinstance(fields, dict):
        problems.append(f"expected a JSON object, found {type(fields).__name__}")
        return None
    timestamp_ms = _timestamp(fields, problems)
    input_tokens = _count(fields, "input_length", 1, problems)
    output_tokens = _count(fields, "output_length", 0, problems)
    hash_ids = _hash_ids(fields, problems)
    if not problems:
        blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
        if len(hash_ids) != blocks:
            problems.append(
                f"input_length {input_tokens} needs {blocks} hash_ids of {TRACE_BLOCK_TOKENS} "
                f"tokens, found {len(hash_ids)}"
            )
    if problems:
        return None
    return TraceRow(line, timestamp_ms, input_tokens, output_tokens, hash_ids)


def _timestamp(fields: dict[str, Any], problems: list[str]) -> float:
    value: Any = fields.get("timestamp")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value >= 0:
        return float(value)
    problems.append(f"timestamp must be milliseconds >= 0, found {_shown(fields, 'timestamp')}")
    return 0.0


def _count(fields: dict[str, Any], name: str, least: int, problems: list[str]) -> int:
    value = fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    problems.append(f"{name} must be a whole number >= {least}, found {_shown(fields, name)}")
    return 0


def _hash_ids(fields: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    value = fields.get("hash_ids")
    if not isinstance(value, list):
        problems.append(f"hash_ids must be a list, found {_shown(fields, 'hash_ids')}")
        return ()
    for position, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= HASH_ID_MAX:
            problems.append(f"hash_ids[{position}] must be a whole number >= 0, found {item!r}")
            return ()
    return tuple(value)


def _shown(fields: dict[str, Any], name: str) -> str:
    return repr(fields[name])[:60] if name in fields else "nothing"
