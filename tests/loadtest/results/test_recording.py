"""A run comes back from its file as it was, and what is no run is refused with the reason."""

from __future__ import annotations

import base64
import dataclasses
import gzip

import msgspec
import pytest

from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord, Slo, goodput
from loadtest.results.recording import (
    Recording,
    RecordingError,
    Sample,
    from_bytes,
    goodput_of,
    slim,
    to_bytes,
)


def record(index: int, outcome: str = COMPLETED, times: tuple[float, ...] = ()) -> RequestRecord:
    return RequestRecord(
        index=index,
        request_id=f"r-{index}",
        due_s=0.0,
        sent_s=1.0,
        finished_s=5.0,
        prompt_tokens=100,
        output_tokens_asked=4,
        outcome=outcome,
        token_times_s=times,
        output_ids=(1, 2),
        cached_tokens=64,
        decision={"prefill": "prefill_0", "queue_s": 0.25},
    )


def recording() -> Recording:
    return Recording(
        name="replay",
        title="a trace",
        started_at="2025-01-01T00:00:00+00:00",
        settings={"speed": 2.0, "requests": 10, "is_cold": True, "trace": "t.jsonl", "max": None},
        requests=slim([record(0, times=(1.5, 1.6)), record(1, REJECTED)]),
        samples=[Sample(0.5, {'mooncake_pages_used{model="prefill_0"}': 3.0})],
        slo=Slo(1.0, 0.5),
        ideal_cached_tokens={0: 64},
    )


def test_a_recording_comes_back_as_it_was() -> None:
    assert from_bytes(to_bytes(recording())) == recording()


def test_the_same_recording_gives_the_same_bytes() -> None:
    assert to_bytes(recording()) == to_bytes(recording())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a recording"),
        (b"not base64 !", "not a recording"),
        (base64.b64encode(b"not gzip"), "not a recording"),
        (base64.b64encode(gzip.compress(b"{}", mtime=0)), "not a recording"),
        (base64.b64encode(gzip.compress(b"{}" * 99, mtime=0)[:-9]), "not a recording"),
        (base64.b64encode(gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20), "not a recording"),
        (base64.b64encode(gzip.compress(b'{"a": ' + b"[" * 100_000, mtime=0)), "not a recording"),
        (base64.b64encode(gzip.compress(b'{"a": "\xf6"}', mtime=0)), "not a recording"),
        (base64.b64encode(gzip.compress(b'{"format": 99}', mtime=0)), "its format is 99"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(RecordingError, match=why):
        from_bytes(data)


def test_goodput_counts_completed_requests_within_both_limits() -> None:
    records = [
        record(0, times=(1.5, 1.6)),  # TTFT 0.5 s, TBT 0.1 s
        record(1, times=(3.5, 3.6)),  # TTFT 2.5 s
        record(2, times=(1.5, 2.6)),  # TBT 1.1 s
        record(3, times=(1.5,)),  # one token: no TBT
        record(4, REJECTED),
    ]
    found = goodput(records, Slo(ttft_s=1.0, tbt_s=0.5))
    assert (found.requests, found.share) == (2, 0.4)
    assert found.requests_per_s == 2 / 4.0
    assert goodput(records, Slo()).requests == 4
    assert goodput([], Slo()).share == 0.0


def test_the_workloads_of_a_mix_may_have_levels_of_their_own() -> None:
    records = [
        dataclasses.replace(record(0, times=(1.5, 1.6)), workload="chat"),
        dataclasses.replace(record(1, times=(3.5, 3.6)), workload="document"),
    ]
    mixed = msgspec.structs.replace(
        recording(),
        requests=records,
        slo=None,
        slo_by_workload={"chat": Slo(ttft_s=0.2), "document": Slo(ttft_s=3.0)},
    )
    found = goodput_of(from_bytes(to_bytes(mixed)))
    assert found is not None and found.requests == 1
    assert goodput_of(msgspec.structs.replace(mixed, slo_by_workload={})) is None
