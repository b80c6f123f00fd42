"""The targets of the conductor in Dynamo's engine, with the values found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from bench.dynamo.peer import BLOCKS, ROUTERS, SPEEDS, PeerResult, PeerRun, ReplayTimes, p99_ratio
from loadtest.harness.result import Target
from loadtest.simulator.cluster.outcome import SimulationOutcome

GATE_PERCENT = 1.0  # mean, p50, p90, p99 TTFT and reuse under round robin
LENGTH_SHARE_MIN = 0.5  # the conductor's default minimum for each class of prompt length

Figure = Callable[[SimulationOutcome], float]


@dataclass(frozen=True, slots=True)
class DynamoCase:
    """One replay: its scheduler, and its settings."""

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
        """Whether it has the number of workers of the targets."""
        return (self.prefills, self.decodes) == (2, 2)

    def of_peer(self, router: str) -> PeerRun:
        return PeerRun(router, self.blocks, self.speed, self.is_spread, self.prefills, self.decodes)


@dataclass(frozen=True, slots=True)
class DynamoRun:
    case: DynamoCase
    outcome: SimulationOutcome
    times: ReplayTimes
    seconds: float  # of real time


def _mean_ms(outcome: SimulationOutcome) -> float:
    return 1e3 * outcome.ttft_s.mean


def _p99_ms(outcome: SimulationOutcome) -> float:
    return 1e3 * outcome.ttft_s.p99


def _rejected(outcome: SimulationOutcome) -> float:
    return float(outcome.offered - outcome.finished)


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure of a case, at each size of the cache (BLOCKS)."""

    name: str
    case: DynamoCase
    figure: Figure
    op: str
    goals: tuple[float, float]
    says_filled: bool = False  # report the same figure with filled passes beside it


CENTRIC = DynamoCase("kvcache_centric", "fifo", "shared", BLOCKS[0], 1.0)
ADAPTIVE = replace(CENTRIC, policy="adaptive", queue_order="shortest_first")
SPREAD = replace(ADAPTIVE, is_spread=True)
OVERLOAD = replace(ADAPTIVE, speed=4.0)
# With a lower minimum for each class of prompt length, since Dynamo's routers have none.
LOW_SHARE = replace(OVERLOAD, length_share_min=0.25)
AT_RECORDED_SPEED = (
    Promise("kvcache_centric, FIFO, mean TTFT, ms", CENTRIC, _mean_ms, "<=", (765.0, 535.0), True),
    Promise("adaptive, mean TTFT, ms", ADAPTIVE, _mean_ms, "<=", (480.0, 335.0), True),
    Promise("adaptive, p99 TTFT, ms", ADAPTIVE, _p99_ms, "<=", (2_800.0, 2_300.0)),
    Promise("adaptive, longest wait, s", ADAPTIVE, attrgetter("wait_max_s"), "<=", (6.0, 6.0)),
    Promise("adaptive, ticks spread, mean TTFT, ms", SPREAD, _mean_ms, "<=", (275.0, 205.0)),
    Promise("kvcache_centric, rejected at 1x, requests", CENTRIC, _rejected, "<=", (0, 0)),
    Promise("adaptive, rejected at 1x, requests", ADAPTIVE, _rejected, "<=", (0, 0)),
)
IN_OVERLOAD = (
    Promise("good requests", OVERLOAD, attrgetter("good"), ">=", (11_150.0, 11_700.0)),
    Promise("p99 TTFT of the admitted, ms", OVERLOAD, _p99_ms, "<=", (10_000.0, 10_000.0)),
    Promise(
        "good share of the worst length class / of all",
        OVERLOAD,
        attrgetter("least_class_share"),
        ">=",
        (0.5, 0.5),
    ),
    Promise(
        "p99 TTFT of the worst length class, s",
        OVERLOAD,
        attrgetter("worst_class_p99_s"),
        "<=",
        (11.0, 11.0),
    ),
)
BESIDE_DYNAMO: tuple[tuple[str, Figure], ...] = (
    ("good requests", attrgetter("good")),
    ("good output tokens/s of the arrivals' time", attrgetter("good_tokens_per_s")),
)


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


class _Found:
    """Finds runs, and makes a target without a value where one is missing."""

    def __init__(
        self,
        runs: Sequence[DynamoRun],
        peer: Mapping[PeerRun, PeerResult],
        why_not: str,
        why_no_peer: str,
    ) -> None:
        self._runs = {run.case: run for run in runs}
        self._peer = peer
        self._why_not = why_not
        self._why_no_peer = why_no_peer

    def run(self, case: DynamoCase) -> DynamoRun | None:
        return None if self._why_not else self._runs.get(case)

    def _why_none(self, run: DynamoRun | None) -> str:
        why = self._why_not or (self._why_no_peer if run else "this case was not run")
        return why or "Dynamo's replay has no such run"

    def target(self, name: str, promise: Promise, blocks: int) -> Target:
        case = replace(promise.case, blocks=blocks)
        goal = float(promise.goals[BLOCKS.index(blocks)])
        if (run := self.run(case)) is None:
            return Target(name, None, promise.op, goal, self._why_not or "this case was not run")
        why = ""
        if promise.says_filled and (filled := self.run(replace(case, passes="filled"))):
            why = f"{promise.figure(filled.outcome):.0f} when every pass is filled"
        return Target(name, round(float(promise.figure(run.outcome)), 3), promise.op, goal, why)

    def _of_peer(self, case: DynamoCase) -> dict[str, PeerResult]:
        runs = {router: self._peer.get(case.of_peer(router)) for router in ROUTERS}
        return {router: result for router, result in runs.items() if result is not None}

    def beside_the_best(self, name: str, case: DynamoCase, figure: Figure) -> Target:
        """A figure over that of Dynamo's router with the highest value."""
        run, peer = self.run(case), self._of_peer(case)
        if run is None or not peer:
            return Target(name, None, ">=", 1.0, self._why_none(run))
        best = max(peer, key=lambda router: figure(peer[router].outcome))
        ours, theirs = figure(run.outcome), figure(peer[best].outcome)
        why = f"{ours:,.0f} beside {theirs:,.0f} of Dynamo's {best}"
        return Target(name, round(ours / theirs, 4), ">=", 1.0, why)

    def beside_the_same(self, name: str, case: DynamoCase) -> Target:
        """p99 of TTFT over that of Dynamo's router with most good tokens, over the requests that
        are good in both."""
        run = self.run(case)
        timed = [result for result in self._of_peer(case).values() if result.times is not None]
        if run is None or not timed:
            return Target(name, None, "<=", 1.0, self._why_none(run))
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
    """`why_not`: why the targets of the whole trace do not apply; `why_no_peer`: why there is no
    gate."""
    found = _Found(runs, peer, why_not, why_no_peer)
    targets = _gate(runs, peer, why_no_peer)
    for blocks in BLOCKS:
        targets += [
            found.target(f"{promise.name}, {blocks} blocks", promise, blocks)
            for promise in AT_RECORDED_SPEED
        ]
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


def round_robin(blocks: int, speed: float) -> DynamoCase:
    """Dynamo's engine without any part of ours, for the gate."""
    return DynamoCase("round_robin", "fifo", "filled", blocks, speed)


def _in_overload(found: _Found, blocks: int) -> list[Target]:
    size = f"4x, {blocks} blocks"
    targets = [found.target(f"{promise.name}, {size}", promise, blocks) for promise in IN_OVERLOAD]
    case, low = (replace(each, blocks=blocks) for each in (OVERLOAD, LOW_SHARE))
    for of, share in ((case, ""), (low, f", length_share_min {low.length_share_min:g}")):
        targets += [
            found.beside_the_best(f"{name} over Dynamo's best router, {size}{share}", of, figure)
            for name, figure in BESIDE_DYNAMO
        ]
    name = f"p99 TTFT over that of Dynamo's best router, good in both, {size}"
    return [*targets, found.beside_the_same(name, case)]
