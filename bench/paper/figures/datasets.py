"""How much more of two data sets is served within the limits? The arXiv report, Figure 11.

Prompts and answers have the mean lengths of ArXiv summarization and L-Eval (the report gives no
distribution), Poisson arrivals, four nodes (poisson.py). Targets: 20 and 40 % more than the paper's
baseline; the gain over the best of all baselines is shown beside it.
"""

from __future__ import annotations

from bench.paper.figures.poisson import (
    gain_targets,
    rates_of,
    rows_of,
)
from loadtest.replay.datasets import ARXIV, L_EVAL
from loadtest.simulator.options import Answer, Begin, SimulationOptions

WORKLOADS = (ARXIV, L_EVAL)
PAPER = {ARXIV.title: 20, L_EVAL.title: 40}  # percent


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Both; with --requests shorter runs."""
    found = {workload: rates_of(workload, options, begin) for workload in WORKLOADS}
    goals = {name: percent / 100 for name, percent in PAPER.items()}
    return rows_of(found, PAPER), gain_targets(found, goals, options.is_shortened)
