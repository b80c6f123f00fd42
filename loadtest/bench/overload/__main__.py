"""More than fits, on the real server, with admission policies and without.

    python -m loadtest.bench.overload                  too many prompts (prefill_bound.py)
    python -m loadtest.bench.overload --decode-bound   too many answers (decode_bound.py)

A server of our own and fresh prompts of one length. The policy is changed in config.pbtxt while the
server runs. Each of the two files says what it measures and what its targets are.

Not here: starting the server (bench/server.py), the shape of the answer (bench/result.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest.bench.overload import decode_bound, prefill_bound
from loadtest.bench.overload.load import Shape
from loadtest.bench.repository import copy_repository, set_parameters
from loadtest.bench.result import Result
from loadtest.bench.server import measuring, serving
from loadtest.client.server import Addresses


def main(
    is_decode_bound: Annotated[
        bool, typer.Option("--decode-bound", help="Long answers: decoding is what is short.")
    ] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=64, help="Of each prompt; 1,024, or 512 with --decode-bound.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of each answer; 24, or 128 to four times as many.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=2.0, help="Of each overload.")] = None,
    at_once: Annotated[
        int | None, typer.Option(min=2, help="In flight while measuring capacity; 8, or 12.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of --decode-bound.")] = 3,
    policies: Annotated[str, typer.Option(help="Of --decode-bound.")] = ",".join(
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
    console = Console(stderr=True, highlight=False)
    seed = secrets.randbits(62) if seed is None else seed
    console.print(f"--seed {seed}")
    started_s = time.perf_counter()
    if is_decode_bound:
        least = output_tokens or 128
        shape = Shape(prompt_tokens or 512, least, seconds or 10.0, at_once or 12, 4 * least)
        settings = dict(setting.split("=", 1) for setting in changed or [])
        asked = [policy for policy in policies.split(",") if policy]
        with _serving(decode_bound.WITHOUT, decode_bound.BEGINS_WITH, console) as (at, repository):
            found = asyncio.run(decode_bound.measure(
                at, repository, shape, seed, console, asked, rounds, settings
            ))  # fmt: skip
        rows, targets = found.rows(), found.targets()
    else:
        shape = Shape(prompt_tokens or 1_024, output_tokens or 24, seconds or 10.0, at_once or 8)
        with _serving(prefill_bound.WITHOUT, prefill_bound.BEGINS_WITH, console) as (
            at,
            repository,
        ):
            phases, numbers = asyncio.run(
                prefill_bound.measure(at, repository, shape, seed, console)
            )
        rows = [phase.row() for phase in phases]
        rows.append({name: round(value, 4) for name, value in numbers.items()})
        targets = prefill_bound.targets(phases, numbers)
    name = "overload, decode-bound" if is_decode_bound else "overload"
    Result(name, time.perf_counter() - started_s, rows, targets).print()


@contextlib.contextmanager
def _serving(
    without: tuple[str, ...], begins_with: Mapping[str, str | int | float], console: Console
) -> Iterator[tuple[Addresses, Path]]:
    """A server on a copy of the repository, and that copy."""
    with tempfile.TemporaryDirectory(prefix="mooncake-overload-") as folder:
        repository = copy_repository(Path(folder) / "model_repository", without)
        set_parameters(repository, "conductor", begins_with)
        # How fast the workers are is measured anew, not read from another day's profile.
        arguments = ["--model-repository", str(repository), "--state-dir", f"{folder}/state"]
        with measuring(console), serving(None, arguments) as addresses:
            yield addresses, repository


if __name__ == "__main__":
    typer.run(main)
