"""Runs that a page must be able to show, made by hand: every number in them is easy to check."""

from __future__ import annotations

from typing import Any

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, Slo
from loadtest.results.recording import Recording, Sample

DECISION = {
    "prefill": "prefill_0",
    "decode": "decode_1",
    "predicted": {"ttft_s": 0.4, "queue_s": 0.0},
    "queue_s": 0.1,
    "load_s": 0.05,
    "prefill_s": 0.2,
    "put_s": 0.05,
    "decode_queue_s": 0.02,
    "decode_load_s": 0.03,
}


def answered(index: int = 0, **changes: Any) -> RequestRecord:
    """Sent at second `index`: TTFT 0.5 s, then two tokens 0.25 s apart; the whole takes 1.1 s."""
    sent_s = float(index)
    values: dict[str, Any] = {
        "index": index,
        "request_id": f"r-{index}",
        "due_s": sent_s,
        "sent_s": sent_s,
        "finished_s": sent_s + 1.1,
        "prompt_tokens": 100,
        "output_tokens_asked": 3,
        "outcome": COMPLETED,
        "finish_reason": "length",
        "cached_tokens": 64,
        "token_times_s": (sent_s + 0.5, sent_s + 0.75, sent_s + 1.0),
        "decision": DECISION,
    }
    return RequestRecord(**(values | changes))


def unserved(index: int, outcome: str, kind: str, message: str = "") -> RequestRecord:
    return answered(
        index,
        outcome=outcome,
        kind=kind,
        message=message,
        token_times_s=(),
        finish_reason="",
        cached_tokens=None,
        decision=None,
        retry_after_s=2.0 if outcome == REJECTED else None,
    )


def sample(time_s: float, **totals: float) -> Sample:
    """What one prefill and one decode worker say, and one storage node."""
    values = {
        'mooncake_requests_waiting{model="prefill_0"}': 3.0,
        'mooncake_requests_running{model="prefill_0"}': 1.0,
        'mooncake_queue_tokens{model="prefill_0"}': 500.0,
        'mooncake_pages_used{model="prefill_0"}': 64.0,
        'mooncake_pages_max{model="prefill_0"}': 256.0,
        'mooncake_pages_used{model="decode_0"}': 8.0,
        'mooncake_pages_max{model="decode_0"}': 512.0,
        'mooncake_step_seconds_total{model="prefill_0"}': 0.25 * time_s,
        'mooncake_prompt_tokens_total{model="prefill_0",path="computed"}': 100.0 * time_s,
        'mooncake_prompt_tokens_total{model="prefill_0",path="local"}': 50.0 * time_s,
        'mooncake_requests_running{model="decode_0"}': 2.0,
        'mooncake_requests_waiting{model="decode_0"}': 0.0,
        'mooncake_context_tokens{model="decode_0"}': 900.0,
        'mooncake_output_tokens_total{model="decode_0"}': 20.0 * time_s,
        'mooncake_step_seconds_total{model="decode_0"}': 0.5 * time_s,
        'mooncake_store_bytes_used{model="conductor",node="s0"}': 25.0,
        'mooncake_store_bytes_max{model="conductor",node="s0"}': 100.0,
    }
    return Sample(time_s, values | totals)


def recording(records: list[RequestRecord], **changes: Any) -> Recording:
    values: dict[str, Any] = {
        "name": "replay",
        "title": "a run",
        "started_at": "2025-01-01T00:00:00+00:00",
        "settings": {"speed": 2.0, "requests_max": None},
    }
    return Recording(requests=records, **(values | changes))


def full() -> Recording:
    """All that a report can show."""
    served = [answered(i, workload="chat" if i % 2 else "burst") for i in range(8)]
    refused = [
        unserved(8, REJECTED, "ttft_slo", "predicted TTFT is 9 s"),
        unserved(9, REJECTED, "ttft_slo"),
        unserved(10, REJECTED, "decode_full"),
        unserved(11, FAILED, "timeout", "no complete answer in time"),
    ]
    return recording(
        [*served, *refused],
        samples=[sample(float(time_s)) for time_s in range(12)],
        slo=Slo(1.0, 0.2),
        ideal_cached_tokens=dict.fromkeys(range(8), 80),
    )
