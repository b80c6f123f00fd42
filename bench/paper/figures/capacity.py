"""How many more requests are served within the service levels? FAST'25, Figures 1 and 7.

16 nodes each: ours in the best split, vLLM, with a prefix cache, with chunked prefill. TTFT <= 30
s, TBT <= 100, 200 and 300 ms. The traces are replayed at rising speeds. A share is of all requests;
a request without an answer is not within. The paper does not define its gains, so there are two
readings:

    share      at one speed per trace: the lowest (steps of STEP) at which ours is still within at
               100 ms for nearly all and all goals hold; ours over the best baseline, less one
    sustained  the highest speed up to which a system serves SUSTAINED_SHARE within

Ours is in the best split for each reading and limit. The best baseline has chunks of 2,048 tokens.
Chunks of 512 are shown beside it, and ours must beat them in the second reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.paper import constants
from bench.paper.coupled import CoupledSettings
from bench.paper.figures.served import (
    TRACES,
    ServedRun,
    ServePlan,
    ours,
    serve_all,
    speeds,
    traces_of,
)
from loadtest.harness.result import Target
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

TTFT_SLO_S, TBT_SLOS_S = 30.0, (0.1, 0.2, 0.3)
SUSTAINED_SHARE = 0.9
STEP = 0.05
PREFILLS = {"conversation": (6, 7, 8), "synthetic": (6, 7, 8)}
PROBE_SPEED = {"conversation": 1.35, "synthetic": 1.1}  # of all splits
TABLE = (1.0, 1.5, 2.0)  # the speeds at which all systems are shown
FINE = {  # where ours reaches its limit
    "conversation": (*speeds(1.2, 1.5, STEP), *speeds(1.6, 2.0, 0.1)),
    "synthetic": (*speeds(1.05, 1.5, STEP), *speeds(1.6, 2.0, 0.1)),
}
SLOW = speeds(0.1, 0.9, 0.1)  # where baselines sustain
NEARLY_ALL = {"conversation": 0.95, "synthetic": 0.94}  # of ours, within at 100 ms
PAPER_GAIN = {
    "conversation": {0.1: 4.98, 0.2: 1.57, 0.3: 0.59},
    "synthetic": {0.1: 0.62, 0.2: 0.40, 0.3: 0.28},
}
SHARE_GAIN_MIN = {"conversation": {0.1: 4.98, 0.2: 1.57}, "synthetic": PAPER_GAIN["synthetic"]}
SUSTAINED_GAIN_MIN = {"conversation": {0.1: 2.0, 0.2: 1.5}}
BEST_OF = (constants.VLLM, constants.VLLM_CACHED, constants.CHUNKED_LARGE)
BASELINES: tuple[CoupledSettings, ...] = (*BEST_OF, constants.CHUNKED_SMALL)
SMALL = constants.CHUNKED_SMALL.name


@dataclass(slots=True)
class TraceCapacity:
    """All runs on one trace, by system and speed."""

    trace: str
    ours: dict[int, dict[float, ServedRun]] = field(default_factory=dict)  # by prefill nodes
    theirs: dict[str, dict[float, ServedRun]] = field(default_factory=dict)  # by baseline

    def add(self, plan: ServePlan, run: ServedRun) -> None:
        if isinstance(plan.system, ClusterSettings):
            self.ours.setdefault(plan.system.prefills, {})[plan.speed] = run
        else:
            self.theirs.setdefault(plan.name, {})[plan.speed] = run

    def best_split(self, speed: float) -> int:
        """At 100 ms, of the splits that were run at this speed."""
        ran = [prefills for prefills, runs in self.ours.items() if speed in runs]
        return max(ran, key=lambda p: self.ours[p][speed].within(TTFT_SLO_S, TBT_SLOS_S[0]))

    def share(self, speed: float, tbt_slo_s: float) -> float:
        """Our share, in the split that is best at 100 ms."""
        return self.ours[self.best_split(speed)][speed].within(TTFT_SLO_S, tbt_slo_s)

    def sustained_of_ours(self, tbt_slo_s: float) -> float:
        """In the split that is best for this limit."""
        return max(sustained(runs, tbt_slo_s) for runs in self.ours.values())

    def gain(self, speed: float, tbt_slo_s: float) -> float:
        """Gain of our share at one speed over the best baseline's."""
        runs = [self.theirs[baseline.name][speed] for baseline in BEST_OF]
        one = 1 / runs[0].outcome.offered  # at least one request: no infinite gain
        best = max(one, *(run.within(TTFT_SLO_S, tbt_slo_s) for run in runs))
        return self.share(speed, tbt_slo_s) / best - 1

    def sustained_gain(self, tbt_slo_s: float) -> float:
        best = max(sustained(self.theirs[baseline.name], tbt_slo_s) for baseline in BEST_OF)
        return self.sustained_of_ours(tbt_slo_s) / max(best, SLOW[0]) - 1

    def has_all(self, speed: float) -> bool:
        """Whether ours serves nearly all at this speed and every goal of the first reading
        holds.
        """
        goals = SHARE_GAIN_MIN[self.trace].items()
        return self.has_nearly_all(speed) and all(self.gain(speed, t) >= g for t, g in goals)

    def has_nearly_all(self, speed: float) -> bool:
        return self.share(speed, TBT_SLOS_S[0]) >= NEARLY_ALL[self.trace]

    def both_ran(self) -> list[float]:
        ours = set().union(*self.ours.values())
        return sorted(ours.intersection(*self.theirs.values()))

    def compared_at(self) -> float:
        """The speed of the first reading; if no speed reaches all, the highest at which ours serves
        nearly all."""
        served = [speed for speed in self.both_ran() if self.has_nearly_all(speed)]
        with_all = [speed for speed in served if self.has_all(speed)]
        return (with_all[:1] or served[-1:] or self.both_ran()[:1])[0]


def sustained(runs: Mapping[float, ServedRun], tbt_slo_s: float) -> float:
    """The highest speed up to which nearly all is within; 0 if it never is."""
    highest = 0.0
    for speed in sorted(runs):
        if runs[speed].within(TTFT_SLO_S, tbt_slo_s) < SUSTAINED_SHARE:
            break
        highest = speed
    return highest


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every trace; with --speed at these only, with --prefills in this split only."""
    found = {trace: explore(trace, options, begin) for trace in traces_of(options, TRACES)}
    why_not = options.is_shortened or ("only some speeds were run" if options.speeds else "")
    return rows_of(found), targets_of(found, why_not)


def explore(trace: str, options: SimulationOptions, begin: Begin) -> TraceCapacity:
    """All runs that the two readings need, and no others."""
    found = TraceCapacity(trace)
    splits = (options.prefills,) if options.prefills else PREFILLS[trace]
    asked, probe = sorted(options.speeds), PROBE_SPEED[trace]

    def add(systems: Sequence[int | CoupledSettings], at: Sequence[float]) -> None:
        """`systems`: baselines, or ours with that many prefill nodes."""
        plans = [
            ours(trace, shape_of(options, system), speed, options)
            if isinstance(system, int)
            else ServePlan(trace, system, speed)
            for system in systems
            for speed in at
            if not isinstance(system, int) or speed not in found.ours.get(system, {})
        ]
        for plan, run in zip(plans, serve_all(plans, options, begin), strict=True):
            found.add(plan, run)

    add(splits, asked or [probe])
    add(BASELINES, asked or sorted({*SLOW, *TABLE, probe}))
    if asked:
        return found
    best = found.best_split(probe)
    add([best], TABLE)
    for speed in FINE[trace]:  # the first reading
        if any(found.has_all(ran) for ran in found.both_ran() if ran <= speed):
            break
        add([best], [speed])
        if not found.has_nearly_all(speed):
            break
        if speed != probe:
            add(BASELINES, [speed])
    for prefills in splits:  # the second
        for speed in (TABLE[1], *(speed for speed in FINE[trace] if speed > TABLE[1])):
            add([prefills], [speed])
            run = found.ours[prefills][speed]
            if run.within(TTFT_SLO_S, TBT_SLOS_S[1]) < SUSTAINED_SHARE:
                break
    return found


def shape_of(options: SimulationOptions, prefills: int) -> ClusterSettings:
    decodes = options.decodes or constants.NODES - prefills
    return replace(options.settings(), prefills=prefills, decodes=decodes)


def rows_of(found: Mapping[str, TraceCapacity]) -> Rows:
    rows: Rows = []
    for trace, capacity in found.items():
        compared = capacity.compared_at()
        of_all = {f"mooncake {p}P": runs for p, runs in capacity.ours.items()} | capacity.theirs
        for system, runs in of_all.items():
            for speed, run in sorted(runs.items()):
                row = {"trace": trace, **run.columns(), "system": system, "name": run.system}
                for tbt_slo_s in TBT_SLOS_S:
                    ms = f"{1e3 * tbt_slo_s:.0f}_ms"
                    within = run.within(TTFT_SLO_S, tbt_slo_s)
                    at_best = run.within_at_best(TTFT_SLO_S, tbt_slo_s)
                    row[f"within_{ms}_percent"] = round(100 * within, 2)
                    row[f"at_best_{ms}_percent"] = round(100 * at_best, 2)
                    row[f"sustained_{ms}"] = sustained(runs, tbt_slo_s)
                    row[f"paper_gain_{ms}"] = PAPER_GAIN[trace][tbt_slo_s]
                row["is_compared_at"] = speed == compared
                rows.append(row)
    return rows


def targets_of(found: Mapping[str, TraceCapacity], why_not: str = "") -> list[Target]:
    targets: list[Target] = []
    for trace in TRACES:
        capacity = None if why_not else found.get(trace)
        why = why_not or f"{trace} was not run"
        speed = capacity.compared_at() if capacity else 0.0
        at = f"at {speed:g}x, {capacity.best_split(speed)}P" if capacity else ""
        nearly = capacity.share(speed, TBT_SLOS_S[0]) if capacity else None
        named: list[tuple[str, float | None, float]] = [
            (f"share of ours within at 100 ms {at}", nearly, NEARLY_ALL[trace])
        ]
        for tbt_slo_s, goal in SHARE_GAIN_MIN[trace].items():
            gain = capacity.gain(speed, tbt_slo_s) if capacity else None
            named.append((f"gain in share at {1e3 * tbt_slo_s:.0f} ms {at}", gain, goal))
        for tbt_slo_s, goal in SUSTAINED_GAIN_MIN.get(trace, {}).items():
            gain = capacity.sustained_gain(tbt_slo_s) if capacity else None
            named.append((f"gain in sustained speed at {1e3 * tbt_slo_s:.0f} ms", gain, goal))
        if trace in SUSTAINED_GAIN_MIN:
            more = None
            if capacity:
                small = sustained(capacity.theirs[SMALL], TBT_SLOS_S[0])
                more = capacity.sustained_of_ours(TBT_SLOS_S[0]) - small
            named.append((f"sustained speed at 100 ms, more than {SMALL} by", more, STEP))
        targets += [
            Target(f"{trace}: {name}", round(value, 4), ">=", goal)
            if value is not None
            else Target(f"{trace}: {name}", None, ">=", goal, why)
            for name, value, goal in named
        ]
    return targets
