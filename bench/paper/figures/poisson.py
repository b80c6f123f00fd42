"""The highest rate of Poisson arrivals that four nodes serve within limits of the unloaded request.

This is the method of the arXiv report's Figures 11 and 12. All prompts of a workload are alike, and
a share of each is one of a few prefixes that were sent before. The P90 of TTFT may be 10 times,
that of TBT 5 times the value of a single request. All systems have one pair of limits: that of a
request alone on plain vLLM without a cache. A rate is searched between powers of two by bisection
in ratio, with the same arrivals, scaled. Requests arrive for SPAN times the limit of a first token;
within less time, a system could accept more than it computes and let it wait within the limit.

Ours runs as 3 + 1 and as 2 + 2 nodes. The paper's baseline is vLLM without chunks and cache,
batched or one request at a time, whichever is better. The best of all baselines may also have a
prefix cache and chunks.

datasets (Figure 11): prompts and answers have the mean lengths of ArXiv summarization and L-Eval;
the report gives no distribution. Targets: 20 and 40 % more than the paper's baseline.

simulated-long (Figure 12): prompts of 16k to 128k tokens, half of each cached, answers of 512
tokens. The paper has between 50 and 525 % more than vLLM. Targets: at least 50 % at each length and
300 % at one, over the paper's baseline. The gain over the best of all baselines is shown in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.paper import constants
from bench.paper.figures.served import ServedRun, ServePlan, ours, serve
from loadtest.harness.result import Cell, Target
from loadtest.replay.datasets import ARXIV, L_EVAL, SIMULATED_LONG, DataSet, poisson_rows
from loadtest.replay.trace import TraceRow
from loadtest.simulator.cluster.job import Offered, offered_of
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import OwnRequests, PlannedRun, run_all

NODES = 4
REQUESTS = 200  # least of each run, after those that cache the prefixes
SPAN = 10.0
WARM_UP_S = 15.0  # seconds between requests that cache the prefixes
TTFT_FACTOR, TBT_FACTOR, QUANTILE = 10.0, 5.0, 0.9
HALVINGS = 5  # the error of a rate is at most 2.2 %
DOUBLINGS_MAX = 16
SPLITS = ((3, 1), (2, 2))
PAPER_PERCENT = {ARXIV.title: 20, L_EVAL.title: 40}  # Figure 11
GAIN_MIN, GAIN_ONCE_MIN = 0.5, 3.0  # Figure 12
OF_PAPER = {
    "vllm": replace(constants.VLLM, nodes=NODES),
    "vllm, one at a time": replace(constants.VLLM, nodes=NODES, sequences_max=1),
}
OTHERS = {
    settings.name: replace(settings, nodes=NODES)
    for settings in (
        constants.VLLM_CACHED,
        replace(constants.CHUNKED_SMALL, has_prefix_cache=True),
        replace(constants.CHUNKED_LARGE, has_prefix_cache=True),
    )
}


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tbt_s: float

    def are_kept(self, run: ServedRun, first: int) -> bool:
        """Whether the requests after the first `first` keep the limits."""
        ttft_s, tbt_s = (
            np.quantile(times[first:], QUANTILE, method="higher")
            for times in (run.ttfts_s, run.tbts_s)
        )
        return bool(ttft_s <= self.ttft_s and tbt_s <= self.tbt_s)


def requests_of(
    data_set: DataSet, rate: float, requests: int, seed: int
) -> tuple[list[Offered], int]:
    """The requests that cache the prefixes, to every node in turns, then those of the data set; and
    the number of the former."""
    rows, first = poisson_rows(data_set, rate, requests, seed, copies=NODES, every_s=WARM_UP_S)
    return offered_at(rows, constants.VLLM.block_tokens), first


def offered_at(rows: Sequence[TraceRow], block_tokens: int) -> list[Offered]:
    """At the rows' own times: the first row of a data set without prefixes waits for its turn
    too.
    """
    offered = offered_of(rows, block_tokens)
    return [
        replace(one, at_s=row.timestamp_ms / 1e3) for one, row in zip(offered, rows, strict=True)
    ]


def limits_of(workload: DataSet) -> Limits:
    """The limits of one request alone."""
    alone = replace(workload, cached_share=0.0)
    run = serve(requests_of(alone, 1.0, 1, 0)[0], ServePlan(workload.title, OF_PAPER["vllm"]))
    return Limits(TTFT_FACTOR * float(run.ttfts_s[0]), TBT_FACTOR * float(run.tbts_s[0]))


def highest_rate(is_kept: Callable[[float], bool], guess: float) -> float:
    """The highest rate, requests a second, to within the halvings; 0 if none is kept."""
    low, high = 0.0, 0.0
    rate = guess
    for _ in range(DOUBLINGS_MAX):
        if is_kept(rate):
            low = rate
            rate *= 2
        else:
            high = rate
            rate /= 2
        if low and high:
            break
    for _ in range(HALVINGS if low and high else 0):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def rates_of(workload: DataSet, options: SimulationOptions, begin: Begin) -> dict[str, float]:
    """The rate of every system."""
    plans = {}
    for prefills, decodes in SPLITS:
        shape = replace(options.settings(), prefills=prefills, decodes=decodes)
        plans[f"mooncake {prefills}P+{decodes}D"] = ours(workload.title, shape, options=options)
    for name, settings in (OF_PAPER | OTHERS).items():
        plans[name] = ServePlan(workload.title, settings)
    planned = [
        PlannedRun(
            f"{workload.title}, {name}",
            OwnRequests(),
            rate_of,
            (workload, plan, options.requests, options.seed),
        )
        for name, plan in plans.items()
    ]
    rates = run_all(planned, begin, options.jobs, options.kept)
    return dict(zip(plans, rates, strict=True))


def rate_of(
    offered: Sequence[Offered],
    workload: DataSet,
    plan: ServePlan,
    requests: int | None,
    seed: int,
    on_over: Callable[[], None] = lambda: None,
) -> float:
    """The highest rate that this system serves within the limits; `requests`: of each run."""
    assert not offered, "the workload has requests of its own"
    limits = limits_of(workload)
    # Half of the rate of four nodes that serve one request at a time.
    alone_s = limits.ttft_s / TTFT_FACTOR + workload.output_tokens * limits.tbt_s / TBT_FACTOR

    def is_kept(rate: float) -> bool:
        many = requests or max(REQUESTS, math.ceil(rate * SPAN * limits.ttft_s))
        own, first = requests_of(workload, rate, many, seed)
        return limits.are_kept(serve(own, plan), first)

    return highest_rate(is_kept, 0.5 * NODES / alone_s)


def gains_of(rates: Mapping[str, float]) -> tuple[float, float]:
    """The gain of our better split over the paper's baseline, and over the best of all."""
    mooncake = max(rate for name, rate in rates.items() if name.startswith("mooncake"))
    of_paper = max(rates[name] for name in OF_PAPER)
    of_all = max(of_paper, *(rates[name] for name in OTHERS))
    return mooncake / of_paper - 1, mooncake / of_all - 1


def gain_targets(
    found: Mapping[DataSet, Mapping[str, float]], goals: Mapping[str, float], why_not: str
) -> list[Target]:
    """`goals`: by workload, of the gain over the paper's baseline."""
    gains = {workload.title: gains_of(rates)[0] for workload, rates in found.items() if not why_not}
    return [
        Target(
            f"{name}: gain over the paper's baseline",
            round(gains[name], 4) if gains else None,
            ">=",
            goal,
            why_not,
        )
        for name, goal in goals.items()
    ]


def rows_of(found: Mapping[DataSet, Mapping[str, float]], papers: Mapping[str, Cell]) -> Rows:
    rows: Rows = []
    for workload, rates in found.items():
        of_paper, of_all = gains_of(rates)
        for name, rate in rates.items():
            rows.append(
                {
                    "workload": workload.title,
                    "prompt_tokens": workload.prompt_tokens,
                    "output_tokens": workload.output_tokens,
                    "cached_percent": round(100 * workload.cached_share),
                    "system": name,
                    "requests_per_s": round(rate, 4),
                    "gain_over_paper_baseline_percent": round(100 * of_paper, 1),
                    "gain_over_best_baseline_percent": round(100 * of_all, 1),
                    "paper_gain_percent": papers[workload.title],
                }
            )
    return rows


def data_sets(options: SimulationOptions, begin: Begin) -> Answer:
    """Figure 11; with --requests shorter runs."""
    found = {workload: rates_of(workload, options, begin) for workload in (ARXIV, L_EVAL)}
    goals = {name: percent / 100 for name, percent in PAPER_PERCENT.items()}
    return rows_of(found, PAPER_PERCENT), gain_targets(found, goals, options.is_shortened)


def simulated_long(options: SimulationOptions, begin: Begin) -> Answer:
    """Figure 12, every length; with --requests shorter runs."""
    found = {workload: rates_of(workload, options, begin) for workload in SIMULATED_LONG}
    names, why_not = [workload.title for workload in SIMULATED_LONG], options.is_shortened
    targets = gain_targets(found, dict.fromkeys(names, GAIN_MIN), why_not)
    most = max((target.value for target in targets if target.value is not None), default=None)
    most_target = Target("the largest of these gains", most, ">=", GAIN_ONCE_MIN, why_not)
    return rows_of(found, dict.fromkeys(names, "50 to 525")), [*targets, most_target]
