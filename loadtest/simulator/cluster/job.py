"""One request on its way through a simulated cluster: what is offered, what is known, what came.

Records only. A `SimulatedJob` is what workers of every kind work on; `outcome_of` (outcome.py)
reads it when all is over. The published traces have their timestamps on 3-second ticks, about ten
prompts at one instant, so most of a TTFT at recorded speed is queueing inside a tick. Spread evenly
until the next tick (`spread_ticks`), the same requests show what a policy does about load instead
of about ticks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from conductor.messages import Reject, Request, Route
from loadtest.replay.trace import (
    TRACE_BLOCK_TOKENS,
    ScaledLengths,
    TraceRow,
    scaled_lengths,
)
from loadtest.simulator.block_cache import key_of

TICK_MS = 3_000.0
STOPPED = "stopped"  # why a worker did not go on with a job that nobody wants any more


@dataclass(frozen=True, slots=True)
class Offered:
    """One request of a trace, ready to be sent: its keys are made once for many runs."""

    number: int  # position in the trace
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]  # of the full blocks


def offered_of(
    rows: Sequence[TraceRow], block_tokens: int = TRACE_BLOCK_TOKENS, length_scale: float = 1.0
) -> list[Offered]:
    """In blocks of the engine, as long as `mooncake replay` sends them at this scale. The first
    comes at 0 s: a recording that was rotated begins late."""
    first_ms = rows[0].timestamp_ms if rows else 0.0
    found = []
    for number, row in enumerate(rows):
        lengths = scaled_lengths(row, length_scale)
        found.append(
            Offered(
                number,
                (row.timestamp_ms - first_ms) / 1e3,
                lengths.prompt_tokens,
                lengths.output_tokens,
                engine_keys(row.hash_ids, lengths, block_tokens),
            )
        )
    return found


def engine_keys(hash_ids: Sequence[int], lengths: ScaledLengths, block_tokens: int) -> list[bytes]:
    """Of the full blocks of an engine. An id names its block and all before it, so a block of the
    engine is known by the id of its last token and where in that id's block it ends."""
    if lengths.block_tokens == block_tokens:
        return [key_of(one) for one in hash_ids[: lengths.prompt_tokens // block_tokens]]
    keys = []
    for end in range(block_tokens, lengths.prompt_tokens + 1, block_tokens):
        at, offset = divmod(end - 1, lengths.block_tokens)
        keys.append(key_of((hash_ids[at] * lengths.block_tokens + offset) % 2**64))
    return keys


def spread_ticks(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """The requests of each instant, evenly until the next instant or for one tick."""
    ticks = [list(found) for _, found in itertools.groupby(rows, lambda row: row.timestamp_ms)]
    spread = []
    for tick, following in itertools.zip_longest(ticks, ticks[1:]):
        start_ms = tick[0].timestamp_ms
        gap_ms = min(following[0].timestamp_ms - start_ms, TICK_MS) if following else TICK_MS
        spread += [
            replace(row, timestamp_ms=start_ms + gap_ms * number / len(tick))
            for number, row in enumerate(tick)
        ]
    return spread


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """Seconds are of the virtual clock; None: it did not come so far."""

    number: int  # position in the trace
    request: Request  # of the current attempt
    output_tokens: int  # what it will have generated when it ends
    arrived_s: float
    attempts: int = 1
    route: Route | None = None
    prefill: str = ""  # the worker that computes its prompt
    decode: str = ""  # the one that generates its answer
    reject: Reject | None = None
    refused: str = ""  # by the decode worker when it came there, or a worker's error
    started_s: float | None = None  # its first chunk began to be computed
    cached_tokens: int = 0
    fetched_blocks: int = 0
    restored_blocks: int = 0  # from the SSD of the prefill worker's own node
    compute_s: float = 0.0  # seconds of the steps that it took part in
    own_compute_s: float = 0.0  # its share of those, by new tokens
    lost_compute_s: float = 0.0  # of that, what workers that died took with them
    load_began_s: float | None = None  # its prefix began to be looked up and brought
    loading_s: float = 0.0  # until its prefix was in the pages of the engine
    prefilled_s: float | None = None  # its first token was computed
    # The first token, with what of the hand-over to decode was not hidden behind prefill. Dynamo's
    # engine computes it in decode.
    first_token_s: float | None = None
    joined_s: float | None = None  # its first decode step began
    preemptions: int = 0  # how often it lost its place in the running batch
    finished_s: float | None = None
    tbt_s: float = 0.0  # mean of the longest 10 % of the intervals between its tokens
    tbt_decode_s: float = 0.0  # the same without the first interval, prefill to decode

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def keys(self) -> Sequence[bytes]:
        return self.request.block_keys

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def is_over(self) -> bool:
        return self.finished_s is not None or self.reject is not None or bool(self.refused)

    @property
    def ttft_s(self) -> float:
        """Of a request with a first token."""
        assert self.first_token_s is not None, f"{self.request_id} has no first token"
        return self.first_token_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Of a finished request: mean time between its tokens; 0 for an answer of one token."""
        assert self.finished_s is not None and self.first_token_s is not None, self.request_id
        steps = self.output_tokens - 1
        return (self.finished_s - self.first_token_s) / steps if steps else 0.0
