"""The gateway's span of a request, and the trace context that the frontend receives.

A request that is not sampled has no span, but the frontend still receives a `traceparent` of its
trace, with a new span id. Without tracing, this middleware is not installed.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.tracing.export import Tracing
from backends.tracing.request_spans import Attribute, SpanRecord
from backends.tracing.trace_context import TRACEPARENT

SERVICE = "mooncake-gateway"
TRACED = "/v1/"
PATH_CHARACTERS_MAX = 256  # limit of a path in a span, because spans wait in memory
IN_SCOPE = "mooncake.traceparent"  # key of the ASGI scope with the frontend's traceparent
HEADER = TRACEPARENT.encode()


class GatewayTraces:
    """The outermost ASGI middleware."""

    def __init__(self, app: ASGIApp, tracing: Tracing, name: str, paths: frozenset[str]) -> None:
        """`name`: name of this process. `paths`: paths that a span's name may contain."""
        self._app, self._tracing, self._name = app, tracing, name
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_traced = scope["type"] == "http" and scope["path"].startswith(TRACED)
        if not is_traced or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        context, parent_span_id = self._tracing.context_of(traceparent_in(scope))
        scope[IN_SCOPE] = context.traceparent
        if not context.is_sampled:
            await self._app(scope, receive, send)
            return
        start_ns, status = time.time_ns(), 0

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if not status and message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            attributes: dict[str, Attribute] = {
                "http.request.method": scope["method"],
                "url.path": scope["path"][:PATH_CHARACTERS_MAX],
                "http.response.status_code": status,
                "mooncake.http_request_id": scope.get("request_id", ""),
            }
            name = f"POST {scope['path']}" if scope["path"] in self._paths else "POST"
            span = SpanRecord(
                name=name,
                context=context,
                parent_span_id=parent_span_id,
                start_ns=start_ns,
                end_ns=time.time_ns(),
                kind="server",
                service=SERVICE,
                instance=self._name,
                attributes=attributes,
                error=_error(status),
            )
            self._tracing.export.offer([span])


def traceparent_in(scope: Scope) -> str:
    """The traceparent of GatewayTraces if there is one, or else the client's, or else ""."""
    if IN_SCOPE in scope:
        return str(scope[IN_SCOPE])
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return str(given.decode("latin-1"))


def _error(status: int) -> str:
    """The error of a span. As OpenTelemetry specifies, a status of 400 to 499 is no error."""
    if not status:
        return "the client disconnected before there was a status"
    return f"status {status}" if status >= 500 else ""
