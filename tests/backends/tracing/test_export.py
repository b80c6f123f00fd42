"""Spans go to a collector behind everybody's back: slow, dead or full, it holds nobody up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from backends.tracing.export import (
    BATCH_MAX,
    ENDPOINT_VARIABLE,
    SpanExport,
    Tracing,
    begin_trace,
    problems,
)
from backends.tracing.request_spans import SpanRecord
from backends.tracing.request_trace import RequestTrace, flat
from backends.tracing.trace_context import TraceContext
from tests.e2e.server import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans(count: int) -> list[SpanRecord]:
    context = TraceContext("a" * 32, "b" * 16, True)
    return [SpanRecord(f"{number}", context, "", 0, 1) for number in range(count)]


class Collector:
    """Takes what it gets, or refuses it; stands still while `gate` is closed."""

    def __init__(self, takes: bool = True, is_open: bool = True) -> None:
        self.takes = takes
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.got: list[str] = []
        self.begun = threading.Event()

    def send(self, batch: Sequence[SpanRecord]) -> bool:
        self.begun.set()
        self.gate.wait()
        self.got += [span.name for span in batch] if self.takes else []
        return self.takes

    def stop(self) -> None:
        self.gate.set()


@pytest.fixture
def exports() -> Iterator[list[SpanExport]]:
    made: list[SpanExport] = []
    yield made
    for export in made:
        export._sender.stop()
        export.close()


def test_what_waits_is_sent_at_the_end() -> None:
    collector = Collector()
    export = SpanExport(collector)
    export.offer(spans(3))
    export.close()
    assert collector.got == ["0", "1", "2"] and (export.exported, export.lost) == (3, 0)


def test_a_dead_collector_loses_spans_and_says_how_many() -> None:
    export = SpanExport(Collector(takes=False))
    export.offer(spans(3))
    export.close()
    assert (export.exported, export.lost) == (0, 3)


def test_a_collector_that_stands_still_holds_nobody_up(exports: list[SpanExport]) -> None:
    """The test itself would hang otherwise: its gate opens at the end only."""
    collector = Collector(is_open=False)
    export = SpanExport(collector, waiting_max=BATCH_MAX)
    exports.append(export)
    export.offer(spans(BATCH_MAX))
    collector.begun.wait()  # the thread has taken these out and hangs
    export.offer(spans(BATCH_MAX))
    assert export.lost == 0
    export.offer(spans(1))
    assert export.lost == 1, "no room: it is lost at once"


def test_a_request_is_lost_as_a_whole(exports: list[SpanExport]) -> None:
    collector = Collector(is_open=False)
    export = SpanExport(collector, waiting_max=BATCH_MAX)
    exports.append(export)
    export.offer(spans(BATCH_MAX))
    collector.begun.wait()
    export.offer(spans(BATCH_MAX - 2))
    export.offer(spans(3))
    assert export.lost == 3


def test_a_sender_that_raises_loses_its_batch_and_the_thread_goes_on() -> None:
    class Broken(Collector):
        def send(self, batch: Sequence[SpanRecord]) -> bool:
            if not self.begun.is_set():
                self.begun.set()
                raise RuntimeError("broken")
            return super().send(batch)

    collector = Broken()
    export = SpanExport(collector)
    export.offer(spans(BATCH_MAX))
    wait_until(lambda: export.lost == BATCH_MAX, "the first batch to be lost")
    export.offer(spans(2))
    export.close()
    assert (export.exported, export.lost) == (2, BATCH_MAX)


def test_what_comes_behind_the_end_is_lost_and_counted() -> None:
    export = SpanExport(Collector())
    export.close()
    export.offer(spans(1))
    assert export.lost == 1


def tracing(share: float) -> Tracing:
    return Tracing(SpanExport(Collector()), share)


def test_a_request_joins_the_trace_of_its_client() -> None:
    made = tracing(0.0)
    trace = made.begin({"traceparent": f"00-{TRACE}-{SPAN}-01"}, 1.0)
    assert trace.is_on and trace.trace_id == TRACE
    trace.ended("", 2.0, 0.0, {})
    made.close()
    assert made.export.exported == 2, "request and read"


def test_a_client_that_does_not_sample_is_not_traced() -> None:
    made = tracing(1.0)
    trace = made.begin({"traceparent": f"00-{TRACE}-{SPAN}-00"}, 1.0)
    assert not trace.is_on and trace.trace_id == TRACE, "the log may say it all the same"
    trace.ended("", 2.0, 0.0, {})
    made.close()
    assert made.export.exported == made.export.lost == 0


@pytest.mark.parametrize("given", ["nonsense", 3, None, True])
def test_a_bad_traceparent_is_as_none(given: object) -> None:
    made = tracing(1.0)
    trace = made.begin({"traceparent": given}, 1.0)
    assert trace.is_on and trace.trace_id != TRACE
    made.close()


def test_without_tracing_a_trace_id_is_known_and_nothing_is_kept() -> None:
    assert begin_trace(None, {}, 1.0).trace_id == ""
    assert begin_trace(None, {"traceparent": f"00-{TRACE}-{SPAN}-01"}, 1.0).trace_id == TRACE
    assert not begin_trace(None, {"traceparent": "x"}, 1.0).is_on


def test_notes_behind_the_end_change_nothing() -> None:
    offered: list[list[SpanRecord]] = []
    trace = RequestTrace(TraceContext(TRACE, SPAN, True), "", 0.0, offered.append)
    trace.attempt_began(1, 0.1)
    trace.decided(1, 0.2, {"pair": {"prefill": "p"}}, "")
    trace.called(1, "p", 0.2)
    trace.lost(1, "worker gone", "p is gone", 0.3)
    trace.ended("unavailable: p", 0.4, 0.0, {})
    trace.call_failed(1, 9.0)
    trace.lost(1, "again", "again", 9.0)
    trace.ended("", 9.0, 0.0, {})
    assert len(offered) == 1
    assert [span.name for span in offered[0]] == ["request", "read", "attempt", "decide", "prefill"]
    assert offered[0][3].attributes == {"mooncake.decision.pair.prefill": "p"}


def test_a_decision_becomes_flat_attributes() -> None:
    given = {"a": {"b": 1.5, "c": None}, "d": "x", "e": [1, 2], "f": True}
    assert dict(flat("m", given)) == {"m.a.b": 1.5, "m.d": "x", "m.e": "[1, 2]", "m.f": True}


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://x:1", "http://", "http:///", "x"])
def test_a_bad_endpoint_is_refused_with_a_good_one(endpoint: str) -> None:
    [problem] = problems({ENDPOINT_VARIABLE: endpoint})
    assert endpoint in problem and "http://HOST:4317" in problem


def test_nothing_is_wrong_with_no_endpoint_and_with_a_good_one() -> None:
    assert problems({}) == problems({ENDPOINT_VARIABLE: ""}) == []
    assert problems({ENDPOINT_VARIABLE: "http://127.0.0.1:4317"}) == []
    assert Tracing.of_environment({}) is None
    with pytest.raises(ValueError, match="not supported"):
        Tracing.of_environment({ENDPOINT_VARIABLE: "http://x:1", "OTEL_TRACES_SAMPLER": "y"})


def test_no_process_pays_for_opentelemetry_that_does_not_trace() -> None:
    program = (
        "import sys, backends.frontend.frontend, backends.launcher.launch_plan\n"
        "from backends.tracing.export import Tracing\n"
        "assert Tracing.of_environment({}) is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
