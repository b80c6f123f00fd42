"""The users' latencies of a real trace. The arXiv report, Figure 13.

The conversation trace runs at recorded speed on 10 prefill and 10 decode nodes, beside 20 nodes of
vLLM that compute prompts whole. The limits are 30 s for TTFT and 100 ms for TBT. The report's own
trace is not published. Its results: 75 % more requests handled; TBT met by nearly all, by vLLM for
57 %. Targets: at least 75 % more requests within both, TBT met by 99 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.paper import constants
from bench.paper.figures.served import ServedRun, ServePlan, ours, serve_all
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

TRACE = "conversation"
PREFILLS = DECODES = 10
VLLM = replace(constants.VLLM, nodes=PREFILLS + DECODES)
TTFT_SLO_S, TBT_SLO_S = 30.0, 0.1
PERCENTILES = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
PAPER_TBT_MET = {"mooncake": 100.0, "vllm": 57.0}  # percent
GAIN_MIN, TBT_MET_MIN = 0.75, 0.99
PLAIN_MET, PLAIN_MET_APART_MAX = 0.57, 0.06  # of vLLM; the check of the coupled engine


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    trace, why_not = options.promised(TRACE)
    shape = replace(
        options.settings(),
        prefills=options.prefills or PREFILLS,
        decodes=options.decodes or DECODES,
    )
    baseline = replace(VLLM, nodes=shape.prefills + shape.decodes)
    plans = [ours(trace, shape, options=options), ServePlan(trace, baseline)]
    mooncake, vllm = serve_all(plans, options, begin)
    return rows_of([mooncake, vllm]), targets_of(mooncake, vllm, why_not)


def tbt_met(run: ServedRun) -> float:
    return float(np.mean(run.tbts_s <= TBT_SLO_S))


def rows_of(runs: Sequence[ServedRun]) -> Rows:
    """A row for each point of both curves."""
    rows: Rows = []
    for run, name in zip(runs, PAPER_TBT_MET, strict=True):
        for percentile in PERCENTILES:
            ttft_s, tbt_s = (
                float(np.quantile(times, percentile / 100, method="higher"))
                for times in (run.ttfts_s, run.tbts_s)
            )
            rows.append(
                {
                    "name": name,
                    **run.columns(),
                    "percentile": percentile,
                    "ttft_s": round(ttft_s, 4) if np.isfinite(ttft_s) else None,
                    "tbt_s": round(tbt_s, 4) if np.isfinite(tbt_s) else None,
                    "within_percent": round(100 * run.within(TTFT_SLO_S, TBT_SLO_S), 2),
                    "at_best_percent": round(100 * run.within_at_best(TTFT_SLO_S, TBT_SLO_S), 2),
                    "tbt_met_percent": round(100 * tbt_met(run), 2),
                    "paper_tbt_met_percent": PAPER_TBT_MET[name],
                }
            )
    return rows


def targets_of(mooncake: ServedRun, vllm: ServedRun, why_not: str = "") -> list[Target]:
    shares = [run.within(TTFT_SLO_S, TBT_SLO_S) for run in (mooncake, vllm)]
    gain = round(shares[0] / shares[1] - 1, 4) if shares[1] and not why_not else None
    met = round(tbt_met(mooncake), 4) if not why_not else None
    apart = round(abs(tbt_met(vllm) - PLAIN_MET), 4) if not why_not else None
    why = why_not or ("vllm served none within" if gain is None else "")
    return [
        Target("gain in requests within both service levels over vllm", gain, ">=", GAIN_MIN, why),
        Target("TBT met by ours", met, ">=", TBT_MET_MIN, why_not),
        Target(
            f"TBT met by vllm, apart from {PLAIN_MET}", apart, "<=", PLAIN_MET_APART_MAX, why_not
        ),
    ]
