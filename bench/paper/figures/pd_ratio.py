"""How should 16 nodes be split between prefill and decode? FAST'25, Figure 15.

The synthetic trace at recorded speed, TTFT <= 10 s and TBT <= 100 ms. In the paper most requests
are served near 1:1; with few prefill nodes prompts wait, with few decode nodes batches grow.
Targets: 7P+9D, 8P+8D and 9P+7D are within a point of the best, 5P+11D is three below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.paper import constants
from bench.paper.figures.served import ServedRun, ours, serve_all
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

TRACE = "synthetic"
TTFT_SLO_S, TBT_SLO_S = 10.0, 0.1
PREFILLS = (4, 5, 6, 7, 8, 9, 10, 11, 12)
NEAR, NEAR_POINTS = (7, 8, 9), 1.0
FAR, FAR_POINTS = 5, 3.0
PAPER_TBT_S = {4: 0.031, 12: 0.058}  # "31 to 58 ms": taken to be 12 and 4 decode nodes


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every split; with --prefills only that one."""
    trace, why_not = options.promised(TRACE)
    if options.prefills is not None or options.decodes is not None:
        why_not = "every split was promised, not one that was asked for"
    splits = (options.prefills,) if options.prefills else PREFILLS
    plans = []
    for prefills in splits:
        decodes = options.decodes or constants.NODES - prefills
        shape = replace(options.settings(), prefills=prefills, decodes=decodes)
        plans.append(ours(trace, shape, options=options))
    runs = list(zip(splits, serve_all(plans, options, begin), strict=True))
    return rows_of(runs), targets_of(runs, why_not)


def rows_of(runs: Sequence[tuple[int, ServedRun]]) -> Rows:
    rows: Rows = []
    for prefills, run in runs:
        rows.append(
            {
                "prefills": prefills,
                **run.columns(),
                "within_percent": round(percent(run), 2),
                "within_at_best_percent": round(100 * run.within_at_best(TTFT_SLO_S, TBT_SLO_S), 2),
                "tbt_mean_s": round(run.outcome.tbt_s.mean, 4),
                "tbt_decode_mean_s": round(float(run.outcome.tbt_decode_s.mean), 4),
                "paper_tbt_s": PAPER_TBT_S.get(prefills),
            }
        )
    return rows


def percent(run: ServedRun) -> float:
    return 100 * run.within(TTFT_SLO_S, TBT_SLO_S)


def targets_of(runs: Sequence[tuple[int, ServedRun]], why_not: str = "") -> list[Target]:
    shares = {prefills: percent(run) for prefills, run in runs if not why_not}
    best = max(shares.values(), default=0.0)
    targets = []
    for prefills, op, points in [(near, "<=", NEAR_POINTS) for near in NEAR] + [
        (FAR, ">=", FAR_POINTS)
    ]:
        name = f"{prefills}P+{constants.NODES - prefills}D, points below the best split"
        below = None if prefills not in shares else round(best - shares[prefills], 3)
        targets.append(Target(name, below, op, points, why_not))
    return targets
