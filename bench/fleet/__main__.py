"""The cost of several hosts, and the cost of losing some.

    python -m bench.fleet [--traces FOLDER] [--chaos-seconds 60] [--only leader]

Hosts are network namespaces of this machine (needs root); parts that need a whole deployment have
three:

    frontends_ttft_4_over_1                  simulated: mean TTFT with four frontends, over one
    leader_change_s, leader_change_s_worst   leader.py: `kill -9` of the leading directory
    handover_cross_host_over_raw_nixl_tcp    bench/cross_host.py: 64 MiB from host to host
    chaos_finished_share, chaos_wrong_tokens of `python -m tests.chaos_serve`, as a process

A number that cannot be measured here is null with a reason; the others are still measured.

Not here: the fleet (bench/harness/fleet/), the attack (tests/chaos_serve/).
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import cross_host
from bench.fleet.leader import leader_changes
from bench.harness.fleet import ServedFleet, why_no_namespaces
from bench.paper.experiments import frontends
from loadtest.client.protocol import ServerError
from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT, CannotMeasure
from loadtest.simulator.options import SimulationRefused, progress_bar
from mooncake_store.errors import StoreError

PAIRS, MIB = 5, 2**20  # of the hand-over
CHAOS_MARGIN_S = 400.0  # besides the faults: start, undisturbed run, recovery, stop
CANNOT = (
    CannotMeasure,
    SimulationRefused,
    ServerError,
    StoreError,
    subprocess.TimeoutExpired,
    OSError,
    ValueError,
)
GOALS = {
    "frontends_ttft_4_over_1": ("<=", 1.05),
    "leader_change_s": ("<=", 5.0),
    "leader_change_s_worst": ("<=", 8.0),
    "handover_cross_host_over_raw_nixl_tcp": (">=", 0.7),
    "chaos_finished_share": (">=", 0.99),
    "chaos_wrong_tokens": ("<=", 0.0),
}


class FleetPart(str, Enum):
    FRONTENDS = "frontends"
    HANDOVER = "handover"
    LEADER = "leader"
    CHAOS = "chaos"


@dataclass(slots=True)
class FleetNumbers:
    rows: list[dict[str, Cell]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def measure(self, names: tuple[str, ...], way: Callable[[], None]) -> None:
        """A number that cannot be measured does not prevent the others."""
        try:
            way()
        except CANNOT as error:
            self.why |= {name: str(error) for name in names if name not in self.values}
            console.print(f"{names[0]}: {error}", markup=False, soft_wrap=True)

    def targets(self) -> list[Target]:
        return [
            Target(name, self.values.get(name), op, goal, self.why.get(name, ""))
            for name, (op, goal) in GOALS.items()
        ]

    # ---- one each

    def frontends(self, traces: Path | None) -> None:
        if traces is None:
            raise CannotMeasure("name the folder of the published traces with --traces")
        with progress_bar() as begin:
            target = frontends.ttft_target(traces, begin)
        if target.value is None:
            raise CannotMeasure(target.why)
        self.values[target.name] = target.value

    def leader(self, rounds: int, seed: int) -> None:
        require_namespaces()
        with (
            tempfile.TemporaryDirectory(prefix="mooncake-bench-") as name,
            console.status("a fleet of three hosts ..."),
            ServedFleet(Path(name)) as fleet,
        ):
            changes = leader_changes(fleet, rounds, seed)
        self.rows += [change.row() for change in changes]
        found_s = [change.found_s for change in changes if change.found_s is not None]
        if len(found_s) < len(changes):
            raise CannotMeasure("after a kill the prefix was not found again in time; see the rows")
        self.values["leader_change_s"] = round(statistics.median(found_s), 3)
        self.values["leader_change_s_worst"] = round(max(found_s), 3)

    def handover(self, seed: int) -> None:
        with console.status("blocks from host to host ..."):
            found = cross_host.measure(links=1, pairs=PAIRS, block_bytes=MIB, seed=seed)
        self.rows += cross_host.rows(found, 1, MIB)
        self.values[cross_host.TARGET] = round(cross_host.ratio(found), 3)

    def chaos(self, seconds: float, seed: int) -> None:
        require_namespaces()
        if not (PROJECT / "tests" / "chaos_serve").is_dir():
            raise CannotMeasure("tests/chaos_serve is not here: run this in a checkout")
        command = [
            sys.executable,
            "-m",
            "tests.chaos_serve",
            f"--seconds={seconds:g}",
            f"--seed={seed}",
        ]
        with console.status(f"{seconds:g} s of faults on a fleet ..."):
            done = subprocess.run(
                command,
                cwd=PROJECT,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + CHAOS_MARGIN_S,
            )
        lines = done.stdout.splitlines()
        if not lines or not lines[-1].startswith("{"):
            raise CannotMeasure(f"chaos: {(done.stdout + done.stderr)[-500:]}")
        report: dict[str, Any] = json.loads(lines[-1])
        for line in lines[:-1]:
            console.print(line, markup=False, soft_wrap=True)
        for outcome, count in report["outcomes"].items():
            self.rows.append({"what": f"chaos: {outcome}", "requests": count})
        self.values["chaos_wrong_tokens"] = report["wrong_tokens"]
        if report["finished_share"] is None:
            raise CannotMeasure("no stream's frontend lived")
        self.values["chaos_finished_share"] = report["finished_share"]
        if report["broken"]:
            self.why["chaos_finished_share"] = f"broken: {'; '.join(report['broken'])[:500]}"


def require_namespaces() -> None:
    if why := why_no_namespaces():
        raise CannotMeasure(why)


def main(
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness; random by default.")] = (
        None
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Leaders that are killed.")] = 5,
    chaos_seconds: Annotated[float, typer.Option(min=10, help="Time of faults on a fleet.")] = 60.0,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of the published traces, for the simulation.")
    ] = None,
    only: Annotated[
        list[FleetPart] | None, typer.Option(help="Part to measure; repeatable.")
    ] = None,
) -> None:
    """Measure a fleet of three hosts in namespaces; the last line is JSON."""
    seed = secrets.randbits(31) if seed is None else seed
    console.print(f"--seed {seed}")
    numbers = FleetNumbers()
    parts: dict[FleetPart, tuple[tuple[str, ...], Callable[[], None]]] = {
        FleetPart.FRONTENDS: ((frontends.TARGET,), lambda: numbers.frontends(traces)),
        FleetPart.HANDOVER: ((cross_host.TARGET,), lambda: numbers.handover(seed)),
        FleetPart.LEADER: (
            ("leader_change_s", "leader_change_s_worst"),
            lambda: numbers.leader(rounds, seed),
        ),
        FleetPart.CHAOS: (
            ("chaos_finished_share", "chaos_wrong_tokens"),
            lambda: numbers.chaos(chaos_seconds, seed),
        ),
    }
    with benchmark("fleet") as run:
        for part, (names, way) in parts.items():
            if only and part not in only:
                numbers.why |= dict.fromkeys(names, "left out by --only")
            else:
                numbers.measure(names, way)
        run.rows, run.targets = numbers.rows, numbers.targets()


if __name__ == "__main__":
    typer.run(main)
