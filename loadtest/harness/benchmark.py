"""The common parts of every benchmark: options, turns, a server around it, and its last line.

    with benchmark("reuse") as run, served(url) as addresses:
        run.rows = measure(addresses)
        run.targets = targets(run.rows)

Compared ways take turns in every round, because the machine may be busy now and idle a second
later. Then medians of the rounds are compared. A benchmark's seconds count from its start until
everything that it started has ended.

Not here: the shape of the result (result.py), starting servers (server.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from loadtest.client.protocol import ServerError
from loadtest.client.server import Addresses
from loadtest.harness.result import Cell, Result, Target
from loadtest.harness.server import CannotMeasure, serving

ServerUrl = Annotated[
    str | None, typer.Option(help="gRPC address of a running server; default: start one.")
]
FreshSeed = Annotated[
    int | None, typer.Option(help="Tokens of the prompts; random by default, so always fresh.")
]
BlocksSeed = Annotated[int, typer.Option(help="Which blocks.")]
BatchRounds = Annotated[int, typer.Option(min=5, help="Batches of each kind.")]
T = TypeVar("T")
K = TypeVar("K")

console = Console(stderr=True, highlight=False)


@dataclass(slots=True)
class BenchmarkRun:
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    constants: dict[str, Cell] = field(default_factory=dict)  # settings that the results depend on


@contextlib.contextmanager
def benchmark(name: str, out: Console | None = None) -> Iterator[BenchmarkRun]:
    """Print the results of the block when it ends, to standard output unless there is an `out`; if
    an error ends the measurement, print the results until then."""
    run, started_s = BenchmarkRun(), time.perf_counter()

    def tell(shortened: str = "") -> None:
        seconds = time.perf_counter() - started_s
        Result(name, seconds, run.rows, run.targets, run.constants, shortened).print(out)

    try:
        with measuring():
            yield run
    except typer.Exit as ended:
        if run.rows:
            tell(f"cannot measure the rest: {ended.__cause__}")
        raise
    tell()


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Print why a measurement is impossible in one line, and exit with status 1."""
    try:
        yield
    except (CannotMeasure, ServerError, OSError, ValueError) as error:
        console.print(f"cannot measure: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def served(url: str | None, arguments: Sequence[str] = ()) -> Iterator[Addresses]:
    """The server at `url`, or one of our own until the block ends; a status line shows the wait."""
    with (
        console.status("waiting for the server ...") as waiting,
        serving(url, arguments) as addresses,
    ):
        waiting.stop()
        yield addresses


def in_turns(
    ways: Mapping[K, Callable[[], T]], rounds: int, warm_rounds: int = 0
) -> dict[K, list[T]]:
    """The results of each way in each round; the first `warm_rounds` are discarded."""
    found: dict[K, list[T]] = {name: [] for name in ways}
    for turn in range(warm_rounds + rounds):
        for name, way in ways.items():
            value = way()
            if turn >= warm_rounds:
                found[name].append(value)
    return found


def median_s(
    ways: Mapping[K, Callable[[], float]], rounds: int, warm_rounds: int = 0
) -> dict[K, float]:
    found = in_turns(ways, rounds, warm_rounds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def timed_s(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def best_s(action: Callable[[], object], rounds: int) -> float:
    """The least seconds of all rounds: other work on the machine can only add time."""
    return min(timed_s(action) for _ in range(rounds))


def median_of(action: Callable[[], object], times: int) -> float:
    return statistics.median(timed_s(action) for _ in range(times))


def moved(block_bytes: int, blocks: int, seconds: float) -> dict[str, Cell]:
    """The cells of a row with the speed of a batch of blocks."""
    return {
        "block_bytes": block_bytes,
        "blocks": blocks,
        "microseconds": round(seconds * 1e6, 1),
        "gb_per_s": round(block_bytes * blocks / seconds / 1e9, 3),
    }


def together_tbt_s(streams: Sequence[Sequence[float]], tokens_min: int) -> float | None:
    """Median mean interval while all streams ran; None with too few tokens in that time."""
    begin_s = max(times_s[0] for times_s in streams)
    end_s = min(times_s[-1] for times_s in streams)
    means = []
    for times_s in streams:
        shared_s = [time_s for time_s in times_s if begin_s <= time_s <= end_s]
        if len(shared_s) < tokens_min or shared_s[-1] <= shared_s[0]:
            return None
        means.append((shared_s[-1] - shared_s[0]) / (len(shared_s) - 1))
    return statistics.median(means)


def settled(read: Callable[[], T], poll_s: float, wait_s_max: float) -> T:
    """The value of `read` once it has stopped changing: a server's page lags behind its answers."""
    give_up_s = time.monotonic() + wait_s_max
    time.sleep(poll_s)
    last = read()
    while time.monotonic() < give_up_s:
        time.sleep(poll_s)
        found = read()
        if found == last:
            break
        last = found
    return last
