"""What the benchmark of a decode-bound overload makes of its runs, and when it says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.overload.decode_bound import (
    POLICIES,
    DecodeBoundRuns,
    PolicyRun,
    PromisedLimits,
    mean_step_s,
    order_of,
)
from bench.overload.load import OverloadPhase
from loadtest.harness.result import Target
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord

LIMITS = PromisedLimits(ttft_s=1.0, tbt_s=0.02)
TOKENS = 100  # of each prompt


def record(outcome: str, *, ttft_s: float = 0.5, step_s: float = 0.01) -> RequestRecord:
    times_s = tuple(ttft_s + step_s * n for n in range(11)) if outcome == COMPLETED else ()
    kind = "decode_overload" if outcome == REJECTED else ""
    return RequestRecord(0, "r", 0.0, 0.0, 9.0, TOKENS, 11, outcome, kind, token_times_s=times_s)


def run(round_number: int, policy: str, answered: int, wasted: int, late: int = 0) -> PolicyRun:
    """So many answered in time, others late, others refused after their prefill."""
    records = [record(COMPLETED)] * answered + [record(COMPLETED, step_s=0.03)] * late
    records += [record(REJECTED)] * wasted
    phase = OverloadPhase(policy, records, computed_tokens=TOKENS * len(records))
    return PolicyRun(round_number, policy, phase, LIMITS, load_average=1.0)


def targets(runs: Sequence[PolicyRun], changes: Sequence[OverloadPhase] = ()) -> dict[str, Target]:
    return {target.name: target for target in DecodeBoundRuns({}, runs, changes).targets()}


def test_a_request_is_within_when_its_mean_step_is_and_not_each_of_them() -> None:
    slow_once = RequestRecord(
        0, "r", 0.0, 0.0, 1.0, TOKENS, 3, COMPLETED, token_times_s=(0.5, 0.535, 0.538)
    )
    assert mean_step_s(slow_once) == pytest.approx(0.019)
    assert LIMITS.keeps(slow_once)
    assert not LIMITS.keeps(record(COMPLETED, ttft_s=1.1))
    assert not LIMITS.keeps(record(COMPLETED, step_s=0.021))
    assert not LIMITS.keeps(record(REJECTED)) and not LIMITS.keeps(record(FAILED))


def test_policies_are_compared_within_a_round_and_the_median_of_rounds_counts() -> None:
    runs = []
    for number, (answered, wasted) in enumerate([(10, 1), (12, 2), (30, 9)], 1):
        runs += [run(number, "baseline", 10, 10), run(number, "predictive", answered, wasted)]
    found = targets(runs)
    assert found["wasted_predictive_over_baseline"].value == pytest.approx(0.2)
    assert found["answered_within_predictive_over_baseline"].value == pytest.approx(1.2)
    assert found["answered_within_predictive_over_baseline"].is_met


def test_late_answers_are_answered_but_not_within() -> None:
    runs = []
    for number in (1, 2, 3):
        runs += [run(number, "baseline", 10, 10), run(number, "predictive", 5, 0, late=5)]
    found = targets(runs)
    assert found["answered_within_predictive_over_baseline"].value == pytest.approx(0.5)
    assert found["wasted_predictive_over_baseline"].value == 0.0, "an answer was not for nothing"


def test_without_waste_there_is_no_overload_to_judge_by() -> None:
    runs = []
    for number in (1, 2, 3):
        runs += [run(number, "baseline", 95, 5), run(number, "predictive", 100, 0)]
    found = targets(runs)
    for name in ("wasted_predictive_over_baseline", "answered_within_predictive_over_baseline"):
        assert found[name].value is None and "5.0%" in found[name].why


def test_two_rounds_are_too_few() -> None:
    runs = [run(n, policy, 10, 10) for n in (1, 2) for policy in ("baseline", "predictive")]
    assert targets(runs)["wasted_predictive_over_baseline"].value is None


def test_who_is_rejected_under_a_light_load_is_counted_with_the_kinds() -> None:
    changes = [OverloadPhase("policy change", [record(COMPLETED), record(REJECTED)], 0.0)] * 2
    found = targets([], changes)["rejected_after_change"]
    assert found.value == 2 and found.why == "decode_overload 2" and not found.is_met


def test_every_other_round_is_backwards() -> None:
    assert order_of(0, POLICIES) == POLICIES
    assert order_of(1, POLICIES) == POLICIES[::-1]
    assert order_of(2, POLICIES) == POLICIES


def test_the_rows_end_with_medians_and_what_they_were_calibrated_with() -> None:
    runs = [run(n, "baseline", answered, 10) for n, answered in ((1, 5), (2, 9), (3, 6))]
    *_, median, numbers = DecodeBoundRuns({"tbt_slo_s": 0.02}, runs, []).rows()
    assert median["policy"] == "baseline" and median["within"] == 6
    assert numbers == {"round": "number", "policy": "tbt_slo_s", "value": 0.02}
