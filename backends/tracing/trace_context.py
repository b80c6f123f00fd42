"""The trace that a request belongs to: W3C Trace Context.

A client's `traceparent` header has a trace id, the id of the calling span, and a flag for whether
the trace is sampled. An invalid `traceparent` is ignored, as the standard requires. For a trace
that begins here, the trace id decides, so that every process makes the same decision. This module
does not need OpenTelemetry's packages, because logs have the client's trace id without tracing too.

Pure: random bytes are an argument. Not here: spans (request_spans.py), sending them (export.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TRACEPARENT = "traceparent"  # name of the header, and of the KServe request parameter
SAMPLER_VARIABLE, SHARE_VARIABLE = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
SAMPLERS = ("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio")

_HEADER = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    flags=re.ASCII,
)
_SAMPLED = 0x01
_RATIO_BITS = 56  # number of low bits of a trace id that W3C Trace Context level 2 makes random


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Identity of a span and of its trace."""

    trace_id: str  # 32 hexadecimal digits; "": no trace
    span_id: str  # 16 hexadecimal digits; "": no trace
    is_sampled: bool  # whether the spans of this trace are exported

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_traceparent(given: object) -> TraceContext | None:
    """The context in a traceparent; None if `given` is not a valid traceparent."""
    found = _HEADER.fullmatch(given) if isinstance(given, str) else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return TraceContext(found["trace"], found["span"], is_sampled)


def new_trace(share: float, random_bytes: bytes) -> TraceContext:
    """The first span of a new trace, which is sampled with probability `share`.

    `random_bytes`: at least 24 bytes.
    """
    trace_id, span_id = random_bytes[:16].hex(), random_bytes[16:24].hex()
    position = int(trace_id, 16) & ((1 << _RATIO_BITS) - 1)
    return TraceContext(trace_id, span_id, position < share * (1 << _RATIO_BITS))


def share_sampled(environment: Mapping[str, str]) -> float:
    """Share of new traces that are sampled, 0 to 1, from OpenTelemetry's variables.

    Raises ValueError, with the remedy, for an unsupported sampler or a share outside 0 to 1.
    """
    sampler = environment.get(SAMPLER_VARIABLE) or SAMPLERS[0]
    if sampler not in SAMPLERS:
        raise ValueError(
            f"{SAMPLER_VARIABLE}={sampler} is not supported; use {', '.join(SAMPLERS)}"
        )
    if sampler != SAMPLERS[2]:
        return 1.0 if sampler == SAMPLERS[0] else 0.0
    given = environment.get(SHARE_VARIABLE) or "1"
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{SHARE_VARIABLE}={given}: give a share between 0 and 1")
    return share
