"""The spans of one request, from its recorded times. Pure.

    request                       arrival at the frontend to the end of the answer
      read                        the prompt is checked and tokenised
      attempt                     one for each decision, with its loss if it was lost
        decide                    the conductor's choice and its terms, or the rejection
        prefill                   the call to the prefill worker, and in it:
          prefill.queue           waits for pages, a loader and other prompts
          prefill.load            loads the cached prefix
          prefill.wait            until the engine computes the prompt
          prefill.compute         from the first chunk to the first token
          prefill.put             stores KV that was not in the store by then
        handover                  from prefill's reply until the decode worker's batch has it
          handover.queue, handover.load
        decode                    until the last token

A worker reports the durations of its phases, so clocks of two machines are never compared. The rest
of a prefill call's time is network time, half before and half after the phases. The phases of a
handover begin with the decode call. Each child span is cut to its parent.

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
    """One span, ready to be sent."""

    name: str
    context: TraceContext
    parent_span_id: str  # "": the span has no parent
    start_ns: int  # Unix time
    end_ns: int
    kind: str = "internal"  # server, client or internal
    service: str = FRONTEND
    instance: str = ""  # the worker's name; "": the frontend
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # "": success
    events: tuple[tuple[str, int], ...] = ()  # name, Unix time in ns


@dataclass(slots=True)
class Call:
    """A call to a worker, on this process' clock. `ended_s` None: no reply and no failure yet."""

    worker: str
    began_s: float
    ended_s: float | None = None


@dataclass(slots=True)
class AttemptTimes:
    """The recorded times of one attempt, in seconds of the monotonic clock."""

    number: int
    began_s: float
    decided_s: float | None = None
    decision: Attributes = field(default_factory=dict)
    rejection: str = ""
    prefill: Call | None = None
    prefill_reply: PrefillReply | None = None
    decode: Call | None = None
    decode_reply: DecodeReply | None = None
    ended_s: float | None = None  # None: the attempt ends with the request
    loss: str = ""
    error: str = ""


@dataclass(slots=True)
class RequestTimeline:
    """The recorded times of one request, in seconds of the monotonic clock."""

    arrived_s: float
    read_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    attempts: list[AttemptTimes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpanTree:
    """Builds the spans of a request: parents before children, each child within its parent."""

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
        """Without a reply, the time of joining the batch is unknown, so `decode` is the call."""
        reply, until_s = times.decode_reply, _end(call)
        worker: Attributes = {"mooncake.worker": call.worker}
        joined_s = call.began_s
        if reply is not None:
            loaded_from_s = call.began_s + reply.queue_s
            joined_s = min(loaded_from_s + reply.load_s, until_s)
            handed_over_s = times.prefill.ended_s if times.prefill is not None else None
            began_s = call.began_s if handed_over_s is None else handed_over_s
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
        """A frontend's span without attributes, cut to `parent`. `end_s` inf: end of `parent`."""
        start_ns = min(max(self._ns(start_s), parent.start_ns), parent.end_ns)
        end_ns = parent.end_ns
        if end_s < math.inf:
            end_ns = min(max(self._ns(end_s), start_ns), parent.end_ns)
        context = TraceContext(self.root.trace_id, self.new_span_id(), True)
        return SpanRecord(name, context, parent.context.span_id, start_ns, end_ns)

    def _ns(self, at_s: float) -> int:
        return round((at_s + self.to_unix_s) * 1e9)


def prefill_phases(reply: PrefillReply) -> list[tuple[str, float, float]]:
    """(name, from, until) of each phase, in seconds after the worker received the prompt."""
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
    """Infinity for a call that has not ended: its span ends with the attempt."""
    return math.inf if call.ended_s is None else call.ended_s


def _error(attempt: SpanRecord, reply: PrefillReply | DecodeReply | None) -> str:
    return "" if reply is not None else attempt.error or "it has not replied"


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
