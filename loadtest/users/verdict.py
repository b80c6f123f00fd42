"""Whether a run kept its limits: by default the paper's service levels. Pure.

A limit holds for the P90 over the completed requests of each workload, because the workloads of a
mix differ. A multiple refers to an unloaded request of the same workload (FAST'25, section 8.1:
TTFT within 10x, TBT within 5x). Rejections are answers. A single failure fails the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.results.metrics import (
    COMPLETED,
    FAILED,
    REJECTED,
    RequestRecord,
    Slo,
    goodput,
    spread,
)
from loadtest.users.settings import LevelLimit, MinGoodput

TTFT_ADVICE = (
    "Use fewer users (-u) or shorter prompts, add a prefill worker (cp -r model_repository/"
    "prefill_0 model_repository/prefill_2), or allow more with --slo-ttft-p90."
)
TBT_ADVICE = (
    "Use fewer users (-u) or shorter answers, add a decode worker (cp -r model_repository/"
    "decode_0 model_repository/decode_2), or allow more with --slo-tbt-p90."
)
GOODPUT_ADVICE = "The limits above and the rejections show why the other requests missed it."


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Medians of a few requests of one workload, each sent alone."""

    ttft_s: float
    tbt_s: float | None
    requests: int

    def shown(self) -> str:
        tbt = "" if self.tbt_s is None else f", TBT {self.tbt_s * 1e3:.1f} ms"
        return f"TTFT {self.ttft_s * 1e3:.1f} ms{tbt} (median of {self.requests}, each alone)"


@dataclass(frozen=True, slots=True)
class LimitCheck:
    is_met: bool
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    checks: tuple[LimitCheck, ...]

    @property
    def is_passed(self) -> bool:
        return all(check.is_met for check in self.checks)

    def lines(self) -> list[str]:
        found = []
        for check in self.checks:
            found.append(f"{'met   ' if check.is_met else 'MISSED'} {check.text}")
            if not check.is_met and check.advice:
                found.append(f"       {check.advice}")
        return found


def limit_s(limit: LevelLimit, unloaded_s: float | None) -> float | None:
    """The limit in seconds; None for no limit, or for a multiple without an unloaded time."""
    if limit.times_unloaded is None:
        return limit.seconds
    return None if unloaded_s is None else limit.times_unloaded * unloaded_s


def slos(
    workloads: Sequence[str],
    ttft_limit: LevelLimit,
    tbt_limit: LevelLimit,
    unloaded: Mapping[str, Unloaded],
) -> dict[str, Slo]:
    found = {}
    for name in workloads:
        alone = unloaded.get(name)
        found[name] = Slo(
            limit_s(ttft_limit, alone.ttft_s if alone else None),
            limit_s(tbt_limit, alone.tbt_s if alone else None),
        )
    return found


def judge(
    records: Sequence[RequestRecord],
    slo_of: Mapping[str, Slo],
    unloaded: Mapping[str, Unloaded],
    least: MinGoodput,
) -> RunVerdict:
    """Check the run; `slo_of` names every workload of the run."""
    checks = [_answered(records), *_failures(records)]
    for name, slo in slo_of.items():
        done = [r for r in records if r.workload == name and r.outcome == COMPLETED]
        alone = unloaded.get(name)
        ttft_s, tbt_s = (alone.ttft_s, alone.tbt_s) if alone else (None, None)
        checks += _p90(
            f"{name}: P90 TTFT", [r.ttft_s for r in done], slo.ttft_s, ttft_s, TTFT_ADVICE
        )
        checks += _p90(f"{name}: P90 TBT", [r.tbt_s for r in done], slo.tbt_s, tbt_s, TBT_ADVICE)
    return RunVerdict((*checks, *_goodput(records, slo_of, least)))


def _answered(records: Sequence[RequestRecord]) -> LimitCheck:
    done = sum(record.outcome == COMPLETED for record in records)
    rejected = Counter(record.kind for record in records if record.outcome == REJECTED)
    text = f"{done} of {len(records)} requests answered"
    if rejected:
        kinds = ", ".join(f"{kind} {count}" for kind, count in rejected.most_common())
        text += f", {sum(rejected.values())} rejected ({kinds})"
    advice = "" if done else "A run without an answer proves nothing: run it longer."
    return LimitCheck(done > 0, text, advice)


def _failures(records: Sequence[RequestRecord]) -> list[LimitCheck]:
    failed = [record for record in records if record.outcome == FAILED]
    if not failed:
        return []
    kinds = Counter(record.kind for record in failed).most_common()
    shown = ", ".join(f"{kind} {count}" for kind, count in kinds)
    first = min(failed, key=lambda record: record.finished_s)
    return [LimitCheck(False, f"{len(failed)} requests failed: {shown}", f"First: {first.message}")]


def _p90(
    what: str,
    values: Sequence[float | None],
    limit: float | None,
    unloaded_s: float | None,
    advice: str,
) -> list[LimitCheck]:
    if limit is None:
        return []
    bound = f"at most {limit:.4g} s"
    if unloaded_s is not None:
        bound += f" (unloaded {unloaded_s:.4g} s)"
    found = spread(values)
    if found is None and values:  # answers of one token have no TBT
        return [LimitCheck(True, f"{what}: no answer had two tokens, {bound}")]
    if found is None:
        return [LimitCheck(False, f"{what}: no request was answered, {bound}")]
    text = f"{what} {found.p90:.4g} s, {bound}, {found.count} requests"
    return [LimitCheck(found.p90 <= limit, text, advice)]


def _goodput(
    records: Sequence[RequestRecord], slo_of: Mapping[str, Slo], least: MinGoodput
) -> list[LimitCheck]:
    good = goodput(records, Slo(), slo_of)
    found = []
    if least.requests_per_s is not None:
        text = f"goodput {good.requests_per_s:.3g} requests/s, at least {least.requests_per_s:.3g}"
        found.append(LimitCheck(good.requests_per_s >= least.requests_per_s, text, GOODPUT_ADVICE))
    if least.share is not None:
        text = f"goodput {good.share:.1%} of the requests, at least {least.share:.1%}"
        found.append(LimitCheck(good.share >= least.share, text, GOODPUT_ADVICE))
    return found
