"""What was promised of the conductor in Dynamo's engine, beside what was found.

Not here: the runs (experiments/dynamo_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.bench.result import Target
from loadtest.simulator.dynamo.outcome import Outcome
from loadtest.simulator.dynamo.peer import BLOCKS, SPEEDS, PeerResult, PeerRun

GATE_PERCENT = 1.0  # mean, p50, p90, p99 TTFT and reuse under round robin
CENTRIC_MEAN_MS = {2_048: 765.0, 16_384: 535.0}
ADAPTIVE_MEAN_MS = {2_048: 480.0, 16_384: 335.0}
ADAPTIVE_P99_MS = {2_048: 2_800.0, 16_384: 2_300.0}
WAIT_S_MAX = 6.0
SPREAD_MEAN_MS = {2_048: 275.0, 16_384: 205.0}
GOOD = {2_048: 11_150.0, 16_384: 11_700.0}  # at four times the recorded speed
GOOD_TOKENS_PER_S = {2_048: 4_180.0, 16_384: 4_480.0}
ADMITTED_P99_MS, CLASS_P99_S, CLASS_SHARE_MIN = 10_000.0, 11.0, 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One replay: who schedules, and what it is given."""

    policy: str  # of the conductor, or round_robin
    queue_order: str
    passes: str  # filled | shared
    blocks: int
    speed: float
    is_spread: bool = False

    @property
    def name(self) -> str:
        ticks = " spread" if self.is_spread else ""
        return f"{self.policy} {self.blocks} blocks {self.speed:g}x{ticks}"


@dataclass(frozen=True, slots=True)
class Run:
    case: Case
    outcome: Outcome
    rejected: Mapping[str, int]  # by kind
    seconds: float  # of real time


def gate_percent(outcome: Outcome, result: PeerResult) -> dict[str, float]:
    """How far this engine is from Dynamo's own, per figure."""
    pairs = {
        "mean": (1e3 * outcome.ttft_mean_s, result.ttft_mean_ms),
        "p50": (1e3 * outcome.ttft_p50_s, result.ttft_p50_ms),
        "p90": (1e3 * outcome.ttft_p90_s, result.ttft_p90_ms),
        "p99": (1e3 * outcome.ttft_p99_s, result.ttft_p99_ms),
        "reuse": (outcome.reuse, result.reuse),
    }
    return {name: 100 * abs(ours - theirs) / theirs for name, (ours, theirs) in pairs.items()}


class _Found:
    """Looks runs up, and makes a target without a value where one is missing."""

    def __init__(self, runs: Sequence[Run], why_not: str) -> None:
        self._runs = {run.case: run for run in runs}
        self._why_not = why_not

    def outcome(self, case: Case) -> Outcome | None:
        run = self._runs.get(case)
        return None if run is None or self._why_not else run.outcome

    def target(
        self, name: str, case: Case, figure: Callable[[Outcome], float], op: str, goal: float,
        why: str = "",
    ) -> Target:  # fmt: skip
        outcome = self.outcome(case)
        if outcome is None:
            return Target(name, None, op, goal, self._why_not or "this case was not run")
        return Target(name, round(figure(outcome), 3), op, goal, why)


def targets_of(
    runs: Sequence[Run],
    peer: Mapping[PeerRun, PeerResult],
    why_not: str = "",
    why_no_peer: str = "",
) -> list[Target]:
    """`why_not`: what was promised of the whole trace was not run; `why_no_peer`: no gate."""
    found = _Found(runs, why_not)
    targets = _gate(runs, peer, why_no_peer)
    for blocks in BLOCKS:
        targets += _at_recorded_speed(found, blocks)
    for blocks in BLOCKS:
        targets += _in_overload(found, blocks)
    return targets


def _gate(
    runs: Sequence[Run], peer: Mapping[PeerRun, PeerResult], why_no_peer: str
) -> list[Target]:
    outcomes = {(r.case.speed, r.case.blocks): r.outcome for r in runs
                if r.case.policy == "round_robin"}  # fmt: skip
    targets = []
    for speed in SPEEDS:
        for blocks in BLOCKS:
            name = f"gate: most any figure is off Dynamo's, percent, {speed:g}x, {blocks} blocks"
            outcome = outcomes.get((speed, blocks))
            result = peer.get(PeerRun("round_robin", blocks, speed))
            if outcome is None or result is None:
                why = why_no_peer or "this case was not run"
                targets.append(Target(name, None, "<=", GATE_PERCENT, why))
                continue
            off = gate_percent(outcome, result)
            told = ", ".join(f"{figure} {percent:.2f}" for figure, percent in off.items())
            targets.append(Target(name, round(max(off.values()), 4), "<=", GATE_PERCENT, told))
    return targets


def _at_recorded_speed(found: _Found, blocks: int) -> list[Target]:
    centric = Case("kvcache_centric", "fifo", "shared", blocks, 1.0)
    adaptive = Case("adaptive", "shortest_first", "shared", blocks, 1.0)
    spread = replace(adaptive, is_spread=True)

    def mean_ms(outcome: Outcome) -> float:
        return 1e3 * outcome.ttft_mean_s

    def filled(case: Case) -> str:
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
            f"adaptive, p99 TTFT, ms, {size}", adaptive, lambda o: 1e3 * o.ttft_p99_s, "<=",
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
            lambda o: float(o.requests - o.admitted), "<=", 0.0,
        ))  # fmt: skip
    return targets


def _in_overload(found: _Found, blocks: int) -> list[Target]:
    case = Case("adaptive", "shortest_first", "shared", blocks, 4.0)
    size = f"4x, {blocks} blocks"
    figures: tuple[tuple[str, Callable[[Outcome], float], str, float], ...] = (
        ("good requests", lambda o: float(o.good), ">=", GOOD[blocks]),
        ("good output tokens/s", lambda o: o.good_tokens_per_s, ">=", GOOD_TOKENS_PER_S[blocks]),
        ("p99 TTFT of the admitted, ms", lambda o: 1e3 * o.ttft_p99_s, "<=", ADMITTED_P99_MS),
        ("good share of the worst length class / of all", lambda o: o.least_class_share, ">=",
         CLASS_SHARE_MIN),
        ("p99 TTFT of the worst length class, s", lambda o: o.worst_class_p99_s, "<=",
         CLASS_P99_S),
    )  # fmt: skip
    return [
        found.target(f"{name}, {size}", case, figure, op, goal)
        for name, figure, op, goal in figures
    ]
