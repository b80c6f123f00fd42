"""`mooncake simulate`: experiments on the published traces, without a server.

    mooncake simulate --experiment hit-rate --traces FOLDER [--json] [--plot hit-rate.png]

Not here: the experiments (one file each), the shape of the answer (bench/result.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from loadtest.bench.result import Result
from loadtest.simulator import hit_rate, plot
from loadtest.simulator.block_cache import key_of
from loadtest.trace import TraceError, read_trace
from mooncake_store.eviction import POLICIES

TRACES = ("conversation", "synthetic")
WHERE = "https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces"

console = Console(stderr=True, highlight=False)


class Experiment(str, Enum):
    HIT_RATE = "hit-rate"


class SimulationRefused(Exception):
    """Nothing was run; the message says what to change."""


def simulate(
    experiment: Annotated[Experiment, typer.Option(help="What to find out.")],
    traces: Annotated[
        Path | None,
        typer.Option(
            envvar="MOONCAKE_TRACES",
            help=f"Folder with NAME_trace.jsonl for NAME in {', '.join(TRACES)} ({WHERE}).",
        ),
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="Only this trace; repeatable. All by default.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this policy ({', '.join(POLICIES)}); repeatable."),
    ] = None,
    blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="Only this size; repeatable.")
    ] = None,
    directory: Annotated[
        bool, typer.Option("--directory", help="Through the whole Directory: the same, slower.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help=f"Draw it: a {', '.join(plot.SUFFIXES)} file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and nothing else.")
    ] = False,
) -> None:
    """Run an experiment on recorded requests; no server is needed.

    hit-rate: which part of the block references of each trace is found by one cache of 1,000 to
    100,000 blocks of 512 tokens and by an unlimited one, with each policy of eviction, and what
    the best policy would find that knows the future. Order of requests only, no clock.
    """
    assert experiment is Experiment.HIT_RATE
    try:
        result = hit_rates(
            {name: requests_of(traces, name) for name in trace or TRACES},
            policy or POLICIES, sorted(set(blocks or hit_rate.SIZES)), directory, picture,
        )  # fmt: skip
    except (SimulationRefused, TraceError) as problem:
        console.print(f"cannot simulate: {problem}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        print(result.to_json())
    else:
        result.print()


def hit_rates(
    loaded: Mapping[str, hit_rate.Requests],
    policies: Sequence[str],
    sizes: Sequence[int],
    is_directory: bool,
    picture: Path | None,
) -> Result:
    """The experiment with its progress and its picture."""
    started_s = time.monotonic()
    if unknown := set(policies) - set(POLICIES):
        raise SimulationRefused(f"no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    if picture is not None and picture.suffix not in plot.SUFFIXES:
        raise SimulationRefused(f"--plot {picture}: the name must end in {plot.SUFFIXES}")
    longest = max(len(keys) for requests in loaded.values() for keys in requests)
    if sizes[0] < longest:
        raise SimulationRefused(f"--blocks {sizes[0]}: a request needs {longest} at once")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    runs: list[hit_rate.Run] = []
    with Progress(*columns, console=console, transient=True) as progress:
        for name, requests in loaded.items():
            task = progress.add_task(name, total=hit_rate.steps(policies, sizes))

            def done(task: TaskID = task) -> None:
                progress.advance(task)

            runs += hit_rate.runs_of(name, requests, policies, sizes, is_directory, done)
    if picture is not None:
        plot.save(picture, runs)
    rows, targets = hit_rate.rows_of(runs), hit_rate.targets_of(runs)
    return Result("hit-rate", time.monotonic() - started_s, rows, targets)


def requests_of(folder: Path | None, name: str) -> list[list[bytes]]:
    """The keys of each request of a trace, in order of arrival."""
    if folder is None:
        raise SimulationRefused(
            "say where the traces are: --traces FOLDER, or MOONCAKE_TRACES in the environment. "
            f"They are published at {WHERE}"
        )
    path = folder / f"{name}_trace.jsonl"
    if not path.is_file():
        raise SimulationRefused(f"{path} is not there; fetch it from {WHERE}")
    return [[key_of(hash_id) for hash_id in row.hash_ids] for row in read_trace(path)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mooncake simulate ARGUMENTS`; the CLI calls this so that it imports nothing early."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(simulate)
    command = typer.main.get_command(app)
    command.main(None if arguments is None else list(arguments), prog_name="mooncake simulate")
    return 0
