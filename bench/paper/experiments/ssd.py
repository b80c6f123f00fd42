"""The gain from an SSD behind each node's DRAM. FAST'25, 4.2: the pool is DRAM and SSD.

The paper has no figure of it. Each trace runs at recorded speed on 8 + 8 nodes, for several sizes
of the DRAM: alone, and with an SSD of four times that size behind it. The DRAM must be small enough
that reused blocks were evicted; with the 5,859 blocks a node of the other experiments hardly any
are. The real Directory decides which cold blocks are spilled, which blocks are restored from the
SSD when they are needed, and which blocks are evicted for them.

Targets, for each size: a higher share of the prompt tokens cached and a lower mean TTFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.paper.figures.served import TRACES, ServedRun, ours, serve_all, traces_of
from loadtest.harness.result import Target
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

DRAM_BLOCKS = (750, 1_500, 3_000)  # of a node; 2,929 are half a terabyte
SSD_TIMES = 4
STRICTLY = 1.0001

Found = Mapping[tuple[str, int, bool], ServedRun]  # trace, blocks of DRAM, has an SSD


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every size with and without an SSD on each trace."""
    keys, plans = [], []
    for trace in traces_of(options, TRACES):
        for blocks in options.blocks or DRAM_BLOCKS:
            for has_ssd in (False, True):
                shape = replace(
                    options.settings(), node_blocks=blocks, ssd_blocks=SSD_TIMES * blocks * has_ssd
                )
                plan = ours(
                    trace, shape, options=options, ssd_bytes_per_s=shape.ssd_read_bytes_per_s
                )
                keys.append((trace, blocks, has_ssd))
                plans.append(plan)
    found = dict(zip(keys, serve_all(plans, options, begin), strict=True))
    return rows_of(found), targets_of(found, options.is_shortened)


def rows_of(found: Found) -> Rows:
    return [
        {
            "trace": trace,
            "dram_blocks": blocks,
            "ssd_blocks": SSD_TIMES * blocks * has_ssd,
            **run.columns(),
            "ttft_prefill_mean_s": round(run.outcome.ttft_prefill_s.mean, 3),
            "restored_blocks": run.outcome.restored_blocks,
            "fetched_blocks": run.outcome.fetched_blocks,
        }
        for (trace, blocks, has_ssd), run in found.items()
    ]


def targets_of(found: Found, why_not: str = "") -> list[Target]:
    """With an SSD over without."""
    targets = []
    for trace, blocks, has_ssd in found:
        if has_ssd:
            plain, tiered = found[trace, blocks, False].outcome, found[trace, blocks, True].outcome
            hits = tiered.hit_share / max(1e-9, plain.hit_share)
            time = tiered.ttft_s.mean / plain.ttft_s.mean
            for what, value, op, goal in (
                ("hit rate", hits, ">=", STRICTLY),
                ("mean TTFT", time, "<=", 2 - STRICTLY),
            ):
                name = f"{trace}, {blocks:,} blocks a node: {what} with an SSD / without"
                is_known = not why_not
                targets.append(
                    Target(name, round(value, 4) if is_known else None, op, goal, why_not)
                )
    return targets
