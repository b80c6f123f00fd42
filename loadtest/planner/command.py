"""`mooncake plan`: which fleet serves this traffic within its service levels, and its config.pbtxt.

    mooncake plan --trace T --hardware H100 --model Llama-3-70B --slo-ttft 10 --slo-tbt 0.1

Not here: which fleets are tried (search.py), the model repository (overlay.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backends.extras import require
from loadtest.harness.result import Result, Target, shown
from loadtest.planner.engine import MeasuredEngine, NodeEngine, PlannedEngine, PlanRefused
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels, record_fleet, run_fleet
from loadtest.planner.overlay import serve_command, store_bytes, write_overlay
from loadtest.planner.search import Search, bounds_of, choose, explore, rows_of
from loadtest.replay.trace import TraceError
from loadtest.results.recording import from_bytes
from loadtest.simulator.cluster.hardware import HARDWARE, MODELS
from loadtest.simulator.options import console, progress_bar, reasons_shown
from loadtest.simulator.runs import PlannedRun, TraceSource, run_all
from mooncake_store.cli.arguments import parse_bytes

PAGE = "plan.html"
CHOSEN_PAGE = "chosen.html"
NOT_REAL = (
    "The real conductor, directory and batching on a virtual clock; models for the seconds of GPUs "
    "and networks."
)
LEFT = ("policy", "admission")


def plan(
    trace: Annotated[Path, typer.Option(help="The traffic: a published trace, or a recording.")],
    slo_ttft: Annotated[float, typer.Option(min=1e-4, help="Seconds to the first token.")],
    slo_tbt: Annotated[
        float, typer.Option(min=1e-4, help="Seconds between tokens: mean of the longest tenth.")
    ],
    hardware: Annotated[
        str, typer.Option(help=f"What a node is made of: {', '.join(HARDWARE)}.")
    ] = "",
    model: Annotated[str, typer.Option(help=f"What is served: {', '.join(MODELS)}.")] = "",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a node: 8.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A file of `mooncake profile`, instead of hardware and model."),
    ] = None,
    node_bytes: Annotated[
        str, typer.Option(help="KV that a node may hold, like 4G; default: 0.9 of its DRAM, or 1G.")
    ] = "0",
    nodes: Annotated[
        int | None,
        typer.Option(min=2, help="Just so many: the best split of them. Default: the fewest."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of all requests, to be within both limits.")
    ] = 0.9,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Of the traffic, as a multiple of the trace's.")
    ] = 1.0,
    length_scale: Annotated[
        float, typer.Option(min=0.001, help="Of prompts and answers, as in `mooncake replay`.")
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many of the trace: quicker.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other jitter.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each in its process.")] = 1,
    kept: Annotated[
        str,
        typer.Option(
            envvar="MOONCAKE_SIMULATIONS",
            help="Folder of runs that are known: a plan that was stopped goes on. none: keep none.",
        ),
    ] = ".mooncake/simulations",
    out: Annotated[
        Path,
        typer.Option(
            help=f"Folder for the model repository, {PAGE} (all fleets) and {CHOSEN_PAGE}."
        ),
    ] = Path("plan"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and nothing else.")
    ] = False,
) -> None:
    """Choose nodes, their split, cache and conductor for the best goodput on a trace, by
    simulation; write the choice as a model repository, and all compared fleets as a page."""
    require("report", "`mooncake plan`")
    levels = ServiceLevels(slo_ttft, slo_tbt)
    with reasons_shown("plan", PlanRefused, TraceError, OSError):
        size_bytes = parse_bytes(node_bytes, "--node-bytes")
        engine = engine_of(hardware, model, gpus, profile, size_bytes)
        source = source_of(trace, requests, engine, length_scale)
        folder = None if kept == "none" else Path(kept)
        result = planned(engine, source, levels, speed, share, nodes, seed, jobs, folder, out)
    if as_json:
        print(result.to_json())
    else:
        show(result)


def show(result: Result) -> None:
    """Print the runs as a table, then the result as JSON in the last line."""
    table = Table(title=str(result.constants["engine"]), box=None, padding=(0, 1))
    for column in ("fleet", "blocks", "policy", "admission", "within", "good/s", "TTFT", "TBT"):
        justify = "left" if column in LEFT else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in LEFT)
    for row in result.rows:
        cells = [str(row["node_blocks"]), str(row["policy"]), str(row["admission"])]
        cells += [f"{row['within_percent']:.1f}%"]
        cells += [shown(row[name]) for name in ("goodput_per_s", "ttft_p90_s", "tbt_p90_s")]
        fleet = f"{row['prefills']}P+{row['decodes']}D"
        table.add_row(fleet, *cells, style="bold" if row["is_chosen"] else "")
    table.caption = "good/s: within both limits; TTFT and TBT: their p90 in seconds"
    Console(highlight=False).print(table)
    print(result.to_json())


def engine_of(
    hardware: str, model: str, gpus: int | None, profile: Path | None, node_bytes: int
) -> PlannedEngine:
    if profile is not None:
        if hardware or model or gpus:
            raise PlanRefused(
                "--profile describes the worker: leave out --hardware, --model and --gpus"
            )
        return MeasuredEngine.read(profile, node_bytes)
    if not hardware or not model:
        raise PlanRefused(
            f"give the worker: --hardware ({', '.join(HARDWARE)}) and --model ({', '.join(MODELS)})"
            ", or --profile FILE"
        )
    return NodeEngine.named(hardware, model, gpus, node_bytes)


def source_of(
    trace: Path, requests: int | None, engine: PlannedEngine, length_scale: float = 1.0
) -> TraceSource:
    """TraceError for an invalid line, PlanRefused for a missing file."""
    if not trace.is_file():
        raise PlanRefused(f"--trace {trace}: no such file")
    source = TraceSource.of(
        trace, requests, block_tokens=engine.settings().block_tokens, length_scale=length_scale
    )
    source.offered()
    return source


def planned(
    engine: PlannedEngine,
    source: TraceSource,
    levels: ServiceLevels,
    speed: float,
    share: float,
    nodes: int | None,
    seed: int,
    jobs: int,
    kept: Path | None,
    out: Path,
) -> Result:
    started_s = time.monotonic()
    bounds = bounds_of(source.offered(), engine, levels, speed, share)
    out.mkdir(parents=True, exist_ok=True)  # fails before anything runs

    with progress_bar() as begin:

        def run(plans: Sequence[FleetPlan]) -> Sequence[FleetRun]:
            arguments = (engine, levels, speed, seed)
            runs = [
                PlannedRun(f"{plan.name}, {plan.policy}", source, run_fleet, (plan, *arguments))
                for plan in plans
            ]
            return run_all(runs, begin, jobs, kept)

        search = explore(engine, bounds, share, nodes, run)
        chosen = choose(search, run)
        again = (chosen.plan, engine, levels, speed, seed)
        choice = PlannedRun("the choice, request by request", source, record_fleet, again)
        [recorded] = run_all([choice], begin, folder=kept)
    why = why_chosen(search, chosen, engine, levels)
    repository = write_overlay(out, chosen, engine, levels)
    command = serve_command(repository, chosen.plan, engine)
    result = Result(
        "plan",
        time.monotonic() - started_s,
        rows_of(search, chosen),
        targets_of(search, chosen),
        constants={
            **engine.stated(),
            "ttft_slo_s": levels.ttft_s,
            "tbt_slo_s": levels.tbt_s,
            "speed": speed,
            "length_scale": source.length_scale,
            "share": share,
            "unloaded_ttft_p50_s": round(bounds.ttft_p50_s, 4),
            "unloaded_ttft_of_share_s": round(bounds.ttft_share_s, 4),
            "unloaded_tbt_s": round(bounds.tbt_s, 5),
            "busy_prefills_at_least": round(bounds.prefills, 3),
            "busy_decodes_at_least": round(bounds.decodes, 3),
            "store_bytes": store_bytes(chosen.plan, engine),
        },
        shortened=f"the first {source.requests} requests" if source.requests else "",
    )
    write_pages(search, chosen, recorded, result, (why, command), out)
    console.print(why, markup=False, soft_wrap=True)
    pages = f"{out / PAGE}, {out / CHOSEN_PAGE}"
    console.print(f"written: {pages}, {repository}\n{command}", markup=False, soft_wrap=True)
    return result


def write_pages(
    search: Search,
    chosen: FleetRun,
    recorded: bytes,
    result: Result,
    said: tuple[str, str],
    out: Path,
) -> None:
    """Write the page of all fleets and that of the choice; `said`: why, and the command."""
    from loadtest.report.page import write_page  # these load matplotlib
    from loadtest.report.run_page import write_report
    from loadtest.report.sweep_page import sweep_page

    runs = search.runs()
    digests = [run.digest for run in runs if run.digest is not None]
    number = next(number for number, run in enumerate(runs, 1) if run is chosen)
    page = sweep_page(digests, ["node_blocks"], search.share, chosen=number)
    why, command = said
    write_page(
        replace(
            page,
            title="Plan",
            lead=[why, NOT_REAL],
            command=command,
            settings={**page.settings, **result.constants},
            settings_heading="What was assumed",
        ),
        out / PAGE,
    )
    write_report(from_bytes(recorded), out / CHOSEN_PAGE)


def why_chosen(
    search: Search, chosen: FleetRun, engine: PlannedEngine, levels: ServiceLevels
) -> str:
    """The reason for the choice, in one or two sentences."""
    plan, size = chosen.plan, store_bytes(chosen.plan, engine) / 1e9
    kind = f"the best split of {plan.nodes} nodes"
    if not search.has_nodes:
        kind = (
            "the smallest fleet that was found to serve that many"
            if chosen.share >= search.share
            else f"the best goodput found: no fleet that was tried serves {search.share:.0%} within"
        )
    return (
        f"{plan.prefills} prefill + {plan.decodes} decode nodes ({engine.name}) with {size:.3g} GB "
        f"of cache each, policy {plan.policy}, admission {plan.admission}: {chosen.share:.1%} of "
        f"the requests within {levels.ttft_s:g} s and {levels.tbt_s:g} s, {chosen.goodput:.3g} a "
        f"second ({chosen.goodput_per_node:.3g} a node); {kind}."
    )


def targets_of(search: Search, chosen: FleetRun) -> list[Target]:
    return [
        Target("requests within both limits, share", round(chosen.share, 4), ">=", search.share)
    ]
