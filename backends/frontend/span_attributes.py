"""What the span of a request says of it. Pure.

Names of OpenTelemetry's conventions for generative models where there is one, ours elsewhere. No
text of a prompt or an answer, and no tenant: who reads traces need not know them.
"""

from __future__ import annotations

from backends.errors import ServingError
from backends.frontend.lifecycle.machine import State
from backends.frontend.request import ClientRequest
from backends.frontend.request_times import outcome_of
from backends.tracing.request_spans import Attribute


def request_attributes(request: ClientRequest, request_id: str) -> dict[str, Attribute]:
    """Once it is understood. `request_id`: ours, which the log has too."""
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
    """Its status: "" where it went well, else what its client reads."""
    if error is None:
        return ""
    return error.wire_message() if isinstance(error, ServingError) else repr(error)
