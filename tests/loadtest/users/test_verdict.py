"""Whether a run kept its limits."""

from __future__ import annotations

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, Slo
from loadtest.users.settings import LevelLimit, MinGoodput
from loadtest.users.verdict import RunVerdict, Unloaded, judge, slos

UNLOADED = {"chat": Unloaded(0.02, 0.005, 3), "document": Unloaded(0.4, 0.005, 3)}


def record(
    workload: str = "chat",
    ttft_s: float = 0.05,
    tbt_s: float = 0.01,
    sent_s: float = 0.0,
    outcome: str = COMPLETED,
    kind: str = "",
    tokens: int = 3,
) -> RequestRecord:
    times = tuple(sent_s + ttft_s + i * tbt_s for i in range(tokens))
    return RequestRecord(
        0,
        "r",
        sent_s,
        sent_s,
        times[-1],
        10,
        3,
        outcome,
        kind,
        f"why {kind}",
        token_times_s=times if outcome == COMPLETED else (),
        workload=workload,
    )


def verdict(
    *records: RequestRecord, goodput: MinGoodput | None = None, **slo_of: Slo
) -> RunVerdict:
    return judge(records, slo_of, UNLOADED, goodput or MinGoodput())


def missed(found: RunVerdict) -> list[str]:
    return [check.text for check in found.checks if not check.is_met]


def test_limits_are_multiples_of_each_workloads_own_unloaded_request() -> None:
    limits = (LevelLimit(times_unloaded=10.0), LevelLimit(times_unloaded=5.0))
    assert slos(["chat", "document"], *limits, UNLOADED) == {
        "chat": Slo(0.2, 0.025),
        "document": Slo(4.0, 0.025),
    }
    assert slos(["chat"], LevelLimit(seconds=1.5), LevelLimit(), {}) == {"chat": Slo(1.5, None)}


def test_the_ninetieth_percentile_decides_not_the_slowest() -> None:
    fast, slow = [record()] * 19, [record(ttft_s=5.0)]
    assert verdict(*fast, *slow, chat=Slo(0.2, 0.025)).is_passed
    found = verdict(*fast, *(slow * 5), chat=Slo(0.2, 0.025))
    (text,) = missed(found)
    assert text.startswith("chat: P90 TTFT 5 s, at most 0.2 s")
    assert "--slo-ttft-p90" in "\n".join(found.lines())


def test_each_workload_keeps_its_own_limit() -> None:
    records = [record(), record("document", ttft_s=1.0)]
    assert verdict(*records, chat=Slo(0.2), document=Slo(4.0)).is_passed
    assert not verdict(*records, chat=Slo(0.2), document=Slo(0.5)).is_passed


def test_slow_tokens_miss_the_other_limit() -> None:
    (text,) = missed(verdict(record(tbt_s=0.5), chat=Slo(None, 0.025)))
    assert text.startswith("chat: P90 TBT 0.5 s")


def test_a_rejection_is_told_but_fails_nothing() -> None:
    found = verdict(record(), record(outcome=REJECTED, kind="ttft_slo"), chat=Slo(0.2, 0.1))
    assert found.is_passed
    assert "1 of 2 requests answered, 1 rejected (ttft_slo 1)" in found.checks[0].text


def test_one_failure_fails_the_run() -> None:
    found = verdict(*[record()] * 99, record(outcome=FAILED, kind="timeout"), chat=Slo())
    assert missed(found) == ["1 requests failed: timeout 1"]
    assert "why timeout" in "\n".join(found.lines())


def test_a_run_without_an_answer_has_not_passed() -> None:
    assert not verdict(chat=Slo()).is_passed
    rejected = record(outcome=REJECTED, kind="ttft_slo")
    assert len(missed(verdict(rejected, chat=Slo(0.2)))) == 2


def test_a_workload_that_was_never_answered_misses_its_limit() -> None:
    found = verdict(record(), chat=Slo(0.2), document=Slo(4.0))
    assert missed(found) == [
        "document: P90 TTFT: no request was answered, at most 4 s (unloaded 0.4 s)"
    ]


def test_answers_of_one_token_have_no_tbt_to_miss() -> None:
    assert verdict(record(tokens=1), chat=Slo(0.2, 1e-9)).is_passed


def test_goodput_as_a_share_counts_rejections_as_not_served() -> None:
    records = [*[record()] * 8, record(ttft_s=1.0), record(outcome=REJECTED, kind="x")]
    slo = {"chat": Slo(0.2)}
    assert not judge(records, slo, {}, MinGoodput(share=0.81)).checks[-1].is_met
    assert judge(records, slo, {}, MinGoodput(share=0.8)).checks[-1].is_met


def test_goodput_per_second_is_over_the_time_of_the_run() -> None:
    records = [record(sent_s=float(i)) for i in range(10)]  # from 0 s to 9.07 s
    assert verdict(*records, goodput=MinGoodput(requests_per_s=1.1), chat=Slo()).is_passed
    assert not verdict(*records, goodput=MinGoodput(requests_per_s=1.2), chat=Slo()).is_passed
