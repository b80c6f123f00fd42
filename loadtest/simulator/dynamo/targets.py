"""What was promised of the conductor in Dynamo's engine, beside what was found.

Not here: the runs (experiments/dynamo_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.bench.result import Target
from loadtest.simulator.cluster.outcome import SimulationOutcome
from loadtest.simulator.dynamo.peer import (
    BLOCKS,
    ROUTERS,
    SPEEDS,
    PeerResult,
    PeerRun,
    ReplayTimes,
    p99_ratio,
)

GATE_PERCENT = 1.0  # mean, p50, p90, p99 TTFT and reuse under round robin
CENTRIC_MEAN_MS = {2_048: 765.0, 16_384: 535.0}
ADAPTIVE_MEAN_MS = {2_048: 480.0, 16_384: 335.0}
ADAPTIVE_P99_MS = {2_048: 2_800.0, 16_384: 2_300.0}
WAIT_S_MAX = 6.0
SPREAD_MEAN_MS = {2_048: 275.0, 16_384: 205.0}
GOOD = {2_048: 11_150.0, 16_384: 11_700.0}  # at four times the recorded speed
OVERLOAD_SPEED = 4.0
LENGTH_SHARE_MIN = 0.5  # the conductor's default floor for each class of prompt length
LOW_SHARE_MIN = 0.25  # a lower one, since Dynamo's routers have none
ADMITTED_P99_MS, CLASS_P99_S, CLASS_SHARE_MIN = 10_000.0, 11.0, 0.5


@dataclass(frozen=True, slots=True)
class DynamoCase:
    """One replay: who schedules, and what it is given."""

    policy: str  # of the conductor, or round_robin
    queue_order: str
    passes: str  # filled | shared
    blocks: int
    speed: float
    is_spread: bool = False
    prefills: int = 2  # workers
    decodes: int = 2
    length_share_min: float = LENGTH_SHARE_MIN  # of the conductor

    @property
    def name(self) -> str:
        ticks = " spread" if self.is_spread else ""
        workers = "" if self.is_usual else f" {self.prefills}P{self.decodes}D"
        return f"{self.policy} {self.blocks} blocks {self.speed:g}x{ticks}{workers}"

    @property
    def is_usual(self) -> bool:
        """As many workers as everything was promised of."""
        return (self.prefills, self.decodes) == (2, 2)

    def of_peer(self, router: str) -> PeerRun:
        return PeerRun(router, self.blocks, self.speed, self.is_spread, self.prefills, self.decodes)


@dataclass(frozen=True, slots=True)
class DynamoRun:
    case: DynamoCase
    outcome: SimulationOutcome
    times: ReplayTimes
    seconds: float  # of real time


def gate_percent(outcome: SimulationOutcome, result: SimulationOutcome) -> dict[str, float]:
    """How far this engine is from Dynamo's own, per figure."""
    pairs = {
        "mean": (outcome.ttft_s.mean, result.ttft_s.mean),
        "p50": (outcome.ttft_s.p50, result.ttft_s.p50),
        "p90": (outcome.ttft_s.p90, result.ttft_s.p90),
        "p99": (outcome.ttft_s.p99, result.ttft_s.p99),
        "reuse": (outcome.hit_share, result.hit_share),
    }
    return {name: 100 * abs(ours - theirs) / theirs for name, (ours, theirs) in pairs.items()}


Figure = Callable[[SimulationOutcome], float]


class _Found:
    """Looks runs up, and makes a target without a value where one is missing."""

    def __init__(
        self, runs: Sequence[DynamoRun], peer: Mapping[PeerRun, PeerResult], why_not: str,
        why_no_peer: str,
    ) -> None:  # fmt: skip
        self._runs = {run.case: run for run in runs}
        self._peer = peer
        self._why_not = why_not
        self._why_no_peer = why_no_peer

    def run(self, case: DynamoCase) -> DynamoRun | None:
        return None if self._why_not else self._runs.get(case)

    def outcome(self, case: DynamoCase) -> SimulationOutcome | None:
        run = self.run(case)
        return None if run is None else run.outcome

    def target(
        self, name: str, case: DynamoCase, figure: Figure, op: str, goal: float,
        why: str = "",
    ) -> Target:  # fmt: skip
        outcome = self.outcome(case)
        if outcome is None:
            return Target(name, None, op, goal, self._why_not or "this case was not run")
        return Target(name, round(figure(outcome), 3), op, goal, why)

    def beside_the_best(
        self,
        name: str,
        case: DynamoCase,
        figure: Figure,
        goal: float = 1.0,
    ) -> Target:
        """A figure over that of the router of Dynamo's that has most of it."""
        of_peer = {
            router: figure(result.outcome)
            for router in ROUTERS
            if (result := self._peer.get(case.of_peer(router))) is not None
        }
        outcome = self.outcome(case)
        if outcome is None or not of_peer:
            why = self._why_not or (self._why_no_peer if outcome else "this case was not run")
            return Target(name, None, ">=", goal, why or "Dynamo's replay has no such run")
        best = max(of_peer, key=of_peer.__getitem__)
        why = f"{figure(outcome):,.0f} beside {of_peer[best]:,.0f} of Dynamo's {best}"
        return Target(name, round(figure(outcome) / of_peer[best], 4), ">=", goal, why)

    def beside_the_same(self, name: str, case: DynamoCase) -> Target:
        """p99 of TTFT over that of Dynamo's router with most good tokens, over the requests that
        are good in both."""
        results = [r for router in ROUTERS if (r := self._peer.get(case.of_peer(router)))]
        run = self.run(case)
        timed = [r for r in results if r.times is not None]
        if run is None or not timed:
            why = self._why_not or (self._why_no_peer if run else "this case was not run")
            return Target(name, None, "<=", 1.0, why or "Dynamo's replay has no such run")
        best = max(timed, key=lambda result: result.outcome.good_tokens_per_s)
        assert best.times is not None
        both = int((run.times.is_good & best.times.is_good).sum())
        ratio = p99_ratio(run.times, best.times)
        return Target(name, round(ratio, 4), "<=", 1.0, f"{both} requests are good in both")


def targets_of(
    runs: Sequence[DynamoRun],
    peer: Mapping[PeerRun, PeerResult],
    why_not: str = "",
    why_no_peer: str = "",
) -> list[Target]:
    """`why_not`: what was promised of the whole trace was not run; `why_no_peer`: no gate."""
    found = _Found(runs, peer, why_not, why_no_peer)
    targets = _gate(runs, peer, why_no_peer)
    for blocks in BLOCKS:
        targets += _at_recorded_speed(found, blocks)
    for blocks in BLOCKS:
        targets += _in_overload(found, blocks)
    return targets


def _gate(
    runs: Sequence[DynamoRun], peer: Mapping[PeerRun, PeerResult], why_no_peer: str
) -> list[Target]:
    outcomes = {run.case: run.outcome for run in runs if run.case.policy == "round_robin"}
    promised = [round_robin(blocks, speed) for speed in SPEEDS for blocks in BLOCKS]
    targets = []
    for case in dict.fromkeys((*promised, *outcomes)):
        name = (
            f"gate: most any figure is off Dynamo's, percent, {case.speed:g}x, {case.blocks} blocks"
        )
        name += "" if case.is_usual else f", {case.prefills}P{case.decodes}D"
        result = peer.get(case.of_peer("round_robin"))
        if case not in outcomes or result is None:
            why = why_no_peer or "this case was not run"
            targets.append(Target(name, None, "<=", GATE_PERCENT, why))
            continue
        off = gate_percent(outcomes[case], result.outcome)
        figures = ", ".join(f"{figure} {percent:.2f}" for figure, percent in off.items())
        targets.append(Target(name, round(max(off.values()), 4), "<=", GATE_PERCENT, figures))
    return targets


def round_robin(blocks: int, speed: float, prefills: int = 2, decodes: int = 2) -> DynamoCase:
    """Dynamo's engine with nothing of ours: what the gate compares."""
    return DynamoCase("round_robin", "fifo", "filled", blocks, speed, False, prefills, decodes)


def _at_recorded_speed(found: _Found, blocks: int) -> list[Target]:
    centric = DynamoCase("kvcache_centric", "fifo", "shared", blocks, 1.0)
    adaptive = DynamoCase("adaptive", "shortest_first", "shared", blocks, 1.0)
    spread = replace(adaptive, is_spread=True)

    def mean_ms(outcome: SimulationOutcome) -> float:
        return 1e3 * outcome.ttft_s.mean

    def filled(case: DynamoCase) -> str:
        outcome = found.outcome(replace(case, passes="filled"))
        return f"{mean_ms(outcome):.0f} when every pass is filled" if outcome else ""

    size = f"{blocks} blocks"
    targets = [
        found.target(
            f"kvcache_centric, FIFO, mean TTFT, ms, {size}", centric, mean_ms, "<=",
            CENTRIC_MEAN_MS[blocks], filled(centric),
        ),
        found.target(
            f"adaptive, mean TTFT, ms, {size}", adaptive, mean_ms, "<=", ADAPTIVE_MEAN_MS[blocks],
            filled(adaptive),
        ),
        found.target(
            f"adaptive, p99 TTFT, ms, {size}", adaptive, lambda o: 1e3 * o.ttft_s.p99, "<=",
            ADAPTIVE_P99_MS[blocks],
        ),
        found.target(
            f"adaptive, longest wait, s, {size}", adaptive, lambda o: o.wait_max_s, "<=",
            WAIT_S_MAX,
        ),
        found.target(
            f"adaptive, ticks spread, mean TTFT, ms, {size}", spread, mean_ms, "<=",
            SPREAD_MEAN_MS[blocks],
        ),
    ]  # fmt: skip
    for case, name in ((centric, "kvcache_centric"), (adaptive, "adaptive")):
        targets.append(found.target(
            f"{name}, turned away at 1x, requests, {size}", case,
            lambda o: float(o.offered - o.finished), "<=", 0.0,
        ))  # fmt: skip
    return targets


def _in_overload(found: _Found, blocks: int) -> list[Target]:
    case = DynamoCase("adaptive", "shortest_first", "shared", blocks, OVERLOAD_SPEED)
    low = replace(case, length_share_min=LOW_SHARE_MIN)
    size = f"4x, {blocks} blocks"
    figures: tuple[tuple[str, Figure, str, float], ...] = (
        ("good requests", lambda o: float(o.good), ">=", GOOD[blocks]),
        ("p99 TTFT of the admitted, ms", lambda o: 1e3 * o.ttft_s.p99, "<=", ADMITTED_P99_MS),
        ("good share of the worst length class / of all", lambda o: o.least_class_share, ">=",
         CLASS_SHARE_MIN),
        ("p99 TTFT of the worst length class, s", lambda o: o.worst_class_p99_s, "<=",
         CLASS_P99_S),
    )  # fmt: skip
    targets = [
        found.target(f"{name}, {size}", case, figure, op, goal)
        for name, figure, op, goal in figures
    ]
    for of, share in ((case, ""), (low, f", length_share_min {LOW_SHARE_MIN:g}")):
        targets += [
            found.beside_the_best(
                f"good requests over Dynamo's best router, {size}{share}", of,
                lambda o: float(o.good),
            ),
            found.beside_the_best(
                f"good output tokens/s of the arrivals' time over Dynamo's best router, {size}"
                f"{share}", of, lambda o: o.good_tokens_per_s,
            ),
        ]  # fmt: skip
    targets.append(found.beside_the_same(
        f"p99 TTFT over that of Dynamo's best router, good in both, {size}", case
    ))  # fmt: skip
    return targets
