"""One request of a real server as a tree of spans at a real OTLP receiver, and in the logs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness import server as bench_server
from tests.e2e.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.e2e.server import Server, running, wait_until

CLIENTS_SPAN = "00f067aa0ba902b7"
SPANS = "mooncake_trace_spans_total"
PARENTS = {
    "read": "request", "attempt": "request", "decide": "attempt", "prefill": "attempt",
    "prefill.queue": "prefill", "prefill.load": "prefill", "prefill.wait": "prefill",
    "prefill.compute": "prefill", "prefill.put": "prefill", "handover": "attempt",
    "handover.queue": "handover", "handover.load": "handover", "decode": "attempt",
}  # fmt: skip
LOG_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    made = OtlpReceiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, state_dir: Path, receiver: OtlpReceiver,
    openai_port: int,
) -> Iterator[Server]:  # fmt: skip
    arguments = ("--otlp-endpoint", receiver.endpoint, "--log-format", "json",
                 "--log-bytes", str(LOG_BYTES), "--openai-port", str(openai_port))  # fmt: skip
    yield from running(tmp_path_factory.mktemp("traces"), state_dir, {}, arguments)


@pytest.fixture(scope="module")
def openai_port() -> int:
    return int(bench_server.free_addresses().http.rpartition(":")[2])


def traceparent(trace_id: str, flags: str = "01") -> str:
    return f"00-{trace_id}-{CLIENTS_SPAN}-{flags}"


def tree(receiver: OtlpReceiver, trace_id: str) -> dict[str, ReceivedSpan]:
    """The spans of a trace whose request had one attempt, once they have come."""
    found = wait_until(lambda: receiver.spans(trace_id), "its spans")
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def assert_nested(spans: list[ReceivedSpan]) -> None:
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if (parent := by_id.get(span.parent_id)) is not None:
            assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns, span.name


def log_lines(server: Server, name: str) -> list[dict[str, Any]]:
    """Those of our processes; Triton's own are no JSON."""
    folder = next(server.state_dir.glob(f"logs-{server.addresses.http.rpartition(':')[2]}"))
    text = "".join(
        path.read_text() for path in (folder / f"{name}.log.1", folder / f"{name}.log")
        if path.exists()
    )  # fmt: skip
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]


def test_the_spans_of_a_request_have_the_right_parents_and_their_times_nest(
    server: Server, receiver: OtlpReceiver
) -> None:
    trace_id, before_ns = "a1" * 16, time.time_ns()
    answer = server.ask(
        parameters={"traceparent": traceparent(trace_id)}, input_ids=[*range(40, 240)],
        max_tokens=8, end_id=-1,
    )  # fmt: skip
    assert len(answer.output_ids) == 8
    spans = tree(receiver, trace_id)
    root = spans["request"]
    assert root.parent_id == CLIENTS_SPAN and root.kind == 2, "SERVER, below the client's own span"
    names = {span.span_id: name for name, span in spans.items()}
    children = {name: span for name, span in spans.items() if span is not root}
    assert {name: names[span.parent_id] for name, span in children.items()} == PARENTS
    assert_nested(list(spans.values()))
    assert before_ns <= root.start_ns and root.end_ns <= time.time_ns(), "on the wall clock"
    order = [spans[name].start_ns for name in ("read", "decide", "prefill", "handover", "decode")]
    assert order == sorted(order)
    computed = spans["prefill.compute"]
    assert computed.end_ns - computed.start_ns > 0
    assert not any(span.error for span in spans.values())
    assert "first_token" in root.events


def test_spans_say_what_was_decided_and_who_did_it(server: Server, receiver: OtlpReceiver) -> None:
    trace_id = "a2" * 16
    asked = {"parameters": {"traceparent": traceparent(trace_id)}, "input_ids": [*range(60, 260)]}
    answer = server.ask(**asked, return_decision=True, max_tokens=4, end_id=-1)
    spans = tree(receiver, trace_id)
    said = {
        name.removeprefix("mooncake.decision."): value
        for name, value in spans["decide"].attributes.items()
    }
    for name in ("policy", "admission", "prefill", "decode", "predicted_cached_tokens"):
        assert said[name] == answer.decision[name], name
    for term, seconds in answer.decision["predicted"].items():
        assert said[f"predicted.{term}"] == pytest.approx(seconds), term
    assert spans["prefill"].attributes["mooncake.worker"] == answer.decision["prefill"]
    assert spans["prefill.load"].resource["service.name"] == "mooncake-prefill"
    assert spans["prefill.load"].resource["service.instance.id"] == answer.decision["prefill"]
    assert spans["handover.load"].resource["service.instance.id"] == answer.decision["decode"]
    phase = spans["handover.load"]
    assert (phase.end_ns - phase.start_ns) / 1e9 == pytest.approx(
        answer.decision["decode_load_s"], abs=1e-5
    )
    usage = {"gen_ai.usage.input_tokens": 200, "gen_ai.usage.output_tokens": 4}
    assert usage.items() <= spans["request"].attributes.items()
    told = "".join(str(span.attributes) for span in spans.values())
    assert answer.text.strip() not in told, "no text of a prompt or an answer"
