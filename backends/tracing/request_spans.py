"""The spans of one request, from its recorded times. Pure.

    request                       from the arrival at the frontend to the end of the answer
      read                        checking and tokenising the prompt
      attempt                     one decision and its pair of workers
        decide                    the conductor's decision and its terms
        prefill                   the call to the prefill worker; in this worker:
          prefill.queue           wait for pages, a loader thread and other prompts
          prefill.load            load the cached prefix
          prefill.wait            wait until the engine computes the prompt
          prefill.compute         from the first chunk to the first token
          prefill.put             after the first token: write the remaining KV to the store
        handover                  from the prefill reply until the request joins a decode batch
          handover.queue, .load   from the decode call on: wait for pages; read the KV
        decode                    from the end of the handover until the decode worker's reply

A worker reports only durations, so clocks of two machines are never compared. The time of a prefill
call beyond these durations is attributed to the network: half before and half after the worker's
phases. Each child span is cut to its parent. If a decode call has no reply, there is no handover
span, and the decode span is the whole call.

Not here: recording the times (request_trace.py), sending spans (export.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from backends.tracing.trace_context import TraceContext
from backends.workers.protocol import DecodeReply, PrefillReply

Attribute = str | bool | int | float
Attributes = Mapping[str, Attribute]
NO_ATTRIBUTES: Attributes = {}
FRONTEND, PREFILL, DECODE = "mooncake-frontend", "mooncake-prefill", "mooncake-decode"


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span of OpenTelemetry."""

    name: str
    context: TraceContext
    parent_span_id: str  # "": the span has no parent
    start_ns: int  # Unix time
    end_ns: int
    kind: str = "internal"  # server, client or internal
    service: str = FRONTEND  # FRONTEND, PREFILL or DECODE
    instance: str = ""  # the worker's name; "": the frontend
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # "": success
    events: tuple[tuple[str, int], ...] = ()  # (name, Unix time in ns)


@dataclass(slots=True)
class Call:
    """The recorded times of a call to a worker, in seconds of the monotonic clock."""

    worker: str  # name of the worker
    began_s: float
    ended_s: float | None = None  # None: no reply and no failure yet


@dataclass(slots=True)
class AttemptTimes:
    """The recorded times of one attempt, in seconds of the monotonic clock."""

    number: int  # 1 for the first attempt
    began_s: float
    decided_s: float | None = None  # None: no decision was made
    decision: Attributes = field(default_factory=dict)
    rejection: str = ""  # reason; "": not rejected
    prefill: Call | None = None
    prefill_reply: PrefillReply | None = None
    decode: Call | None = None
    decode_reply: DecodeReply | None = None
    ended_s: float | None = None  # None: the attempt ends with the request
    loss: str = ""  # kind of failure (frontend/lifecycle/attempts.py); "": it did not fail
    error: str = ""  # the error of a failed attempt


@dataclass(slots=True)
class RequestTimeline:
    """The recorded times of one request, in seconds of the monotonic clock."""

    arrived_s: float
    read_s: float | None = None  # when the prompt was tokenised; None: not tokenised
    first_token_s: float | None = None  # None: the request has no token
    ended_s: float = 0.0  # 0: not ended yet
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""  # "": success
    attempts: list[AttemptTimes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpanTree:
    """Builds the spans of a request, parents before children."""

    root: TraceContext
    parent_span_id: str  # "": the root span has no parent
    to_unix_s: float  # Unix time minus monotonic time, in seconds
    new_span_id: Callable[[], str]

    def of(self, request: RequestTimeline) -> list[SpanRecord]:
        events: tuple[tuple[str, int], ...] = ()
        if request.first_token_s:
            events = (("first_token", self._ns(request.first_token_s)),)
        root = SpanRecord(
            name="request",
            context=self.root,
            parent_span_id=self.parent_span_id,
            start_ns=self._ns(request.arrived_s),
            end_ns=self._ns(request.ended_s),
            kind="server",
            attributes=request.attributes,
            error=request.error,
            events=events,
        )
        found = [root]
        read_s = request.ended_s if request.read_s is None else request.read_s
        found.append(self._child(root, "read", request.arrived_s, read_s))
        for attempt in request.attempts:
            found += self._of_attempt(root, request, attempt)
        return found

    def _of_attempt(
        self, root: SpanRecord, request: RequestTimeline, times: AttemptTimes
    ) -> Iterator[SpanRecord]:
        ended_s = request.ended_s if times.ended_s is None else times.ended_s
        error = times.error or times.loss or ("" if times.decode_reply else request.error)
        noted: dict[str, Attribute] = {"mooncake.attempt": times.number}
        if times.loss:
            noted["mooncake.loss"] = times.loss
        attempt = self._child(root, "attempt", times.began_s, ended_s)
        attempt = replace(attempt, attributes=noted, error=error)
        yield attempt
        decided_s = ended_s if times.decided_s is None else times.decided_s
        decide = self._child(attempt, "decide", times.began_s, decided_s)
        yield replace(decide, attributes=times.decision, error=times.rejection)
        if times.prefill is not None:
            yield from self._of_prefill(attempt, times.prefill, times)
        if times.decode is not None:
            yield from self._of_decode(attempt, times.decode, times)

    def _of_prefill(
        self, attempt: SpanRecord, call: Call, times: AttemptTimes
    ) -> Iterator[SpanRecord]:
        reply = times.prefill_reply
        span = replace(
            self._child(attempt, "prefill", call.began_s, _end(call)),
            kind="client",
            attributes={"mooncake.worker": call.worker, **_prefill_attributes(reply)},
            error=_error(attempt, reply),
        )
        yield span
        if reply is None:
            return
        began_s = call.began_s + _way_there_s(call, reply)
        for name, from_s, until_s in prefill_phases(reply):
            phase = self._child(span, f"prefill.{name}", began_s + from_s, began_s + until_s)
            yield replace(phase, service=PREFILL, instance=call.worker)

    def _of_decode(
        self, attempt: SpanRecord, call: Call, times: AttemptTimes
    ) -> Iterator[SpanRecord]:
        reply, until_s = times.decode_reply, _end(call)
        worker: Attributes = {"mooncake.worker": call.worker}
        joined_s = call.began_s
        if reply is not None:
            loaded_from_s = call.began_s + reply.queue_s
            joined_s = min(loaded_from_s + reply.load_s, until_s)
            handed_over_s = times.prefill.ended_s if times.prefill is not None else None
            handed_over_s = times.prefill.ended_s if times.prefill is not None else None
            began_s = call.began_s if handed_over_s is None else handed_over_s
            began_s = call.began_s if handed_over_s is None else handed_over_s
            span = self._child(attempt, "handover", min(began_s, call.began_s), joined_s)
            span = self._child(attempt, "handover", min(began_s, call.began_s), joined_s)
            yield replace(span, attributes={**worker, **_handover_attributes(reply)})
            for name, from_s, to_s in (
                ("queue", call.began_s, loaded_from_s),
                ("load", loaded_from_s, joined_s),
            ):
                phase = self._child(span, f"handover.{name}", from_s, to_s)
                yield replace(phase, service=DECODE, instance=call.worker)
        decode = self._child(attempt, "decode", joined_s, until_s)
        yield replace(decode, kind="client", attributes=worker, error=_error(attempt, reply))

    def _child(self, parent: SpanRecord, name: str, start_s: float, end_s: float) -> SpanRecord:
        """A span of the frontend, cut to `parent`. `end_s` inf: the end of `parent`."""
        start_ns = min(max(self._ns(start_s), parent.start_ns), parent.end_ns)
        end_ns = parent.end_ns
        if end_s < math.inf:
            end_ns = min(max(self._ns(end_s), start_ns), parent.end_ns)
        context = TraceContext(self.root.trace_id, self.new_span_id(), True)
        return SpanRecord(name, context, parent.context.span_id, start_ns, end_ns)

    def _ns(self, at_s: float) -> int:
        return round((at_s + self.to_unix_s) * 1e9)


def prefill_phases(reply: PrefillReply) -> list[tuple[str, float, float]]:
    """(name, start, end) of each phase, in seconds after the worker received the request."""
    computed_s = reply.queue_s + reply.load_s + reply.compute_s
    total_s = computed_s + reply.put_s
    load_at_s = min(reply.queue_s if reply.load_at_s < 0 else reply.load_at_s, computed_s)
    loaded_s = min(load_at_s + reply.load_s, computed_s)
    compute_at_s = computed_s - reply.compute_s if reply.compute_at_s < 0 else reply.compute_at_s
    compute_at_s = min(max(compute_at_s, loaded_s), computed_s)
    return [
        ("queue", 0.0, load_at_s),
        ("load", load_at_s, loaded_s),
        ("wait", loaded_s, compute_at_s),
        ("compute", compute_at_s, computed_s),
        ("put", computed_s, total_s),
    ]


def _way_there_s(call: Call, reply: PrefillReply) -> float:
    total_s = reply.queue_s + reply.load_s + reply.compute_s + reply.put_s
    took_s = 0.0 if call.ended_s is None else call.ended_s - call.began_s
    return max(0.0, took_s - total_s) / 2


def _end(call: Call) -> float:
    """End of the call's span. Infinity, for the end of the parent, if the call has not ended."""
    return math.inf if call.ended_s is None else call.ended_s


def _error(attempt: SpanRecord, reply: PrefillReply | DecodeReply | None) -> str:
    return "" if reply is not None else attempt.error or "the worker has not replied"


def _prefill_attributes(reply: PrefillReply | None) -> Attributes:
    if reply is None:
        return NO_ATTRIBUTES
    return {
        "mooncake.cached_tokens": reply.cached_tokens,
        "mooncake.fetched_blocks": reply.fetched_blocks,
        "mooncake.fetched_bytes": reply.fetched_bytes,
        "mooncake.queue_ahead": reply.queue_ahead,
        "mooncake.compute_s": reply.compute_s,
    }


def _handover_attributes(reply: DecodeReply) -> Attributes:
    return {
        "mooncake.loaded_early_blocks": reply.loaded_early_blocks,
        "mooncake.read_bytes": sum(reply.read_bytes.values()),
    }
