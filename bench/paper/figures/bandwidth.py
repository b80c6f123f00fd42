"""How fast must the network be? FAST'25, Figure 13.

The synthetic trace at recorded speed with network cards of 24 to 800 Gb/s. TTFT includes the
hand-over to decode, which a slow network delays first. Targets: mean TTFT below 2 s from 100 Gb/s
on, above at 40, and at 24 three times that at 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.paper.figures.served import ServedRun, ours, serve_all
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

TRACE = "synthetic"
GBPS = (24, 40, 100, 200, 400, 800)
BYTES_PER_S_OF_GBPS = 1e9 / 8
TTFT_MAX_S = 2.0  # the paper's, from ENOUGH_GBPS on
ENOUGH_GBPS, TOO_FEW_GBPS, LEAST_GBPS = 100, 40, 24
LEAST_RATIO = 3.0


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    trace, why_not = options.promised(TRACE)
    shapes = [
        replace(options.settings(), nic_bytes_per_s=gbps * BYTES_PER_S_OF_GBPS) for gbps in GBPS
    ]
    plans = [ours(trace, shape, options=options) for shape in shapes]
    runs = dict(zip(GBPS, serve_all(plans, options, begin), strict=True))
    return rows_of(runs), targets_of(runs, why_not)


def rows_of(runs: Mapping[int, ServedRun]) -> Rows:
    rows: Rows = []
    for gbps, run in runs.items():
        rows.append(
            {
                "gbps": gbps,
                **run.columns(),
                "ttft_prefill_mean_s": round(run.outcome.ttft_prefill_s.mean, 3),
                "fetched_blocks": run.outcome.fetched_blocks,
                "paper": "< 2 s" if gbps > ENOUGH_GBPS else None,
            }
        )
    return rows


def targets_of(runs: Mapping[int, ServedRun], why_not: str = "") -> list[Target]:
    means_s = {gbps: run.outcome.ttft_s.mean for gbps, run in runs.items() if not why_not}
    targets = []
    for gbps in GBPS:
        if gbps >= ENOUGH_GBPS or gbps == TOO_FEW_GBPS:
            op = "<=" if gbps >= ENOUGH_GBPS else ">="
            value = round(means_s[gbps], 3) if means_s else None
            targets.append(Target(f"mean TTFT at {gbps} Gb/s, s", value, op, TTFT_MAX_S, why_not))
    name = f"mean TTFT at {LEAST_GBPS} Gb/s / at {ENOUGH_GBPS}"
    ratio = round(means_s[LEAST_GBPS] / means_s[ENOUGH_GBPS], 3) if means_s else None
    return [*targets, Target(name, ratio, ">=", LEAST_RATIO, why_not)]
