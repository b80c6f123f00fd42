"""The spans of a request: who is whose child, and that each lies within its parent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.tracing.request_spans import (
    AttemptTimes,
    Call,
    RequestTimeline,
    SpanRecord,
    SpanTree,
    prefill_phases,
)
from backends.tracing.trace_context import TraceContext
from backends.workers.protocol import DecodeReply, PrefillReply

ROOT = TraceContext("a" * 32, "b" * 16, True)
PARENT = "c" * 16
UNIX_S = 1_700_000_000.0


def spans_of(timeline: RequestTimeline) -> list[SpanRecord]:
    numbers = itertools.count(1)
    return SpanTree(ROOT, PARENT, UNIX_S, lambda: f"{next(numbers):016x}").of(timeline)


def prefilled(**more: float) -> PrefillReply:
    times = {"queue_s": 0.02, "load_s": 0.01, "compute_s": 0.05, "put_s": 0.004, **more}
    return PrefillReply(
        incarnation="i", cached_tokens=64, fetched_blocks=1, fetched_bytes=10, blocks=[], **times
    )


def decoded(**more: float) -> DecodeReply:
    return DecodeReply(
        incarnation="i",
        tokens_before=3,
        text="",
        context_ids=[],
        cut_bytes=0,
        finish_reason="length",
        **{"queue_s": 0.003, "load_s": 0.002, **more},
    )


def served() -> RequestTimeline:
    attempt = AttemptTimes(
        number=1,
        began_s=0.01,
        decided_s=0.012,
        decision={"mooncake.decision.prefill": "p"},
        prefill=Call("p", 0.012, 0.112),
        prefill_reply=prefilled(load_at_s=0.01, compute_at_s=0.03),
        decode=Call("d", 0.113, 0.5),
        decode_reply=decoded(),
    )
    return RequestTimeline(
        arrived_s=0.0, read_s=0.01, first_token_s=0.1, ended_s=0.6, attempts=[attempt]
    )


def parents(spans: list[SpanRecord]) -> dict[str, str]:
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_span_id, "") for span in spans}


def assert_nested(spans: list[SpanRecord]) -> None:
    by_id = {span.context.span_id: span for span in spans}
    assert len(by_id) == len(spans), "ids are unique"
    for span in spans:
        assert span.start_ns <= span.end_ns, span.name
        if (parent := by_id.get(span.parent_span_id)) is not None:
            assert parent.start_ns <= span.start_ns and span.end_ns <= parent.end_ns, span.name


def test_each_span_has_the_right_parent() -> None:
    spans = spans_of(served())
    assert parents(spans) == {
        "request": "",
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
    assert spans[0].parent_span_id == PARENT and spans[0].context == ROOT
    assert {span.context.trace_id for span in spans} == {ROOT.trace_id}
    assert_nested(spans)


def test_times_are_those_that_were_noted() -> None:
    spans = {span.name: span for span in spans_of(served())}
    base_ns = spans["request"].start_ns
    assert base_ns == UNIX_S * 1e9
    ms = {
        name: ((span.start_ns - base_ns) / 1e6, (span.end_ns - base_ns) / 1e6)
        for name, span in spans.items()
    }
    expected = {
        "read": (0, 10), "attempt": (10, 600), "decide": (10, 12), "prefill": (12, 112),
        # 84 of 100 ms at the worker: 8 ms there, 8 ms back.
        "prefill.queue": (20, 30), "prefill.load": (30, 40), "prefill.wait": (40, 50),
        "prefill.compute": (50, 100), "prefill.put": (100, 104),
        "handover": (112, 118), "handover.queue": (113, 116), "handover.load": (116, 118),
        "decode": (118, 500),
    }  # fmt: skip
    assert {name: ms[name] for name in expected} == {
        name: pytest.approx(times, abs=0.001) for name, times in expected.items()
    }
    assert spans["request"].events == (("first_token", base_ns + 100_000_000),)


def test_who_did_it_is_said() -> None:
    spans = {span.name: span for span in spans_of(served())}
    assert spans["prefill.compute"].service == "mooncake-prefill"
    assert spans["prefill.compute"].instance == "p"
    assert spans["handover.load"].service == "mooncake-decode"
    assert spans["prefill"].attributes["mooncake.cached_tokens"] == 64
    assert spans["decide"].attributes["mooncake.decision.prefill"] == "p"


def test_a_lost_attempt_is_a_span_with_its_reason_and_the_next_one_follows() -> None:
    timeline = served()
    lost = AttemptTimes(
        number=1,
        began_s=0.001,
        decided_s=0.002,
        prefill=Call("p0", 0.002),
        ended_s=0.008,
        loss="worker died",
        error="p0 is gone",
    )
    timeline.attempts[0].number = 2
    timeline.attempts.insert(0, lost)
    spans = spans_of(timeline)
    first, second = (span for span in spans if span.name == "attempt")
    assert first.attributes == {"mooncake.attempt": 1, "mooncake.loss": "worker died"}
    assert first.error == "p0 is gone" and second.error == ""
    assert first.end_ns <= second.start_ns
    calls = [span for span in spans if span.name == "prefill"]
    assert [call.error for call in calls] == ["p0 is gone", ""]
    assert calls[0].end_ns == first.end_ns, "a call that never came back ends with its attempt"
    assert not [span for span in spans if span.parent_span_id == calls[0].context.span_id]
    assert_nested(spans)


def test_a_decode_worker_that_died_leaves_no_hand_over_behind() -> None:
    timeline = served()
    timeline.attempts[0].decode_reply = None
    timeline.attempts[0].ended_s, timeline.attempts[0].error = 0.3, "d is gone"
    spans = {span.name: span for span in spans_of(timeline)}
    assert "handover" not in spans
    assert spans["decode"].error == "d is gone"


def test_a_rejection_is_in_the_decision_and_in_the_request() -> None:
    attempt = AttemptTimes(1, 0.01, decided_s=0.02, rejection="rejected kind=ttft_slo")
    timeline = RequestTimeline(
        0.0, read_s=0.01, ended_s=0.03, error="rejected kind=ttft_slo", attempts=[attempt]
    )
    spans = spans_of(timeline)
    assert [span.name for span in spans] == ["request", "read", "attempt", "decide"]
    rejected = "rejected kind=ttft_slo"
    assert [span.error for span in spans] == [rejected, "", rejected, rejected]


def test_a_request_that_was_never_understood_has_read_and_nothing_else() -> None:
    spans = spans_of(RequestTimeline(0.0, ended_s=0.1, error="invalid_request: no prompt"))
    assert [span.name for span in spans] == ["request", "read"]
    assert_nested(spans)


def test_phases_of_a_worker_that_says_no_offsets_follow_each_other() -> None:
    names, begins, ends = zip(*prefill_phases(prefilled()), strict=True)
    assert names == ("queue", "load", "wait", "compute", "put")
    assert begins[1:] == ends[:-1] and begins[0] == 0.0


seconds = st.floats(0, 100)
offsets = st.one_of(st.just(-1.0), st.floats(0, 200))


@settings(max_examples=150, deadline=None)
@given(st.lists(seconds, min_size=12, max_size=12), offsets, offsets, st.booleans(), st.booleans())
def test_children_lie_within_their_parents_whatever_the_clocks_say(
    times: list[float], load_at_s: float, compute_at_s: float, is_ended: bool, is_decoded: bool
) -> None:
    attempt = AttemptTimes(
        number=1,
        began_s=times[0],
        decided_s=times[1],
        prefill=Call("p", times[2], times[3]),
        prefill_reply=prefilled(
            queue_s=times[4],
            load_s=times[5],
            compute_s=times[6],
            put_s=times[7],
            load_at_s=load_at_s,
            compute_at_s=compute_at_s,
        ),
        decode=Call("d", times[8], times[9]) if is_decoded else None,
        decode_reply=decoded(queue_s=times[4], load_s=times[5]) if is_decoded else None,
        ended_s=times[10] if is_ended else None,
    )
    timeline = RequestTimeline(0.0, read_s=times[11], ended_s=50.0, attempts=[attempt])
    assert_nested(spans_of(timeline))
    phases = prefill_phases(attempt.prefill_reply)  # type: ignore[arg-type]
    assert all(begin <= end for _, begin, end in phases)


def test_a_lost_attempt_without_an_error_text_has_its_own_loss_as_error() -> None:
    timeline = served()
    lost = AttemptTimes(number=1, began_s=0.01, loss="timeout", ended_s=0.02)
    timeline.error, timeline.attempts = "the request was cancelled", [lost]
    spans = {span.name: span for span in spans_of(timeline)}
    assert spans["attempt"].error == "timeout"
