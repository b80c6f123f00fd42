"""One request of a real server as a tree of spans at a real OTLP receiver, and in the logs."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from loadtest.harness import server as bench_server
from tests.e2e.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.e2e.server import Server, running, tensor, wait_until
from tests.e2e.server_processes import stub_of

CLIENTS_SPAN = "00f067aa0ba902b7"
SPANS = "mooncake_trace_spans_total"
PARENTS = {
    "read": "request",
    "attempt": "request",
    "decide": "attempt",
    "prefill": "attempt",
    "prefill.queue": "prefill",
    "prefill.load": "prefill",
    "prefill.wait": "prefill",
    "prefill.compute": "prefill",
    "prefill.put": "prefill",
    "handover": "attempt",
    "handover.queue": "handover",
    "handover.load": "handover",
    "decode": "attempt",
}
LOG_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    made = OtlpReceiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    state_dir: Path,
    receiver: OtlpReceiver,
    openai_port: int,
) -> Iterator[Server]:
    arguments = (
        "--otlp-endpoint",
        receiver.endpoint,
        "--log-format",
        "json",
        "--log-bytes",
        str(LOG_BYTES),
        "--openai-port",
        str(openai_port),
    )
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
        path.read_text()
        for path in (folder / f"{name}.log.1", folder / f"{name}.log")
        if path.exists()
    )
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]


def test_the_spans_of_a_request_have_the_right_parents_and_their_times_nest(
    server: Server, receiver: OtlpReceiver
) -> None:
    trace_id, before_ns = "a1" * 16, time.time_ns()
    answer = server.ask(
        parameters={"traceparent": traceparent(trace_id)},
        input_ids=[*range(40, 240)],
        max_tokens=8,
        end_id=-1,
    )
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


def test_a_traceparent_in_the_json_of_an_http_client_is_its_own(
    server: Server, receiver: OtlpReceiver
) -> None:
    """Triton 2.51 hands no headers of /generate on."""
    trace_id = "a3" * 16
    body = {"text_input": "It is", "max_tokens": 2, "traceparent": traceparent(trace_id)}
    status, _ = server.post("/v2/models/conductor/generate", body)
    assert status == 200
    assert tree(receiver, trace_id)["request"].parent_id == CLIENTS_SPAN


def test_a_header_of_a_grpc_client_is_its_traceparent(
    server: Server, receiver: OtlpReceiver
) -> None:
    trace_id = "a9" * 16
    client = triton.InferenceServerClient(server.addresses.grpc)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(
        lambda result, error: answers.put(error), headers={"traceparent": traceparent(trace_id)}
    )
    inputs = [tensor("text_input", "It is"), tensor("max_tokens", 2)]
    client.async_stream_infer("conductor", inputs)
    assert answers.get(timeout=30.0) is None
    client.close()
    assert tree(receiver, trace_id)["request"].parent_id == CLIENTS_SPAN


def complete(openai_port: int, header: str) -> dict[str, Any]:
    body = json.dumps({"prompt": "It is", "max_tokens": 3}).encode()
    headers = {"Content-Type": "application/json", "traceparent": header}
    url = f"http://127.0.0.1:{openai_port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return dict(json.loads(answer.read()))


def test_the_gateways_span_is_the_parent_of_the_frontends(
    server: Server, receiver: OtlpReceiver, openai_port: int
) -> None:
    trace_id, unsampled = "b1" * 16, "b2" * 16
    complete(openai_port, traceparent(unsampled, "00"))
    assert complete(openai_port, traceparent(trace_id))["usage"]["completion_tokens"] == 3
    complete(openai_port, "nonsense")
    asked = "POST /v1/completions"

    def is_whole() -> bool:
        return {asked, "request"} <= {span.name for span in receiver.spans(trace_id)}

    wait_until(is_whole, "the spans of gateway and frontend")
    spans = {span.name: span for span in receiver.spans(trace_id)}
    assert spans[asked].parent_id == CLIENTS_SPAN
    assert spans[asked].resource["service.name"] == "mooncake-gateway"
    assert spans[asked].attributes["http.response.status_code"] == 200
    assert spans["request"].parent_id == spans[asked].span_id
    assert spans[asked].start_ns <= spans["request"].start_ns
    assert not receiver.spans(unsampled)


def test_who_samples_nothing_is_left_out_and_a_bad_traceparent_refuses_nobody(
    server: Server, receiver: OtlpReceiver
) -> None:
    """A trace that comes behind those that are not sent shows that they will not come."""
    unsampled = "a4" * 16
    roots_before = sum(span.name == "request" and not span.parent_id for span in receiver.spans())
    for given in (traceparent(unsampled, "00"), "nonsense", 7, traceparent("0" * 32)):
        answer = server.ask(parameters={"traceparent": given}, text_input="It is", max_tokens=1)
        assert len(answer.output_ids) == 1 and not answer.error, given
    last = "a5" * 16
    server.ask(parameters={"traceparent": traceparent(last)}, text_input="It is", max_tokens=1)
    tree(receiver, last)
    assert not receiver.spans(unsampled)
    roots = [span for span in receiver.spans() if span.name == "request" and not span.parent_id]
    assert len(roots) - roots_before == 3, "each bad one began a trace of its own"


def test_an_invalid_request_and_a_rejection_are_errors_in_their_spans(
    server: Server, receiver: OtlpReceiver
) -> None:
    trace_id = "a6" * 16
    answer = server.ask(parameters={"traceparent": traceparent(trace_id)}, max_tokens=4)
    assert "invalid_request" in answer.error
    spans = tree(receiver, trace_id)
    assert spans.keys() == {"request", "read"}
    assert spans["request"].error.startswith("invalid_request")
    assert spans["request"].attributes["mooncake.outcome"] == "invalid_request"


def test_what_was_sent_is_counted(server: Server, receiver: OtlpReceiver) -> None:
    trace_id = "aa" * 16
    server.ask(parameters={"traceparent": traceparent(trace_id)}, text_input="It", max_tokens=1)
    tree(receiver, trace_id)

    def is_counted() -> bool:
        sent = [span for span in receiver.spans() if not span.name.startswith("POST")]
        return server.metric(SPANS, result="exported") == len(sent)

    wait_until(is_counted, "the metric to say how many spans the receiver has")
    assert server.metric(SPANS, result="lost") == 0


def test_the_log_names_request_and_trace_in_json(server: Server, receiver: OtlpReceiver) -> None:
    trace_id = "a7" * 16
    server.ask(parameters={"traceparent": traceparent(trace_id)}, text_input="It", max_tokens=1)
    request_id = tree(receiver, trace_id)["request"].attributes["mooncake.request_id"]
    [line] = [each for each in log_lines(server, "frontend") if each.get("trace_id") == trace_id]
    assert line["request_id"] == request_id and line["message"].startswith("decision ")
    for name in ("prefill_0", "decode_1", "directory", "node-s0"):
        for each in log_lines(server, name):
            assert {"time", "level", "logger", "message"} <= each.keys(), name
    assert log_lines(server, "prefill_0") and log_lines(server, "node-s0")


def test_a_log_stays_below_its_bound_and_loses_nothing(server: Server) -> None:
    """A decision of each request is logged, so some hundred fill it."""
    folder = next(server.state_dir.glob(f"logs-{server.addresses.http.rpartition(':')[2]}"))
    older, asked = folder / "frontend.log.1", 0
    while not older.exists():
        server.ask(text_input="It is", max_tokens=1)
        asked += 1
        assert asked < 1_000, "the log is never shortened"
    wait_until(lambda: (folder / "frontend.log").stat().st_size <= LOG_BYTES, "a shorter log")
    lines = log_lines(server, "frontend")
    decisions = [line for line in lines if line["message"].startswith("decision ")]
    assert len(decisions) >= asked
    assert len({line["request_id"] for line in decisions}) == len(decisions), "each once"
    assert len(server.ask(text_input="It is", max_tokens=1).output_ids) == 1


@pytest.mark.long
def test_a_further_attempt_is_a_span_of_its_own_with_the_reason_of_the_loss(
    server: Server, receiver: OtlpReceiver
) -> None:
    trace_id = "a8" * 16
    stream = server.stream(
        parameters={"traceparent": traceparent(trace_id), "decode_worker": ""},
        input_ids=[*range(40, 240)],
        max_tokens=600,
        end_id=-1,
        stream=True,
        return_decision=True,
    )
    begun = stream.begun(5)
    victim = begun.decision["decode"]
    os.kill(stub_of(server, victim).pid, signal.SIGKILL)
    rest = stream.all()
    assert not rest.error and len(begun.output_ids) + len(rest.output_ids) == 600
    spans = wait_until(lambda: receiver.spans(trace_id), "its spans")
    assert_nested(spans)
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns
    )
    assert first.attributes["mooncake.loss"] and first.error, "why it was lost"
    assert "mooncake.loss" not in second.attributes and not second.error
    [lost, done] = sorted(
        (span for span in spans if span.name == "decode"), key=lambda span: span.start_ns
    )
    assert lost.attributes["mooncake.worker"] == victim and lost.error
    assert done.parent_id == second.span_id and not done.error
    wait_until(lambda: server.ready(victim), "the worker to be back", 60.0)


@pytest.mark.long
def test_a_collector_that_is_gone_costs_no_answer(server: Server, receiver: OtlpReceiver) -> None:
    """The last test here: the receiver does not come back."""
    receiver.close()
    lost_before = server.metric(SPANS, result="lost")
    answers = [server.ask(text_input="It is", max_tokens=1) for _ in range(5)]
    assert all(len(answer.output_ids) == 1 for answer in answers)
    wait_until(lambda: server.metric(SPANS, result="lost") > lost_before, "lost spans", 30.0)
