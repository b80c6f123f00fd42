"""One request in a simulated cluster: what was offered, what was decided, and its result.

Records only. Workers of every kind work on a `SimulatedJob`; `outcome_of` (outcome.py) reads it
after the run. The published traces have timestamps on 3-second ticks, about ten prompts at one
instant, so most of a TTFT at recorded speed is queueing inside a tick. `spread_ticks` spreads them
evenly until the next tick, so that results show the effect of a policy instead of the ticks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from conductor.messages import Reject, Request, Route
from loadtest.replay.trace import TRACE_BLOCK_TOKENS, ScaledLengths, TraceRow, scaled_lengths
from loadtest.simulator.block_cache import key_of

TICK_MS = 3_000.0
STOPPED = "stopped"  # why a worker ended a job that its client cancelled


@dataclass(frozen=True, slots=True)
class Offered:
    """One request of a trace, ready to be sent: its block keys are computed once for many runs."""

    number: int  # position in the trace
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]  # of the full blocks


def offered_of(
    rows: Sequence[TraceRow], block_tokens: int = TRACE_BLOCK_TOKENS, length_scale: float = 1.0
) -> list[Offered]:
    """Requests with the engine's block keys, as long as `mooncake replay` sends them at this scale.
    The first arrives at 0 s, because a rotated recording begins late."""
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
    """Keys of an engine's full blocks. A trace id names its block and all before, so the id of its
    last token and its end in that id's block identify an engine block."""
    if lengths.block_tokens == block_tokens:
        return [key_of(one) for one in hash_ids[: lengths.prompt_tokens // block_tokens]]
    keys = []
    for end in range(block_tokens, lengths.prompt_tokens + 1, block_tokens):
        at, offset = divmod(end - 1, lengths.block_tokens)
        keys.append(key_of((hash_ids[at] * lengths.block_tokens + offset) % 2**64))
    return keys


def spread_ticks(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Spread the requests of each instant evenly until the next instant, or over one tick."""
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
    """Times are seconds of the virtual clock; None: the request did not get so far."""

    number: int  # position in the trace
    request: Request  # length of its answer, in tokens
    output_tokens: int  # length of its answer, in tokens
    arrived_s: float
    attempts: int = 1
    route: Route | None = None
    prefill: str = ""  # the worker that computes its prompt
    decode: str = ""  # the worker that generates its answer
    reject: Reject | None = None
    refused: str = ""  # why the decode worker or an engine refused it; "": not refused
    started_s: float | None = None  # start of its first chunk
    cached_tokens: int = 0
    fetched_blocks: int = 0
    restored_blocks: int = 0  # blocks from the SSD of the prefill worker's own node
    compute_s: float = 0.0  # seconds of all prefill steps with a chunk of this request
    own_compute_s: float = 0.0  # its share of compute_s, by new tokens
    lost_compute_s: float = 0.0  # part of own_compute_s that was lost with workers that died
    load_began_s: float | None = None  # start of its prefix lookup
    loading_s: float = 0.0  # from load_began_s until its prefix was in the engine's pages
    prefilled_s: float | None = None  # its first token was computed
    # First token, including the part of the hand-over to decode that prefill did not hide. Dynamo's
    # engine computes the first token in decode.
    first_token_s: float | None = None
    joined_s: float | None = None  # start of its first decode step
    preemptions: int = 0  # times it was preempted from the running batch
    finished_s: float | None = None
    tbt_s: float = 0.0  # mean of the longest 10 % of its token intervals
    tbt_decode_s: float = 0.0  # the same without the first interval, from prefill to decode

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
        """Time to first token; only of a request that has one."""
        assert self.first_token_s is not None, f"{self.request_id} has no first token"
        return self.first_token_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens of a finished request; 0 for an answer of one token."""
        assert self.finished_s is not None and self.first_token_s is not None, self.request_id
        steps = self.output_tokens - 1
        return (self.finished_s - self.first_token_s) / steps if steps else 0.0
