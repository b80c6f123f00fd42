"""Records the times of one request while it is served, and makes spans of them at its end.

Records are made per request and per attempt (one pair of workers), not per message or token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from backends.tracing.request_spans import (
    AttemptTimes,
    Attribute,
    Call,
    RequestTimeline,
    SpanRecord,
    SpanTree,
)
from backends.tracing.trace_context import TraceContext
from backends.workers.protocol import DecodeReply, PrefillReply


class RequestTrace:
    """Several threads may record. The records of one attempt must be made in order. Records after
    `ended` (of abandoned calls) have no effect."""

    def __init__(
        self,
        root: TraceContext,
        parent_span_id: str,
        arrived_s: float,
        offer: Callable[[list[SpanRecord]], None] | None = None,
    ) -> None:
        """`offer` is called with the spans at the end of the request; None: make no spans."""
        self.trace_id = root.trace_id  # for the log; "": no tracing, and no trace of the client
        self._root = root
        self._parent_span_id = parent_span_id
        self._to_unix_s = time.time() - time.monotonic()
        self._offer = offer
        self._times = RequestTimeline(arrived_s)
        self._attempts: dict[int, AttemptTimes] = {}

    @property
    def is_on(self) -> bool:
        return self._offer is not None

    def read(self, now_s: float, attributes: Mapping[str, Attribute]) -> None:
        """Record that the prompt was checked and tokenised."""
        self._times.read_s = now_s
        self._times.attributes |= attributes

    def attempt_began(self, number: int, now_s: float) -> None:
        self._attempts[number] = AttemptTimes(number, now_s)

    def decided(self, number: int, now_s: float, fields: Mapping[str, Any], why: str) -> None:
        """Record a decision. `fields`: its terms. `why`: reason of a rejection; "": accepted."""
        attempt = self._attempts[number]
        attempt.decision = dict(flat("mooncake.decision", fields))
        attempt.decided_s, attempt.rejection = now_s, why

    def called(self, number: int, worker: str, now_s: float, is_decode: bool = False) -> None:
        """Record a call to a worker."""
        attempt = self._attempts[number]
        if is_decode:
            attempt.decode = Call(worker, now_s)
        else:
            attempt.prefill = Call(worker, now_s)

    def prefilled(self, number: int, reply: PrefillReply, now_s: float) -> None:
        attempt = self._attempts[number]
        assert attempt.prefill is not None
        attempt.prefill.ended_s, attempt.prefill_reply = now_s, reply

    def decoded(self, number: int, reply: DecodeReply, now_s: float) -> None:
        attempt = self._attempts[number]
        assert attempt.decode is not None
        attempt.decode.ended_s, attempt.decode_reply = now_s, reply

    def call_failed(self, number: int, now_s: float) -> None:
        attempt = self._attempts[number]
        if (call := attempt.decode or attempt.prefill) is not None:
            call.ended_s = now_s

    def lost(self, number: int, loss: str, error: str, now_s: float) -> None:
        """Record that an attempt failed; another may follow. `loss`: the kind of failure."""
        attempt = self._attempts.get(number)
        if attempt is not None and attempt.ended_s is None:
            attempt.loss, attempt.error, attempt.ended_s = loss, error, now_s

    def ended(
        self, error: str, now_s: float, first_token_s: float, attributes: Mapping[str, Attribute]
    ) -> None:
        """Make the spans, at the first call only. `first_token_s`: 0 if there was no token."""
        offer, self._offer = self._offer, None
        if offer is None:
            return
        times = self._times
        times.error, times.ended_s, times.first_token_s = error, now_s, first_token_s or None
        times.attributes |= attributes
        times.attempts = [replace(attempt) for attempt in list(self._attempts.values())]
        tree = SpanTree(self._root, self._parent_span_id, self._to_unix_s, new_span_id)
        offer(tree.of(times))


def flat(name: str, value: object) -> Iterator[tuple[str, Attribute]]:
    """Flatten nested mappings to attributes of a span: dotted names, other values as JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}", inner)
    elif isinstance(value, str | bool | int | float):
        yield name, value
    elif value is not None:
        yield name, json.dumps(value, default=str)


def new_span_id() -> str:
    return os.urandom(8).hex()
