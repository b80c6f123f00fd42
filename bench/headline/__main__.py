"""Ours beside the real vLLM on one machine: goodput against offered load.

    python -m bench.headline --checkpoint DIR --resume FOLDER [--rounds 3] [--only a,d]

Systems (systems.py) take turns in each round, all with the same client, trace and memory for KV.
First a search finds (a)'s capacity: the highest rate at which 90 % of the requests are good. The
offered rates are 0.5, 1, 1.6 and 2.5 times the capacity, with `--requests` requests of the
conversation trace each. The synthetic trace is offered at 1.6 only. The run makes the environments
that it needs (environment.py). An interrupted run continues with the same `--resume`. The last line
is JSON.

Not here: the measurement (measure.py), definitions of goodput (goodput.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.headline import traces
from bench.headline.environment import VLLM, router_bin, vllm_environment
from bench.headline.goodput import FIXED_TPOT_S, FIXED_TTFT_S, PAPER_TPOT, PAPER_TTFT
from bench.headline.measure import CONVERSATION, SYNTHETIC, Measurement
from bench.headline.page import save_picture, write_headline
from bench.headline.resume import ResumeFolder
from bench.headline.summary import headline_targets, round_rows, summary_rows
from bench.headline.systems import KV_BYTES, OURS, SYSTEMS, Machine, mooncake_repository
from bench.headline.traces import TraceRequest
from conductor.config import AUTO
from loadtest.harness.benchmark import BenchmarkRun, benchmark, console
from loadtest.harness.result import Cell, Result
from loadtest.harness.server import PROJECT, CannotMeasure
from loadtest.replay.trace import read_trace

CHECKPOINT = Path(".mooncake/checkpoints/smollm2-135m")
ROUTED = ("vllm-two", "vllm-pd")


def chosen_systems(only: str) -> list[str]:
    """Names of the systems in `only`, by letter or by name; all when it is empty."""
    if not only:
        return list(SYSTEMS.values())
    names = [SYSTEMS.get(word.strip(), word.strip()) for word in only.split(",")]
    for name in names:
        if name not in SYSTEMS.values():
            known = ", ".join(f"{short} or {system}" for short, system in SYSTEMS.items())
            raise ValueError(f"no system {name!r}; use {known}")
    return [system for system in SYSTEMS.values() if system in names]


def read_traces(
    folder: Path, checkpoint: Path, requests: int, seed: int
) -> dict[str, list[TraceRequest]]:
    """Both traces, scaled; CannotMeasure or TraceError when one is missing."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    context_tokens_max = int(config["max_position_embeddings"]) - 1
    found = {}
    for name in (CONVERSATION, SYNTHETIC):
        path = folder / f"{name}_trace.jsonl"
        if not path.exists():
            raise CannotMeasure(f"{path} is missing; name the folder of the traces with --traces")
        found[name] = traces.chosen(read_trace(path), requests, context_tokens_max, seed)
    return found


def report(run: BenchmarkRun, measurement: Measurement, page: Path, plot: Path | None) -> None:
    """Rows and targets of all cells in the folder, the page and the picture."""
    cells = measurement.store.cells()
    run.rows = [*summary_rows(cells, measurement.idle), *round_rows(cells)]
    run.targets = headline_targets(run.rows)
    run.constants["capacity_per_s"] = measurement.capacity_per_s
    run.constants["rounds"] = max((cell.key.round for cell in cells), default=0)
    for system in ("vllm-tuned", "vllm-two"):
        for name, value in measurement.chosen(system).items():
            run.constants[f"{system} {name}"] = str(value)
    write_headline(page, Result("headline", 0.0, run.rows, run.targets, run.constants))
    console.print(f"page: {page}")
    if plot is not None:
        save_picture(plot, run.rows)
        console.print(f"picture: {plot}" if run.rows else "no picture without a measured cell")


def main(
    checkpoint: Annotated[
        Path, typer.Option(help="Hugging Face folder that all systems serve.")
    ] = CHECKPOINT,
    resume: Annotated[
        Path, typer.Option(help="Folder of finished cells; the same one again goes on.")
    ] = Path(".mooncake/headline"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; vLLM's own P/D has one.")] = 3,
    requests: Annotated[int, typer.Option(min=4, help="Requests of a cell.")] = 120,
    light_requests: Annotated[
        int | None, typer.Option(min=2, help="Requests of a cell at 0.5; default: half of them.")
    ] = None,
    only: Annotated[str, typer.Option(help="Systems, like a,d or vllm,mooncake.")] = "",
    trace_folder: Annotated[
        Path, typer.Option("--traces", help="Folder with conversation_ and synthetic_trace.jsonl.")
    ] = PROJECT.parent / "shared" / "traces",
    seed: Annotated[int, typer.Option(help="Which conversations.")] = 1,
    limits: Annotated[
        str, typer.Option(help="Service levels of (d): auto, or TTFT,TBT in seconds, like 2,0.1.")
    ] = AUTO,
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the resume folder.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="The picture for the README: FILE.png or FILE.svg.")
    ] = None,
) -> None:
    """Measure this project beside vLLM; the last line is JSON."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or servers would stay
    with benchmark("headline") as run:
        systems = chosen_systems(only)
        if not (checkpoint / "config.json").exists():
            raise CannotMeasure(f"{checkpoint} has no config.json; name a model with --checkpoint")
        checkpoint, store = checkpoint.resolve(), ResumeFolder(resume.resolve())
        requests_of = read_traces(trace_folder, checkpoint, requests, seed)
        light = light_requests or requests // 2
        settings: dict[str, Cell] = {
            "seed": seed,
            "requests": requests,
            "light_requests": light,
            "checkpoint": checkpoint.name,
            "vllm": VLLM,
            "kv_bytes": KV_BYTES,
            "cores": len(os.sched_getaffinity(0)),
        }
        if limits != AUTO:
            settings["limits"] = limits
        store.check(settings)
        with console.status("the environments of vLLM and its router ..."):
            vllm_bin = vllm_environment()
            routers = router_bin() if set(systems) & set(ROUTED) else None
        cores = tuple(sorted(os.sched_getaffinity(0)))
        machine = Machine(checkpoint, vllm_bin, routers, cores, store.state)
        for system in OURS:
            mooncake_repository(machine, system, limits)
        run.constants |= {
            **settings,
            "fixed": f"TTFT <= {FIXED_TTFT_S:g} s, TPOT <= {1e3 * FIXED_TPOT_S:g} ms",
            "paper": f"TTFT <= {PAPER_TTFT:g}x, TPOT <= {PAPER_TPOT:g}x of idle vLLM",
        }
        for name, chosen in requests_of.items():
            run.constants[f"{name} reusable"] = round(traces.reusable_share(chosen), 3)
        measurement = Measurement(machine, store, requests_of, light, progress)
        try:
            measurement.run(systems, rounds)
        finally:
            if measurement.idle is not None:
                report(run, measurement, out or store.folder / "report.html", plot)


def progress(line: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
