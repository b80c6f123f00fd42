"""The line that says how a run goes."""

from __future__ import annotations

from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord
from loadtest.users.reporting import ProgressLine


def record(outcome: str = COMPLETED, ttft_s: float = 0.1) -> RequestRecord:
    times = (ttft_s, ttft_s + 0.02) if outcome == COMPLETED else ()
    return RequestRecord(0, "r", 0.0, 0.0, 1.0, 10, 2, outcome, token_times_s=times)


def test_counts_are_of_the_whole_run_and_percentiles_of_what_is_new() -> None:
    progress, records = ProgressLine(), [record(), record(REJECTED)]
    assert progress.of(records, 10.0, 5) == (
        "10 s: 5 users, 1 answered, 1 rejected, 0 failed; "
        "of the last: TTFT P90 100 ms, TBT P90 20 ms"
    )
    assert progress.of(records, 20.0, 5) == "20 s: 5 users, 1 answered, 1 rejected, 0 failed"
    records.append(record(ttft_s=0.3))
    assert "2 answered, 1 rejected" in (line := progress.of(records, 30.0, 5))
    assert "TTFT P90 300 ms" in line
