"""The gain of one cache of all nodes over a cache in each. FAST'25, Figure 10.

Ten prefill nodes have room for 3 M tokens each, answers have one token, each trace runs at recorded
speed. `load_balance` and `cache_aware` use the cache of the worker's own node only: no fetch, no
copies of hot blocks. `kvcache_centric` and `adaptive` fetch, so all nodes are one cache. The hit
rate is the share of prompt tokens that were not computed.

Targets: the global cache finds 35.5 % (conversation) and 64 % (synthetic), strictly more than
`cache_aware`. Its hits are 2.22 and 2.36 times those of load balancing, its GPU time 0.76 and 0.52.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.paper.figures.served import TRACES, ServedRun, ours, serve_all, traces_of
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

PREFILLS = 10
LOCAL, GLOBAL = ("load_balance", "cache_aware"), ("kvcache_centric", "adaptive")
OURS = GLOBAL[0]
HIT_MIN = {"conversation": 0.355, "synthetic": 0.64}
HIT_OF_LOCAL = {"conversation": 2.22, "synthetic": 2.36}
TIME_OF_LOCAL = {"conversation": 0.76, "synthetic": 0.52}
PAPER_HIT_OF_LOCAL, PAPER_TIME_OF_LOCAL = 2.36, 0.52  # the best of its traces
STRICTLY_MORE = 1.0001

Found = Mapping[str, Mapping[str, ServedRun]]


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    policies = options.one_of(options.policies, LOCAL + GLOBAL, "policy")
    shape = replace(options.settings(), prefills=options.prefills or PREFILLS, decodes=1)
    found: dict[str, dict[str, ServedRun]] = {}
    for trace in traces_of(options, TRACES):
        plans = []
        for policy in policies:
            plan = ours(trace, shape, options=options, policy=policy, replicate=policy in GLOBAL)
            plans.append(replace(plan, output_tokens=1))
        found[trace] = dict(zip(policies, serve_all(plans, options, begin), strict=True))
    return rows_of(found), targets_of(found, options.is_shortened)


def rows_of(found: Found) -> Rows:
    rows: Rows = []
    for trace, runs in found.items():
        local = runs.get(LOCAL[0])
        for policy, run in runs.items():
            hits = time = None
            if local is not None:
                hits = round(run.outcome.hit_share / local.outcome.hit_share, 3)
                time = round(run.prefill_s / local.prefill_s, 3)
            rows.append(
                {
                    "trace": trace,
                    "policy": policy,
                    "cache": "global" if policy in GLOBAL else "local",
                    **run.columns(),
                    "fetched_blocks": run.outcome.fetched_blocks,
                    "hits_of_load_balance": hits,
                    "time_of_load_balance": time,
                    "paper_hits_of_local": PAPER_HIT_OF_LOCAL if policy == OURS else None,
                    "paper_time_of_local": PAPER_TIME_OF_LOCAL if policy == OURS else None,
                }
            )
    return rows


def targets_of(found: Found, why_not: str = "") -> list[Target]:
    targets: list[Target] = []
    for trace in TRACES:
        runs = {} if why_not else found.get(trace, {})
        why = why_not or "this trace or policy was not run"

        def add(
            what: str,
            numbers: Sequence[float],
            op: str,
            goal: float,
            trace: str = trace,
            why: str = why,
        ) -> None:
            """`numbers`: ours and the divisor, when both were run."""
            value = round(numbers[0] / numbers[1], 4) if len(numbers) == 2 else None
            targets.append(Target(f"{trace}: {what}", value, op, goal, "" if numbers else why))

        mooncake = runs.get(OURS)
        for other, hits_min, time_max in (
            (LOCAL[0], HIT_OF_LOCAL[trace], TIME_OF_LOCAL[trace]),
            (LOCAL[1], STRICTLY_MORE, 2 - STRICTLY_MORE),
        ):
            than = runs.get(other)
            hits = [mooncake.outcome.hit_share, than.outcome.hit_share] if mooncake and than else []
            times = [mooncake.prefill_s, than.prefill_s] if mooncake and than else []
            add(f"{OURS} / {other}, hit rate", hits, ">=", hits_min)
            add(f"{OURS} / {other}, GPU time", times, "<=", time_max)
        add(
            f"hit rate of {OURS}",
            [mooncake.outcome.hit_share, 1.0] if mooncake else [],
            ">=",
            HIT_MIN[trace],
        )
    return targets
