"""W3C's traceparent: read where it is valid, ignored where it is not, and never an error."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.tracing.trace_context import (
    SAMPLER_VARIABLE,
    SHARE_VARIABLE,
    TraceContext,
    new_trace,
    parse_traceparent,
    share_sampled,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("fe", False)]
)
def test_a_valid_one_names_trace_span_and_whether_it_is_sampled(
    flags: str, is_sampled: bool
) -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert found == TraceContext(TRACE, SPAN, is_sampled)


def test_a_later_version_may_have_more_behind_what_is_known() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x",
        None,
        7,
        True,
        b"00",
        ["00"],
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-0\u0661",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01" * 100,
    ],
)
def test_a_bad_one_is_none(given: object) -> None:
    assert parse_traceparent(given) is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_no_text_is_an_error(text: str) -> None:
    parse_traceparent(text)


def test_what_is_passed_on_is_read_as_what_it_was() -> None:
    for is_sampled in (True, False):
        context = TraceContext(TRACE, SPAN, is_sampled)
        assert parse_traceparent(context.traceparent) == context


def test_a_new_trace_is_sampled_by_its_own_id() -> None:
    contexts = [new_trace(0.25, number.to_bytes(24, "big")) for number in range(1, 100)]
    assert all(context.is_sampled for context in contexts), "small ids are below every share"
    high = bytes(8) + b"\xff" * 16
    assert not new_trace(0.999, high).is_sampled and new_trace(1.0, high).is_sampled
    assert not new_trace(0.0, os.urandom(24)).is_sampled


def test_of_many_traces_so_many_are_sampled_as_asked_for() -> None:
    ids = [(number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") for number in range(4_000)]
    sampled = sum(new_trace(0.25, bytes(8) + each + bytes(8)).is_sampled for each in ids)
    assert 950 < sampled < 1_050


def test_open_telemetrys_own_variables_say_the_share() -> None:
    assert share_sampled({}) == 1.0
    assert share_sampled({SAMPLER_VARIABLE: "parentbased_always_off"}) == 0.0
    ratio = {SAMPLER_VARIABLE: "parentbased_traceidratio"}
    assert share_sampled({**ratio, SHARE_VARIABLE: "0.1"}) == 0.1
    for bad in (
        {**ratio, SHARE_VARIABLE: "2"},
        {**ratio, SHARE_VARIABLE: "x"},
        {SAMPLER_VARIABLE: "jaeger_remote"},
    ):
        with pytest.raises(ValueError, match="OTEL_TRACES_SAMPLER"):
            share_sampled(bad)
