"""Two runs number by number: ratios, differences, and gaps that stay gaps."""

from __future__ import annotations

import pytest

from loadtest.results.metrics import REJECTED, Slo
from loadtest.results.numbers import Compared, compare, differing, numbers
from tests.loadtest.report.runs import answered, full, recording, unserved


def row_of(name: str, a, b) -> Compared:
    return {row.name: row for row in compare(a, b)}[name]


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    for row in compare(full(), full()):
        assert row.difference == 0 and row.ratio in (1.0, None), row
        assert row.ratio is not None or row.a == 0, row


def test_a_ratio_is_b_over_a() -> None:
    slower = [answered(i, token_times_s=(i + 1.0, i + 1.05)) for i in range(4)]
    row = row_of("ttft_p50_s", recording([answered(i) for i in range(4)]), recording(slower))
    assert (row.a, row.b) == pytest.approx((0.5, 1.0))
    assert (row.difference, row.ratio) == pytest.approx((0.5, 2.0))
    assert row.texts == ("500 ms", "1 s", "+500 ms", "2.00") and row.better == "lower"


def test_a_reason_of_one_run_only_is_a_zero_in_the_other() -> None:
    a = recording([answered(0)])
    b = recording([answered(0), unserved(1, REJECTED, "ttft_slo")])
    row = row_of("rejected:ttft_slo", a, b)
    assert (row.a, row.b, row.difference, row.ratio) == (0, 1, 1, None)
    assert row_of("rejected_share", a, b).texts == ("0.0%", "50.0%", "+50.0 points", "-")


def test_what_only_one_run_measured_has_no_ratio() -> None:
    a = recording([answered(0, decision=None)])
    b = recording([answered(0)], slo=Slo(ttft_s=1.0))
    for name in ("phase_queue_mean_s", "goodput_share"):
        row = row_of(name, a, b)
        assert (row.a, row.difference, row.ratio) == (None, None, None), name
        assert row.texts[0] == "not measured" and row.b is not None


def test_what_no_run_measured_is_left_out() -> None:
    names = {row.name for row in compare(recording([]), recording([]))}
    assert "ttft_p50_s" not in names and "answered" in names


def test_every_number_of_a_run_has_a_name_of_its_own() -> None:
    names = [number.name for number in numbers(full())]
    assert len(names) == len(set(names))
    assert {
        "ttft_p99_s",
        "tbt_p90_s",
        "hit_rate",
        "rejected:ttft_slo",
        "failed:timeout",
        "goodput_share",
        "phase_handover_mean_s",
    } <= set(names)


def test_a_setting_that_only_one_run_has_differs() -> None:
    a, b = {"speed": 1.0, "seed": 0}, {"speed": 2.0, "seed": 0, "users": 5}
    assert differing(a, b) == [("speed", 1.0, 2.0), ("users", None, 5)]
