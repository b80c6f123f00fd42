"""The latest decisions of a frontend, with their terms and outcomes. Numbers and hashes only.

A bounded ring, written at each decision. Listing the other pairs costs time. So they are listed for
a client that requests them (`return_decision`), and otherwise for one decision every
EXPLAIN_EVERY_S.

Thread-safe. Not here: deciding (conductor/), the JSON of decisions (fields.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.messages import Candidate, Explanation, Reject, Request, Route

DECISIONS_MAX = 32
CANDIDATES_MAX = 6  # candidate pairs kept of each decision
EXPLAIN_EVERY_S = 0.5
HASH_BYTES_SHOWN = 6  # enough to tell prefixes apart


@dataclass(frozen=True, slots=True)
class Decided:
    """A route and the candidates it was chosen from."""

    route: Route
    decided_at_s: float  # on the clock of route.order_key_s
    candidates: Sequence[Candidate] = ()  # the best ones; empty unless requested
    candidates_left_out: int = 0  # further candidates


@dataclass(slots=True)
class DecisionRecord:
    """The decision on one attempt of a request, and its outcome so far."""

    at_s: float  # monotonic time of the decision
    request_id: str
    tenant: str
    prompt_tokens: int
    output_tokens_max: int
    priority: int
    is_resumed: bool
    blocks: int  # whole blocks of the prompt
    prefix: str  # short hash of the last whole block and all before it; "" without a whole block
    decision: Decided | Reject
    candidates: Sequence[Candidate] = ()
    candidates_left_out: int = 0
    cached_tokens: int | None = None  # None until prefill has ended, as the next two
    prefill_s: float = 0.0  # seconds of prefill computation
    first_token_s: float = 0.0  # seconds from the decision to the first token


class LatestDecisions:
    def __init__(self, count_max: int = DECISIONS_MAX) -> None:
        self._lock = threading.Lock()
        self._count_max = count_max
        self._records: dict[str, DecisionRecord] = {}  # attempt's id -> record, oldest first
        self._explained_s = float("-inf")

    def wants_candidates(self, now_s: float) -> bool:
        """Whether to list the pairs of the next decision; True at most every EXPLAIN_EVERY_S."""
        with self._lock:
            if now_s - self._explained_s < EXPLAIN_EVERY_S:
                return False
            self._explained_s = now_s
            return True

    def add(
        self, request: Request, decision: Decided | Reject, explained: Explanation, now_s: float
    ) -> None:
        keys = request.block_keys
        record = DecisionRecord(
            at_s=now_s,
            request_id=request.request_id,
            tenant=request.tenant,
            prompt_tokens=request.prompt_tokens,
            output_tokens_max=request.output_tokens_max,
            priority=request.priority,
            is_resumed=request.is_resumed,
            blocks=len(keys),
            prefix=short_hash(keys[-1]) if len(keys) else "",
            decision=decision,
            candidates=explained.candidates[:CANDIDATES_MAX],
            candidates_left_out=explained.left_out
            + max(0, len(explained.candidates) - CANDIDATES_MAX),
        )
        with self._lock:
            self._records.pop(request.request_id, None)
            self._records[request.request_id] = record
            if len(self._records) > self._count_max:
                del self._records[next(iter(self._records))]

    def prefilled(self, request_id: str, cached_tokens: int, seconds: float, now_s: float) -> None:
        with self._lock:
            if (record := self._records.get(request_id)) is not None:
                record.cached_tokens, record.prefill_s = cached_tokens, seconds
                record.first_token_s = now_s - record.at_s

    def newest_first(self) -> list[DecisionRecord]:
        with self._lock:
            return list(reversed(self._records.values()))


def short_hash(key: bytes) -> str:
    return bytes(key[:HASH_BYTES_SHOWN]).hex()
