"""The latest routing decisions of a frontend, with predictions and outcomes but without prompts.

Listing the best pairs of workers takes time. So they are listed only for clients that request them
(`return_decision`), and for at most one other decision every EXPLAIN_EVERY_S seconds.

Thread-safe. Not here: deciding (conductor/), the JSON of decisions (fields.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from conductor.messages import Explanation, Reject, Request, Route

DECISIONS_MAX = 32
CANDIDATES_MAX = 6  # candidate pairs kept of each decision
EXPLAIN_EVERY_S = 0.5
HASH_BYTES_SHOWN = 6  # enough to distinguish prefixes
NOT_EXPLAINED = Explanation((), 0)


@dataclass(frozen=True, slots=True)
class Decided:
    """A route, as the client receives it."""

    route: Route
    decided_at_s: float  # monotonic time of the decision
    explained: Explanation = NOT_EXPLAINED  # set only if the client requested the best pairs


@dataclass(slots=True)
class DecisionRecord:
    """The decision on one attempt of a request, and the outcome of the attempt so far."""

    at_s: float  # monotonic time of the decision
    request: Request  # without its block keys
    blocks: int  # whole blocks of the prompt
    prefix: str  # short hash of all whole blocks of the prompt; "" without a whole block
    decision: Decided | Reject
    explained: Explanation  # for status pages; also set for some requests without `return_decision`
    cached_tokens: int | None = None  # None before the prefill reply
    prefill_s: float = 0.0  # seconds of prefill computation; 0.0 before the prefill reply
    first_token_s: float = 0.0  # seconds from the decision to the prefill reply; 0.0 before it


class LatestDecisions:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, DecisionRecord] = {}  # request_id of an attempt; oldest first
        self._explained_s = float("-inf")

    def wants_candidates(self, now_s: float) -> bool:
        """Whether to list pairs for status pages; at most once every EXPLAIN_EVERY_S seconds."""
        with self._lock:
            if now_s - self._explained_s < EXPLAIN_EVERY_S:
                return False
            self._explained_s = now_s
            return True

    def add(
        self, request: Request, decision: Decided | Reject, explained: Explanation, now_s: float
    ) -> None:
        keys, candidates = request.block_keys, explained.candidates
        left_out = explained.left_out + max(0, len(candidates) - CANDIDATES_MAX)
        record = DecisionRecord(
            at_s=now_s,
            request=replace(request, block_keys=()),
            blocks=len(keys),
            prefix=short_hash(keys[-1]) if len(keys) else "",
            decision=decision,
            explained=Explanation(candidates[:CANDIDATES_MAX], left_out),
        )
        with self._lock:
            self._records.pop(request.request_id, None)
            self._records[request.request_id] = record
            if len(self._records) > DECISIONS_MAX:
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
