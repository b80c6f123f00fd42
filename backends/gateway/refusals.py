"""A refusal as an HTTP response in OpenAI's shape. Pure. The statuses: backends/statuses.py."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from backends.statuses import HttpRefusal


def refusal_response(refusal: HttpRefusal) -> Response:
    headers = {}
    if refusal.retry_after_s:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(refusal.body()), refusal.status, headers, "application/json"
    )
