"""An overload of decoding: five admission policies take turns on one server.

Prompts are short and answers long, so the decode workers' steps are the bottleneck. Without
checking them, prompts are computed for requests that their decode worker then refuses. The limits
and the rate of arrivals follow from a measurement at the start. Then in each round

    reserved, baseline, early, predictive, predictive_lengths

take turns (every other round backwards), with the same arrivals for all of a round. `shedding` is
`limit`: fair shares would reject requests before a limit is reached, and hide the effect of
admission. The targets compare medians over the rounds of a policy's ratio to the baseline of the
same round; docs/reference/benchmarks.md defines the columns.

Not here: sending (load.py), the policies (conductor/admission/admission.py).
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from bench.overload.load import OverloadClient, OverloadPhase, OverloadShape, reload
from loadtest.client.server import Addresses
from loadtest.harness.benchmark import console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import Parameters
from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord

POLICIES = ("reserved", "baseline", "early", "predictive", "predictive_lengths")
OVERLOAD = 2.5
TBT_SLO = 1.2  # times the step of full batches
TTFT_SLO, TTFT_SLO_S_MIN = 50.0, 5.0  # times unloaded
WASTED_SHARE_MIN = 0.1
ROUNDS_MIN = 3
WITHOUT = ("prefill_1",)
BEGINS_WITH: Parameters = {
    "admission": "none",
    "shedding": "limit",
    "requests_max": 2048,
    "ttft_slo_s": 60,
}


@dataclass(frozen=True, slots=True)
class PromisedLimits:
    ttft_s: float
    tbt_s: float

    def keeps(self, record: RequestRecord) -> bool:
        step_s = mean_step_s(record)
        return (
            record.outcome == COMPLETED
            and record.ttft_s is not None
            and record.ttft_s <= self.ttft_s
            and (step_s is None or step_s <= self.tbt_s)
        )


def mean_step_s(record: RequestRecord) -> float | None:
    """The mean interval between the tokens; None with fewer than two."""
    times_s = record.token_times_s
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None


@dataclass(frozen=True, slots=True)
class PolicyRun:
    round: int
    policy: str
    phase: OverloadPhase
    limits: PromisedLimits
    load_average: float  # of the machine, at its end

    @property
    def within(self) -> int:
        return sum(self.limits.keeps(record) for record in self.phase.records)

    @property
    def wasted_share(self) -> float:
        computed = self.phase.computed_tokens
        return self.phase.wasted_tokens / computed if computed else 0.0

    def row(self) -> dict[str, Cell]:
        rejections = Counter(record.kind for record in self.phase.of(REJECTED))
        steps_s = [mean_step_s(record) for record in self.phase.of(COMPLETED)]
        known_s = [step_s for step_s in steps_s if step_s is not None]
        ttft_s = self.phase.p90_s("ttft_s")
        return {
            "round": self.round,
            "policy": self.policy,
            "sent": len(self.phase.records),
            "answered": len(self.phase.of(COMPLETED)),
            "within": self.within,
            "rejected": ", ".join(f"{kind} {count}" for kind, count in rejections.most_common()),
            "failed": len(self.phase.records) - len(self.phase.of(COMPLETED)) - rejections.total(),
            "computed_tokens": round(self.phase.computed_tokens),
            "wasted_tokens": round(self.phase.wasted_tokens),
            "ttft_p90_ms": None if ttft_s is None else round(ttft_s * 1e3, 1),
            "step_mean_ms": round(statistics.mean(known_s) * 1e3, 2) if known_s else None,
            "load_average": round(self.load_average, 1),
        }


@dataclass(frozen=True, slots=True)
class DecodeBoundRuns:
    numbers: dict[str, float]
    runs: Sequence[PolicyRun]
    changes: Sequence[OverloadPhase]

    def rows(self) -> list[dict[str, Cell]]:
        rows = [run.row() for run in self.runs]
        for policy in dict.fromkeys(run.policy for run in self.runs):
            of_policy = [run for run in self.runs if run.policy == policy]
            rows.append(
                {
                    "round": "median",
                    "policy": policy,
                    "answered": _median(of_policy, lambda run: len(run.phase.of(COMPLETED))),
                    "within": _median(of_policy, lambda run: run.within),
                    "computed_tokens": _median(of_policy, lambda run: run.phase.computed_tokens),
                    "wasted_tokens": _median(of_policy, lambda run: run.phase.wasted_tokens),
                }
            )
        for name, number in self.numbers.items():
            rows.append({"round": "number", "policy": name, "value": round(number, 5)})
        return rows

    def targets(self) -> list[Target]:
        rejected = [record for change in self.changes for record in change.of(REJECTED)]
        kinds = Counter(record.kind for record in rejected)
        why = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        found = []
        for policy in ("predictive", "predictive_lengths"):
            wasted, within = attrgetter("phase.wasted_tokens"), attrgetter("within")
            found.append(self._over_baseline("wasted", wasted, "<=", 0.6, policy))
            found.append(self._over_baseline("answered_within", within, ">=", 1.0, policy))
        return [*found, Target("rejected_after_change", len(rejected), "<=", 0, why)]

    def _over_baseline(
        self, what: str, value: Callable[[PolicyRun], float], op: str, goal: float, policy: str
    ) -> Target:
        name = f"{what}_{policy}_over_baseline"
        baselines = {run.round: run for run in self.runs if run.policy == "baseline"}
        pairs = [
            (run, baselines[run.round])
            for run in self.runs
            if run.policy == policy and run.round in baselines
        ]
        if len(pairs) < ROUNDS_MIN:
            why = f"{len(pairs)} rounds have both policies, {ROUNDS_MIN} are needed"
            return Target(name, None, op, goal, why)
        wasted = statistics.median(run.wasted_share for run in baselines.values())
        if wasted < WASTED_SHARE_MIN:
            why = f"the baseline wasted {wasted:.1%} of its prefill: no overload to judge by"
            return Target(name, None, op, goal, why)
        found = [value(run) / max(value(baseline), 1e-9) for run, baseline in pairs]
        each = ", ".join(f"{ratio:.2f}" for ratio in found)
        return Target(name, round(statistics.median(found), 3), op, goal, f"by round: {each}")


def _median(runs: Sequence[PolicyRun], value: Callable[[PolicyRun], float]) -> float:
    return statistics.median(value(run) for run in runs)


def order_of(round_number: int, policies: Sequence[str]) -> Sequence[str]:
    """Every other round backwards, so that no policy always comes first."""
    return policies if round_number % 2 == 0 else policies[::-1]


async def measure(
    addresses: Addresses,
    repository: Path,
    shape: OverloadShape,
    seed: int,
    policies: Sequence[str],
    rounds: int,
    changed: Mapping[str, str],
) -> DecodeBoundRuns:
    """`changed`: further parameters of the conductor, for experiments."""
    load = await OverloadClient.of(addresses, shape, seed)
    with console.status("unloaded ..."):
        await load.unloaded(3)  # warms up
        unloaded = await load.unloaded(8)
    with console.status("full batches ..."):
        full, capacity_per_s = await load.full(shape.seconds)
    numbers = _numbers(unloaded, full, capacity_per_s, shape)
    limits = PromisedLimits(numbers["ttft_slo_s"], numbers["tbt_slo_s"])
    calibrated = ("ttft_slo_s", "tbt_slo_s", "decode_s_expected")
    parameters: Parameters = {**{name: numbers[name] for name in calibrated}, **changed}
    runs, changes = [], []
    for number in range(rounds):
        for policy in order_of(number, policies):
            with console.status(f"round {number + 1} of {rounds}: {policy} ..."):
                change, _ = await load.during(
                    lambda policy=policy: reload(addresses.grpc, repository, parameters, policy)  # type: ignore[misc]
                )
                phase = await load.overload(policy, numbers["rate_per_s"], seed + number)
            changes.append(change)
            runs.append(PolicyRun(number + 1, policy, phase, limits, os.getloadavg()[0]))
            console.print(runs[-1].row())
    return DecodeBoundRuns(numbers, runs, changes)


def _numbers(
    unloaded: OverloadPhase, full: OverloadPhase, capacity_per_s: float, shape: OverloadShape
) -> dict[str, float]:
    unloaded_ttft_s = unloaded.p50_s("ttft_s")
    answered = full.of(COMPLETED)
    steps_s = [step_s for r in answered if (step_s := mean_step_s(r)) is not None]
    alone_s = [step_s for r in unloaded.of(COMPLETED) if (step_s := mean_step_s(r)) is not None]
    residences_s = [r.token_times_s[-1] - r.token_times_s[0] for r in answered]
    step_s = statistics.median(steps_s)
    return {
        "unloaded_ttft_s": unloaded_ttft_s,
        "unloaded_step_s": statistics.median(alone_s),
        "full_at_once": float(shape.at_once),
        "full_step_s": step_s,
        "capacity_per_s": capacity_per_s,
        "rate_per_s": OVERLOAD * capacity_per_s,
        "ttft_slo_s": round(max(TTFT_SLO_S_MIN, TTFT_SLO * unloaded_ttft_s), 3),
        "tbt_slo_s": round(TBT_SLO * step_s, 5),
        "decode_s_expected": round(statistics.median(residences_s), 3),
    }
