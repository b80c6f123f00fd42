"""How much GPU time does the prefill of a request take? FAST'25, Figure 8.

Our 8 + 8 nodes are compared with 16 nodes of vLLM, with a prefix cache in the GPUs' memory, and
with chunked prefill without a cache, at recorded speed. A step of a coupled engine that carries
prompt tokens is charged wholly to them. Targets: the ratio of each baseline to ours is within 10 %
of the paper's, with chunks of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.paper import constants
from bench.paper.figures.served import TRACES, ServedRun, ServePlan, ours, serve_all, traces_of
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

BASELINES = (
    constants.VLLM,
    constants.VLLM_CACHED,
    constants.CHUNKED_SMALL,
    constants.CHUNKED_LARGE,
)
PAPER = {  # others / Mooncake
    "conversation": {"vllm": 1.56, "vllm + prefix cache": 1.43, "chunked 512": 1.90},
    "synthetic": {"vllm": 2.76, "vllm + prefix cache": 2.59, "chunked 512": 3.33},
}
APART_MAX = 0.10


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    found: dict[str, list[ServedRun]] = {}
    for trace in traces_of(options, TRACES):
        plans = [ours(trace, options.settings(), options=options)]
        plans += [ServePlan(trace, baseline) for baseline in BASELINES]
        found[trace] = serve_all(plans, options, begin)
    return rows_of(found), targets_of(found, options.is_shortened)


def rows_of(found: Mapping[str, Sequence[ServedRun]]) -> Rows:
    rows: Rows = []
    for trace, (mooncake, *others) in found.items():
        for run in (mooncake, *others):
            rows.append(
                {
                    "trace": trace,
                    **run.columns(),
                    "of_mooncake": round(run.prefill_s / mooncake.prefill_s, 3),
                    "paper_of_mooncake": 1.0 if run is mooncake else PAPER[trace].get(run.system),
                }
            )
    return rows


def targets_of(found: Mapping[str, Sequence[ServedRun]], why_not: str = "") -> list[Target]:
    targets = []
    for trace, papers in PAPER.items():
        runs = {run.system: run for run in found.get(trace, ())}
        mooncake = next(iter(runs.values()), None)
        for system, paper in papers.items():
            name = f"{trace}: {system} / mooncake, GPU time a request, apart from {paper}"
            if mooncake is None or why_not:
                why = why_not or f"{trace} was not run"
                targets.append(Target(name, None, "<=", APART_MAX, why))
                continue
            ratio = runs[system].prefill_s / mooncake.prefill_s
            apart = abs(ratio / paper - 1)
            targets.append(Target(name, round(apart, 4), "<=", APART_MAX, f"{ratio:.3f}"))
    return targets
