"""The gateway's span around whatever answers behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.tracing.export import SpanExport, Tracing
from backends.tracing.gateway_traces import GatewayTraces, traceparent_in
from tests.backends.tracing.test_export import Collector

PATHS = frozenset({"/v1/completions"})
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def asked(path: str, traceparent: str, status: int, method: str = "POST") -> tuple[str, list[Any]]:
    """What the application behind was given as its traceparent, and the spans that were sent."""
    seen, sent = "", []

    class Keeping(Collector):
        def send(self, batch: Any) -> bool:
            sent.extend(batch)
            return True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal seen
        seen = traceparent_in(scope)
        scope["request_id"] = "r1"
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None: ...

    tracing = Tracing(SpanExport(Keeping()), 1.0)
    headers = [(b"traceparent", traceparent.encode())] if traceparent else []
    scope = {"type": "http", "path": path, "method": method, "headers": headers}
    asyncio.run(GatewayTraces(app, tracing, "gateway-0", PATHS)(scope, send, send))
    tracing.close()
    return seen, sent


def test_the_frontend_goes_on_below_the_gateways_span() -> None:
    seen, [span] = asked("/v1/completions", f"00-{TRACE}-{SPAN}-01", 200)
    assert span.parent_span_id == SPAN and span.context.trace_id == TRACE
    assert seen == span.context.traceparent and SPAN not in seen
    assert span.attributes["http.response.status_code"] == 200 and span.error == ""
    assert span.attributes["mooncake.http_request_id"] == "r1"
    assert span.start_ns <= span.end_ns


def test_who_samples_nothing_has_no_span_and_the_frontend_hears_of_it() -> None:
    seen, spans = asked("/v1/completions", f"00-{TRACE}-{SPAN}-00", 200)
    assert spans == [] and seen.startswith(f"00-{TRACE}-") and seen.endswith("-00")


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "ä" * 32])
def test_a_bad_traceparent_begins_a_trace(given: str) -> None:
    seen, [span] = asked("/v1/completions", given, 200)
    assert span.parent_span_id == "" and seen == span.context.traceparent


@pytest.mark.parametrize(
    ("status", "is_error"), [(200, False), (429, False), (503, True), (0, True)]
)
def test_only_what_the_server_could_not_do_is_an_error(status: int, is_error: bool) -> None:
    _, [span] = asked("/v1/completions", "", status)
    assert bool(span.error) is is_error


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_what_asks_for_no_answer_is_not_traced(path: str) -> None:
    seen, spans = asked(path, f"00-{TRACE}-{SPAN}-01", 200, "GET")
    assert spans == [] and seen == f"00-{TRACE}-{SPAN}-01"


def test_without_tracing_the_header_goes_on_as_it_came() -> None:
    given = f"00-{TRACE}-{SPAN}-00"
    assert traceparent_in({"headers": [(b"traceparent", given.encode())]}) == given
    assert traceparent_in({"headers": []}) == ""


def test_a_path_is_the_clients_word_and_no_name_of_a_span() -> None:
    """Spans wait for the collector: those of paths that nobody serves must not fill the memory."""
    _, [span] = asked("/v1/" + "x" * 60_000, "", 404)
    assert span.name == "POST"
    assert len(str(span.attributes["url.path"])) <= 256
    _, [served] = asked("/v1/completions", "", 200)
    assert (served.name, served.attributes["url.path"]) == (
        "POST /v1/completions",
        "/v1/completions",
    )
