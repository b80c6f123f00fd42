"""How long `mooncake serve` takes to start and to stop, and its processes when it is idle.

    python -m bench.start_stop [--rounds 5]

Each round starts a server on free ports, waits until every model is ready, adds up its idle
processes (memory as PSS, so that shared pages count once), and stops it by SIGINT. Rows are rounds.
The first start on a machine measures the machine's speed and takes some seconds longer.

Not here: memory over time (leaks.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import psutil
import typer

from bench.harness.processes import process_name, process_tree
from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import started

START_S_GOAL, STOP_S_GOAL = 15.0, 10.0


def measure(arguments: Sequence[str]) -> dict[str, Cell]:
    started_s = time.perf_counter()
    with started(arguments) as server:
        ready_s = time.perf_counter() - started_s
        row = at_rest(server.pid)
        stopping_s = time.perf_counter()
    return {
        "ready_s": round(ready_s, 2),
        "stop_s": round(time.perf_counter() - stopping_s, 2),
        **row,
    }


def at_rest(pid: int) -> dict[str, Cell]:
    """Sums over the launcher and its descendants."""
    pss_bytes = dict.fromkeys(("all", "tritons", "launcher"), 0)
    processes = threads = triton_threads = 0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process_name(process)
            name = "tritons" if name.startswith("triton ") else name
            size = process.memory_full_info().pss
            pss_bytes["all"] += size
            if name in pss_bytes:
                pss_bytes[name] += size
            processes += 1
            threads += process.num_threads()
            triton_threads += process.num_threads() if name == "tritons" else 0
    mib = {f"pss_mib_{name}": round(size / 2**20) for name, size in pss_bytes.items()}
    return {"processes": processes, "threads": threads, "triton_threads": triton_threads, **mib}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Starts and stops.")] = 5,
    store_bytes: Annotated[str, typer.Option(help="DRAM of each storage node.")] = "128M",
) -> None:
    """Start and stop servers; the last line is JSON."""
    with benchmark("start_stop") as run:
        for _ in range(rounds):
            run.rows.append(measure(["--store-bytes", store_bytes]))
            console.print(str(run.rows[-1]))
        run.targets = [
            Target(name, statistics.median(float(row[name] or 0) for row in run.rows), "<=", goal)
            for name, goal in (("ready_s", START_S_GOAL), ("stop_s", STOP_S_GOAL))
        ]


if __name__ == "__main__":
    typer.run(main)
