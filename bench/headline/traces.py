"""Scales one of Mooncake's published traces to a small model, and keeps its reuse.

Reuse in these traces comes from conversations: a later turn repeats the prompts of earlier turns.
So requests are chosen by whole conversations, in a random order that a seed fixes. A conversation
is all requests that share a block which is not common. A block is common when more than
COMMON_SHARE of all requests have it (a system prompt). A conversation that exceeds the model's
context is left out.

Published timestamps have steps of up to three seconds. Requests of one timestamp are spread evenly
over the time until the next one. Then times are stretched to the offered mean rate.

Each cell of the measurement shifts the block ids. Prompts of two cells thus share nothing, and a
server that serves several cells begins each without a usable cache entry.

Pure. Not here: reading a trace file (loadtest/replay/trace.py), making tokens (the client does).
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.replay.trace import TraceRow

# With 16 and 8, an idle vLLM on two slow cores (SmolLM2-135M) answers only 77 % of the requests
# within 2 s, and 120 requests take it ten minutes.
LENGTHS_DIVISOR, ANSWERS_DIVISOR = 32, 16
BLOCK_TOKENS = 16  # 512 / LENGTHS_DIVISOR
COMMON_SHARE = 0.05
CELL_IDS = 10**9  # ids of a cell begin at a multiple of this


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One scaled request; `at_s` counts from the first request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def conversations(
    rows: Sequence[TraceRow], common_share: float = COMMON_SHARE
) -> list[list[TraceRow]]:
    """The rows by conversation, each in the order of arrival."""
    counts = Counter(block for row in rows for block in row.hash_ids)
    common = {block for block, count in counts.items() if count > common_share * len(rows)}
    found: dict[int, list[TraceRow]] = defaultdict(list)
    for row in rows:
        own = next((block for block in row.hash_ids if block not in common), None)
        found[-row.line if own is None else own].append(row)
    return list(found.values())


def chosen(
    rows: Sequence[TraceRow],
    requests: int,
    context_tokens_max: int,
    seed: int,
    common_share: float = COMMON_SHARE,
) -> list[TraceRequest]:
    """`requests` scaled requests of whole conversations, at 1 request/s on average.

    ValueError when the trace has too few conversations that fit."""
    spread_ms = _spread_ms(rows)
    groups = conversations(rows, common_share)
    random.Random(seed).shuffle(groups)
    kept: list[TraceRow] = []
    for group in groups:
        fits = all(_tokens(row) <= context_tokens_max for row in group)
        if fits and len(kept) + len(group) <= requests:
            kept += group
    if len(kept) < requests:
        raise ValueError(
            f"the trace has only {len(kept)} requests in whole conversations of at most "
            f"{context_tokens_max} tokens, {requests} are needed; lower --requests"
        )
    kept.sort(key=lambda row: spread_ms[row.line])
    begin_ms = spread_ms[kept[0].line]
    length_ms = max(spread_ms[kept[-1].line] - begin_ms, 1e-9)
    last_s = float(len(kept) - 1)
    return [_scaled(row, (spread_ms[row.line] - begin_ms) / length_ms * last_s) for row in kept]


def at_rate(
    requests: Sequence[TraceRequest], rate_per_s: float, cell: int = 0
) -> list[TraceRequest]:
    """The requests at another mean rate, with the block ids of cell number `cell`."""
    assert rate_per_s > 0, f"rate_per_s {rate_per_s} must be positive"
    return [
        replace(
            request,
            at_s=request.at_s / rate_per_s,
            block_ids=tuple(cell * CELL_IDS + block for block in request.block_ids),
        )
        for request in requests
    ]


def to_lines(requests: Sequence[TraceRequest]) -> str:
    """The file that `vllm bench serve --dataset-name timed_trace` reads; timestamps in seconds."""
    return "".join(
        json.dumps(
            {
                "timestamp": round(request.at_s, 4),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.block_ids),
            }
        )
        + "\n"
        for request in requests
    )


def reusable_share(requests: Sequence[TraceRequest]) -> float:
    """Share of the prompts' tokens that an unlimited prefix cache would find, in whole blocks."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        for number, block in enumerate(request.block_ids):
            if block not in seen:
                break
            found += min(BLOCK_TOKENS, request.prompt_tokens - number * BLOCK_TOKENS)
        seen.update(request.block_ids)
    return found / max(1, sum(request.prompt_tokens for request in requests))


def probes(lengths_tokens: Sequence[int], repeats: int, output_tokens: int) -> list[TraceRequest]:
    """Requests for an idle server, which share nothing. Send one at a time."""
    found: list[TraceRequest] = []
    block = 0
    for tokens in lengths_tokens:
        for _ in range(repeats):
            blocks = -(-tokens // BLOCK_TOKENS)
            ids = tuple(range(block, block + blocks))
            found.append(TraceRequest(0.01 * len(found), tokens, output_tokens, ids))
            block += blocks
    return found


def _tokens(row: TraceRow) -> int:
    scaled = _scaled(row, 0.0)
    return scaled.prompt_tokens + scaled.output_tokens


def _scaled(row: TraceRow, at_s: float) -> TraceRequest:
    """The last block holds between one token and all of its own: sharing comes first."""
    blocks = len(row.hash_ids)
    tokens = round(row.input_tokens / LENGTHS_DIVISOR)
    tokens = min(max(tokens, (blocks - 1) * BLOCK_TOKENS + 1), blocks * BLOCK_TOKENS)
    answer = max(1, round(row.output_tokens / ANSWERS_DIVISOR))
    return TraceRequest(at_s, tokens, answer, row.hash_ids)


def _spread_ms(rows: Sequence[TraceRow]) -> dict[int, float]:
    """The arrival of each line: requests of one timestamp share the time until the next one."""
    ticks: dict[float, list[int]] = defaultdict(list)
    for row in rows:
        ticks[row.timestamp_ms].append(row.line)
    times = sorted(ticks)
    ends = [*times[1:], times[-1] + (times[-1] - times[-2] if len(times) > 1 else 1.0)]
    return {
        line: at + (end - at) * number / len(ticks[at])
        for at, end in zip(times, ends, strict=True)
        for number, line in enumerate(ticks[at])
    }
