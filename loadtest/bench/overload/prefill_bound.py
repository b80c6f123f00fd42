"""Four times what fits through prefill, with admission `predictive` and without any.

    unloaded   one request after the other: the TTFT and TBT that the service levels are taken from
    full       so many at once that the server is never idle: requests per second that it completes
    none       an open loop at 4x that rate, nothing is rejected
    predictive the same requests, with ttft_slo_s = 10x and tbt_slo_s = 5x the unloaded medians

Two requests at a time are in flight while the policy changes: `policy_change_lost` counts those
that were not answered. TBT of a request is the mean of its longest 10 % of intervals (metrics.py);
a level is kept when the P90 over the admitted is below it. Prompts are fresh, so the workers'
counter must rise by just the tokens of those that were admitted.

Not here: sending (load.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadtest.bench.overload.load import Load, Phase, Shape, reload
from loadtest.bench.result import Target
from loadtest.client.server import Addresses
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED

OVERLOAD = 4.0
TTFT_SLO, TBT_SLO = 10.0, 5.0  # times unloaded
WITHOUT = ("prefill_1", "decode_0")
BEGINS_WITH: dict[str, str | int | float] = {"admission": "none", "requests_max": 2048}


async def measure(
    addresses: Addresses, repository: Path, shape: Shape, seed: int, console: Console
) -> tuple[list[Phase], dict[str, float]]:
    """(unloaded, none, policy change, predictive) and the numbers between them."""
    load = await Load.of(addresses, shape, seed)
    with console.status("unloaded ..."):
        await load.unloaded(3)  # warms up
        unloaded = await load.unloaded(15)
    with console.status("capacity ..."):
        _, capacity_per_s = await load.full(shape.seconds)
    rate_per_s = OVERLOAD * capacity_per_s
    with console.status(f"{rate_per_s:.1f} requests/s, no admission ..."):
        none = await load.overload("none", rate_per_s, seed)
    levels = {
        "ttft_slo_s": round(TTFT_SLO * unloaded.p50_s("ttft_s"), 4),
        "tbt_slo_s": round(TBT_SLO * unloaded.p50_s("tbt_s"), 4),
    }
    with console.status("switching to predictive ..."):
        change, reload_s = await load.during(
            lambda: reload(addresses.grpc, repository, dict(levels), "predictive")
        )
    with console.status(f"{rate_per_s:.1f} requests/s, predictive ..."):
        predictive = await load.overload("predictive", rate_per_s, seed)
    numbers = {"capacity_per_s": capacity_per_s, "reload_s": reload_s, **levels}
    return [unloaded, none, change, predictive], numbers


def targets(phases: Sequence[Phase], numbers: dict[str, float]) -> list[Target]:
    _, none, change, predictive = phases

    def level(phase: Phase, name: str, op: str) -> Target:
        p90_s, what = phase.p90_s(f"{name}_s"), f"{phase.name}_{name}_p90_over_slo"
        if p90_s is None:
            return Target(what, None, op, 1.0, "nobody was admitted")
        return Target(what, round(p90_s / numbers[f"{name}_slo_s"], 3), op, 1.0)

    rejected = len(predictive.of(REJECTED))
    return [
        Target("predictive_rejected", rejected, ">=", 1),
        Target("predictive_wasted_prefill_tokens", predictive.wasted_tokens, "<=", 0),
        Target("rejections_without_retry_after", predictive.rejected_without_retry, "<=", 0),
        Target("predictive_failed", len(predictive.of(FAILED)), "<=", 0),
        level(predictive, "ttft", "<="),
        level(predictive, "tbt", "<="),
        level(none, "ttft", ">="),
        Target("policy_change_s", round(numbers["reload_s"], 2), "<=", 5.0),
        Target("policy_change_lost", len(change.records) - len(change.of(COMPLETED)), "<=", 0),
    ]
