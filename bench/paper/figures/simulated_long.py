"""How much more of long prompts is served within the limits? The arXiv report, Figure 12.

Prompts of 16k to 128k tokens, half of each cached, answers of 512 tokens, Poisson arrivals, four
nodes (poisson.py). The paper: between 50 and 525 % more than vLLM. Targets: at least 50 % at each
length and 300 % at one, over the paper's baseline; the gain over the best of all baselines is shown
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.paper.figures.poisson import (
    gain_targets,
    rates_of,
    rows_of,
)
from loadtest.harness.result import Target
from loadtest.replay.datasets import SIMULATED_LONG, DataSet
from loadtest.simulator.options import Answer, Begin, SimulationOptions

WORKLOADS = SIMULATED_LONG
PAPER = dict.fromkeys((workload.title for workload in WORKLOADS), "50 to 525")
GAIN_MIN, GAIN_ONCE_MIN = 0.5, 3.0


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every length; with --requests shorter runs."""
    found = {workload: rates_of(workload, options, begin) for workload in WORKLOADS}
    return rows_of(found, PAPER), targets_of(found, options.is_shortened)


def targets_of(found: Mapping[DataSet, Mapping[str, float]], why_not: str) -> list[Target]:
    targets = gain_targets(found, dict.fromkeys(PAPER, GAIN_MIN), why_not)
    most = max((target.value for target in targets if target.value is not None), default=None)
    return [*targets, Target("the largest of these gains", most, ">=", GAIN_ONCE_MIN, why_not)]
