"""How long `mooncake serve` takes to start and to stop, and what it is made of when it is idle.

    python -m loadtest.bench.start_stop [--rounds 5]

Each round starts a server on free ports, waits until every model is ready, adds up its processes
at rest (memory as PSS, so that shared pages count once), and stops it by SIGINT. Rows are rounds;
the first start on a machine measures its speed and takes some seconds longer.

Not here: starting the server (server.py), memory over time (leaks.py).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from loadtest.bench import server
from loadtest.bench.process_watch import process_name
from loadtest.bench.result import Cell, Result, Target

START_S_GOAL, STOP_S_GOAL = 15.0, 10.0


def measure(arguments: Sequence[str]) -> dict[str, Cell]:
    """One start and stop."""
    addresses = server.free_addresses()
    with tempfile.NamedTemporaryFile(prefix="mooncake-bench-", suffix=".log") as log:
        started_s = time.perf_counter()
        process = server.start(addresses, arguments, Path(log.name))
        try:
            server.wait_ready(addresses, server.READY_S_MAX, process, Path(log.name))
            ready_s = time.perf_counter() - started_s
            row = at_rest(process.pid)
        finally:
            stopping_s = time.perf_counter()
            server.stop(process)
    return {
        "ready_s": round(ready_s, 2),
        "stop_s": round(time.perf_counter() - stopping_s, 2),
        **row,
    }


def at_rest(pid: int) -> dict[str, Cell]:
    """The launcher and everything below it."""
    root = psutil.Process(pid)
    pss_bytes = dict.fromkeys(("all", "tritons", "launcher"), 0)
    processes = threads = triton_threads = 0
    for process in [root, *root.children(recursive=True)]:
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
    store_bytes: Annotated[str, typer.Option(help="Of each storage node.")] = "128M",
) -> None:
    """Start and stop servers; the last line is JSON."""
    console = Console(stderr=True, highlight=False)
    started_s = time.perf_counter()
    with server.measuring(console):
        rows = []
        for _ in range(rounds):
            rows.append(measure(["--store-bytes", store_bytes]))
            console.print(str(rows[-1]))

    def median(name: str) -> float:
        return float(statistics.median(float(row[name] or 0) for row in rows))

    targets = [
        Target("ready_s", median("ready_s"), "<=", START_S_GOAL),
        Target("stop_s", median("stop_s"), "<=", STOP_S_GOAL),
    ]
    Result("start_stop", time.perf_counter() - started_s, rows, targets).print()


if __name__ == "__main__":
    typer.run(main)
