"""An overload of the real server, with admission policies and without.

    python -m bench.overload                  too many prompts (here)
    python -m bench.overload --decode-bound   too many answers (decode_bound.py)

It starts a server and sends fresh prompts of one length. The policy is changed in config.pbtxt
while the server runs. The load is four times the prefill capacity, without admission and with
`predictive` and limits of 10x and 5x the unloaded medians. Two requests at a time are in flight
while the policy changes: `policy_change_lost` counts those that were not answered. A level is kept
when the P90 over the admitted requests is below it. Prompts are fresh, so the workers' counter must
rise by exactly the tokens of the admitted ones.

Not here: sending (load.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.overload import decode_bound
from bench.overload.load import OverloadClient, OverloadPhase, OverloadShape, reload
from loadtest.client.server import Addresses
from loadtest.harness.benchmark import benchmark, console, served
from loadtest.harness.result import Target
from loadtest.harness.server import Parameters, own_repository
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED

OVERLOAD = 4.0
TTFT_SLO, TBT_SLO = 10.0, 5.0  # times unloaded
WITHOUT = ("prefill_1", "decode_0")
BEGINS_WITH: Parameters = {"admission": "none", "requests_max": 2048}


async def measure(
    addresses: Addresses, repository: Path, shape: OverloadShape, seed: int
) -> tuple[list[OverloadPhase], dict[str, float]]:
    """(unloaded, none, policy change, predictive) and the numbers between them."""
    load = await OverloadClient.of(addresses, shape, seed)
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


def targets(phases: Sequence[OverloadPhase], numbers: dict[str, float]) -> list[Target]:
    _, none, change, predictive = phases

    def level(phase: OverloadPhase, name: str, op: str) -> Target:
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


def main(
    is_decode_bound: Annotated[
        bool, typer.Option("--decode-bound", help="Long answers: decoding is what is short.")
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=64, help="Tokens of a prompt; 1,024, or 512 with --decode-bound."),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of an answer; 24, or 128 to four times as many."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=2.0, help="Length of each overload.")] = None,
    at_once: Annotated[
        int | None, typer.Option(min=2, help="Requests in flight for the capacity; 8, or 12.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of --decode-bound.")] = 3,
    policies: Annotated[str, typer.Option(help="Policies of --decode-bound.")] = ",".join(
        decode_bound.POLICIES
    ),
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="name=value: a parameter of the conductor, with --decode-bound."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Prompts and arrivals; random by default, so always fresh.")
    ] = None,
) -> None:
    """Offer more than fits, with and without admission; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    console.print(f"--seed {seed}")
    overload_s = seconds or 10.0
    if is_decode_bound:
        least = output_tokens or 128
        shape = OverloadShape(prompt_tokens or 512, least, overload_s, at_once or 12, 4 * least)
        settings = dict(setting.split("=", 1) for setting in changed or [])
        asked = [policy for policy in policies.split(",") if policy]
        with (
            benchmark("overload, decode-bound") as run,
            repository_served(decode_bound.WITHOUT, decode_bound.BEGINS_WITH) as (server, models),
        ):
            found = asyncio.run(
                decode_bound.measure(server, models, shape, seed, asked, rounds, settings)
            )
            run.rows, run.targets = found.rows(), found.targets()
    else:
        shape = OverloadShape(prompt_tokens or 1_024, output_tokens or 24, overload_s, at_once or 8)
        with (
            benchmark("overload") as run,
            repository_served(WITHOUT, BEGINS_WITH) as (server, models),
        ):
            phases, numbers = asyncio.run(measure(server, models, shape, seed))
            run.rows = [phase.row() for phase in phases]
            run.rows.append({name: round(value, 4) for name, value in numbers.items()})
            run.targets = targets(phases, numbers)


@contextlib.contextmanager
def repository_served(
    without: tuple[str, ...], begins_with: Parameters
) -> Iterator[tuple[Addresses, Path]]:
    """A server on a copy of the repository, and that copy."""
    with own_repository(without, {"conductor": begins_with}) as repository:
        # The speed of the workers is measured anew, not read from an earlier profile.
        state = repository.parent / "state"
        arguments = ["--model-repository", str(repository), "--state-dir", str(state)]
        with served(None, arguments) as addresses:
            yield addresses, repository


if __name__ == "__main__":
    typer.run(main)
