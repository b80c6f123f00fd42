"""One request of the trace on its way through Dynamo's engine, and what became of it.

Not here: the workers that move it on (prefill_worker.py, decode_worker.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.replay.trace import TraceRow
from loadtest.simulator.dynamo.timing import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class Job:
    """Times in seconds of the virtual clock; NaN: it has not happened."""

    line: int  # of the trace
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]  # of the full blocks of its prompt
    prefill: int = -1  # numbers of its workers
    decode: int = -1
    order_key_s: float = 0.0  # the least goes first in a prefill worker's queue

    cached_tokens: int = 0  # found when its prefill was first scheduled
    computed_tokens: int = 0  # of the prompt, the cached ones included
    started_s: float = math.nan
    prefilled_s: float = math.nan
    joined_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    prefill_blocks: list[int] = field(default_factory=list)
    decode_blocks: list[int] = field(default_factory=list)
    decode_number: int = -1  # among those that its decode worker took over
    generated_tokens: int = 0
    kv_tokens: int = 0  # of prompt and answer, whose KV its decode worker has
    preemptions: int = 0
    is_rejected: bool = False

    @classmethod
    def of(cls, row: TraceRow, arrived_s: float) -> Job:
        full = row.input_tokens // BLOCK_TOKENS
        return cls(row.line, arrived_s, row.input_tokens, max(1, row.output_tokens),
                   row.hash_ids[:full])  # fmt: skip

    @property
    def hittable(self) -> Sequence[int]:
        """The keys that may be found cached: the last token of a prompt is always computed."""
        return self.keys[: (self.prompt_tokens - 1) // BLOCK_TOKENS]

    @property
    def tokens(self) -> int:
        """Of the prompt and what was generated; the KV of the last one need not be there yet."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens; 0 for an answer of one token."""
        steps = self.output_tokens - 1
        return (self.finished_s - self.first_token_s) / steps if steps else 0.0
