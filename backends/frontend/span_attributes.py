"""Attributes of a request's span. Pure.

Names follow OpenTelemetry's conventions for generative models; others start with `mooncake.`.
Spans contain no text of a prompt or an answer, and no tenant.
"""

from __future__ import annotations

from backends.errors import ServingError
from backends.frontend.lifecycle.machine import State
from backends.frontend.request import ClientRequest
from backends.frontend.request_times import outcome_of
from backends.tracing.request_spans import Attribute


def request_attributes(request: ClientRequest, request_id: str) -> dict[str, Attribute]:
    """Attributes of a parsed request. `request_id`: the frontend's, as in the log."""
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
    """The span's status: "" after success, else the error that the client gets."""
    if error is None:
        return ""
    return error.wire_message() if isinstance(error, ServingError) else repr(error)
