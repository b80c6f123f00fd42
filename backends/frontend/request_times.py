"""Metrics of one request and the attributes of its span. No I/O; time is an argument.

The metrics go into `Observations` (metrics/page.py).

Names of attributes follow OpenTelemetry's conventions for generative models; others start with
`mooncake.`. Spans contain no text of a prompt or an answer, and no tenant.

Not here: publishing (metrics/page.py), times inside the workers (workers/jobs.py).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence

from backends.errors import (
    Cancelled,
    Forbidden,
    InvalidRequest,
    KvMissing,
    Overloaded,
    ServingError,
    WorkerUnavailable,
)
from backends.frontend.lifecycle.machine import State
from backends.frontend.request import ClientRequest
from backends.metrics.page import Observations
from backends.metrics.table import REASONS, TENANT_REASONS
from backends.tracing.request_spans import Attribute
from conductor.messages import UNLIMITED, Route

TBT_LONGEST_SHARE = 0.1  # TBT: mean of this share of the longest intervals (FAST'25, section 5.1)
MESSAGES_PER_FLUSH = 50  # messages after which a stream's intervals are added to the counters


class RequestTimes:
    """Times and counts of one request. Only `retried` may be called by several threads."""

    def __init__(self, observations: Observations, arrived_s: float) -> None:
        self._observe = observations.observe
        self._arrived_s = arrived_s
        self._limits = UNLIMITED  # of its latest attempt
        # Monotonic time of the first and of the latest message with tokens; 0: none was sent.
        self.first_s = self._last_s = 0.0
        self._tokens = 0  # tokens sent
        self._gaps_s = array("d")  # seconds between successive messages with tokens
        self._counted_intervals, self._counted_s = 0, 0.0
        self._predicted_tbt_s = 0.0
        self.tenant = ""  # label of the tenant (tenants/tenant_labels.py); "": not counted
        self._prompt_tokens = self._cached_tokens = 0
        self.is_stream = False  # False: intervals between tokens are not counted

    def retried(self) -> None:
        self._observe("mooncake_retries_total")

    def prefilled(self, route: Route, actual_s: float) -> None:
        """The prefill reply of an attempt came `actual_s` after the routing decision."""
        predicted, self._limits = route.predicted, route.limits
        self._predicted_tbt_s = predicted.tbt_s
        predicted_s = predicted.ttft_s - predicted.handover_s  # the first token needs no hand-over
        self._observe("mooncake_ttft_prediction_error_ratio", _error(predicted_s, actual_s))
        name = "mooncake_ttft_prediction_seconds_total"
        self._observe(name, predicted_s, kind="predicted")
        self._observe(name, actual_s, kind="actual")

    def read(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note the prompt's length and its cached tokens. Only the first call has an effect."""
        if not self._prompt_tokens:
            self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens

    def prefill_wasted(self, compute_s: float) -> None:
        """The decode worker rejected the request after the prefill."""
        self._observe("mooncake_wasted_prefills_total")
        self._observe("mooncake_wasted_prefill_seconds_total", compute_s)

    def sent(self, tokens: int, now_s: float) -> None:
        """A message with `tokens` new tokens was sent. A message without tokens does not count."""
        if not tokens:
            return
        if self._tokens:
            self._gaps_s.append(now_s - self._last_s)
        else:
            self.first_s = now_s
            self._observe("mooncake_ttft_seconds", now_s - self._arrived_s)
        self._tokens += tokens
        self._last_s = now_s
        if len(self._gaps_s) % MESSAGES_PER_FLUSH == 0:
            self._count_intervals()

    def ended(self, error: Exception | None, now_s: float) -> None:
        """Count the ended request. `error`: None if the request was answered."""
        self._observe("mooncake_requests_total", outcome=outcome_of(error))
        if isinstance(error, Overloaded):
            reason = error.kind if error.kind in REASONS else "other"
            self._observe("mooncake_rejections_total", reason=reason)
        self._count_intervals()
        if self.tenant:
            self._count_of_tenant(error)
        if error is None and self._tokens:
            self._observe("mooncake_request_duration_seconds", now_s - self._arrived_s)
            actual_s = 0.0
            if self.is_stream and self._gaps_s:
                actual_s = tbt_s(self._gaps_s, self._tokens - 1)
                self._observe_tbt(actual_s)
            ttft_s = self.first_s - self._arrived_s
            if ttft_s <= self._limits.ttft_slo_s and actual_s <= self._limits.tbt_slo_s:
                self._observe("mooncake_requests_within_slo_total")

    def _observe_tbt(self, actual_s: float) -> None:
        self._observe("mooncake_tbt_seconds", actual_s)
        error_ratio = _error(self._predicted_tbt_s, actual_s)
        self._observe("mooncake_tbt_prediction_error_ratio", error_ratio)
        name = "mooncake_tbt_prediction_seconds_total"
        self._observe(name, self._predicted_tbt_s, kind="predicted")
        self._observe(name, actual_s, kind="actual")

    def _count_of_tenant(self, error: Exception | None) -> None:
        tenant = self.tenant
        self._observe("mooncake_tenant_requests_total", tenant=tenant, outcome=outcome_of(error))
        if isinstance(error, Overloaded):
            reason = error.kind if error.kind in TENANT_REASONS else "other"
            self._observe("mooncake_tenant_rejections_total", tenant=tenant, reason=reason)
        tokens = {
            "prompt": self._prompt_tokens,
            "cached": self._cached_tokens,
            "output": self._tokens,
        }
        for kind, number in tokens.items():
            self._observe("mooncake_tenant_tokens_total", number, tenant=tenant, kind=kind)

    def _count_intervals(self) -> None:
        if not self.is_stream or not self._gaps_s:
            return
        intervals, total_s = self._tokens - 1, self._last_s - self.first_s
        self._observe("mooncake_token_intervals_total", intervals - self._counted_intervals)
        self._observe("mooncake_token_interval_seconds_total", total_s - self._counted_s)
        self._counted_intervals, self._counted_s = intervals, total_s


def tbt_s(gaps_s: Sequence[float], intervals: int) -> float:
    """Mean of the longest 10 % of the intervals between tokens. `intervals`: their number.
    `gaps_s`: the intervals between messages. Intervals inside a message count as 0 s."""
    longest = max(1, math.ceil(intervals * TBT_LONGEST_SHARE))
    return sum(heapq.nlargest(longest, gaps_s)) / longest


def outcome_of(error: Exception | None) -> str:
    """The outcome label: "answered", the prefix of a ServingError, or "internal_error"."""
    if error is None:
        return "answered"
    if isinstance(error, Overloaded):
        return "rejected"
    if isinstance(error, InvalidRequest | Forbidden | WorkerUnavailable | KvMissing | Cancelled):
        return error.prefix.rstrip(":")
    return "internal_error"


def _error(predicted_s: float, actual_s: float) -> float:
    """Relative error of a prediction; >= 0. An actual time below 1 µs counts as 1 µs."""
    actual_s = max(actual_s, 1e-6)
    return abs(predicted_s - actual_s) / actual_s


def request_attributes(request: ClientRequest, request_id: str) -> dict[str, Attribute]:
    """Attributes of a parsed request. `request_id`: the frontend's id, as in the log."""
    return {
        "mooncake.request_id": request_id,
        "mooncake.priority": request.priority,
        "mooncake.stream": request.is_stream,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
    }


def end_attributes(state: State, error: Exception | None) -> dict[str, Attribute]:
    return {
        "mooncake.outcome": outcome_of(error),
        "mooncake.cached_tokens": state.cached_tokens,
        "gen_ai.usage.output_tokens": state.sent_tokens,
    }


def end_of_span(error: Exception | None) -> str:
    """The span's status; "" after success. It contains no text of a client and no tenant."""
    if isinstance(error, Overloaded):
        return f"rejected kind={error.kind}"
    if isinstance(error, InvalidRequest | Forbidden):
        return error.prefix.rstrip(":")
    if isinstance(error, ServingError):
        return error.wire_message()
    return "" if error is None else type(error).__name__
