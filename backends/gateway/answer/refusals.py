"""A refusal as a response in OpenAI's error format."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from backends.statuses import HttpRefusal


def refusal_response(refusal: HttpRefusal, more: Mapping[str, str] | None = None) -> Response:
    """A refusal in OpenAI's error format. `more`: further headers."""
    headers = dict(more or {})
    if refusal.retry_after_s:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(refusal.body()), refusal.status, headers, "application/json"
    )
