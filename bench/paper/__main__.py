"""`python -m bench.paper`: the papers' experiments on the published traces, without a server.

python -m bench.paper --experiment scheduling --traces FOLDER [--json] [--plot scheduling.png]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from backends.extras import require
from bench.paper import constants
from bench.paper.experiments import (
    crowd,
    dynamo_replay,
    frontends,
    limits,
    pipeline_groups,
    rejection,
    roles,
    scale,
    scheduling,
    ssd,
)
from bench.paper.figures import (
    bandwidth,
    cache_policies,
    capacity,
    global_cache,
    gpu_time,
    long_prefix,
    pd_ratio,
    poisson,
    real,
    replicas,
)
from bench.paper.figures.reasons import PAPER_SAYS, WHY_APART
from loadtest.harness.result import Result
from loadtest.replay.trace import TraceError
from loadtest.report.page import ReportPage, write_page
from loadtest.simulator.command import (
    Admissions,
    Blocks,
    Changes,
    Decodes,
    Folder,
    Jobs,
    Kept,
    LengthScale,
    Measured,
    Plot,
    Policies,
    Prefills,
    Requests,
    Seed,
    Speeds,
    Traces,
)
from loadtest.simulator.experiment_page import ABOUT as SIMULATED
from loadtest.simulator.experiment_page import (
    Chapter,
    chapter_section,
    svg_of,
    targets_section,
    write_experiment,
)
from loadtest.simulator.options import (
    Answer,
    Begin,
    Rows,
    SimulationOptions,
    SimulationRefused,
    console,
    progress_bar,
    reasons_shown,
)

EXPERIMENTS: Mapping[str, Callable[[SimulationOptions, Begin], Answer]] = {
    "scheduling": scheduling.answer,
    "limits": limits.answer,
    "rejection": rejection.answer,
    "dynamo-replay": dynamo_replay.answer,
    "frontends": frontends.answer,
    "roles": roles.answer,
    "gpu-time": gpu_time.answer,
    "capacity": capacity.answer,
    "global-cache": global_cache.answer,
    "pd-ratio": pd_ratio.answer,
    "long-prefix": long_prefix.answer,
    "bandwidth": bandwidth.answer,
    "replicas": replicas.answer,
    "simulated-long": poisson.simulated_long,
    "datasets": poisson.data_sets,
    "real": real.answer,
    "cache-policies": cache_policies.answer,
    "ssd": ssd.answer,
    "cpp": pipeline_groups.answer,
    "scale": scale.answer,
    "crowd": crowd.answer,
}
PaperExperiment = Enum(  # type: ignore[misc]
    "PaperExperiment", {name.upper().replace("-", "_"): name for name in EXPERIMENTS}, type=str
)
OF_PAPERS = tuple(map(PaperExperiment, PAPER_SAYS))

ABOUT = """What to find out.

scheduling: mean TTFT under each prefill policy (the paper's Figure 5, and ours); the real
conductor, directory and batching on a virtual clock, 8 + 8 nodes, a model of the GPUs.

limits: requests within their service levels with the conductor's limits `auto` and fixed ones.

rejection: what each admission policy does when more is offered than fits (the paper's Table 3).

dynamo-replay: the conductor in the engine of NVIDIA Dynamo's replay, beside Dynamo's router; with
--speed, --blocks, --prefills, --decodes or --trace, every scheduler on that case.

ssd: hit rate and mean TTFT with DRAM only and with an SSD of four times its size behind it.

cpp: mean TTFT of long prompts and of all with prefill nodes in pipeline groups (chunked pipeline
parallelism), mixes of groups and nodes alone of the same 8 nodes.

scale: what a run costs and what a decision takes on 16 to 2,000 workers; with --prefills on so many
of each role.

crowd: 1,536 requests on 50 + 2,500 workers, of which 5 % are killed, frozen or reloaded meanwhile:
whether each ends within its deadline.

frontends: mean TTFT with several frontends, with and without notes of what each routed.

roles: requests within both limits when the load changes from short of prefill to short of decode:
every fixed split, workers that flip with the load, and an oracle that knows when it changes.

Figures of FAST'25, beside the paper's numbers and with one set of constants: gpu-time (Figure 8),
capacity (1 and 7), global-cache (10), replicas (11), bandwidth (13), long-prefix (14), pd-ratio
(15); of the arXiv report: datasets (11), simulated-long (12), real (13), cache-policies (Table 1).
"""
# Experiments on workers of this project alone, which a profile can replace.
OF_ANY_WORKER = (
    "scheduling",
    "rejection",
    "frontends",
    "global-cache",
    "replicas",
    "bandwidth",
    "pd-ratio",
    "ssd",
)
Which = Annotated[PaperExperiment | None, typer.Option(help=ABOUT)]
Every = Annotated[
    bool, typer.Option("--all", help="Every figure of the papers, as one HTML page: --book.")
]
Book = Annotated[Path, typer.Option(help="Where --all writes its page.")]
Frontends = Annotated[
    list[int] | None, typer.Option("--frontends", min=1, help="frontends: how many; repeatable.")
]
NotesLatency = Annotated[
    list[float] | None,
    typer.Option(
        "--notes-latency-s", min=0.0, help="frontends: delay of notes to the others; repeatable."
    ),
]
PeerPython = Annotated[
    str | None,
    typer.Option(
        help="dynamo-replay: a Python with ai-dynamo-runtime; Dynamo's own replay runs too, "
        "instead of its recording."
    ),
]


def main(
    experiment: Which = None,
    every: Every = False,
    book: Book = Path("papers.html"),
    traces: Folder = None,
    trace: Traces = None,
    policy: Policies = None,
    admission: Admissions = None,
    speed: Speeds = None,
    requests: Requests = None,
    seed: Seed = 0,
    prefills: Prefills = None,
    decodes: Decodes = None,
    blocks: Blocks = None,
    frontend_counts: Frontends = None,
    notes_latency_s: NotesLatency = None,
    changes: Changes = None,
    profile: Measured = None,
    length_scale: LengthScale = 1.0,
    peer_python: PeerPython = None,
    jobs: Jobs = 1,
    kept: Kept = ".mooncake/simulations",
    report: Annotated[Path | None, typer.Option(help="Write it as one HTML page.")] = None,
    picture: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON only.")] = False,
) -> None:
    """Run an experiment of the papers on recorded requests; no server is needed."""
    if every or picture is not None or report is not None:
        drawing = "--all" if every else "--plot" if picture is not None else "--report"
        require("report", f"`python -m bench.paper {drawing}`")
    with reasons_shown("simulate", SimulationRefused, TraceError, OSError):
        options = SimulationOptions.typed(
            folder=traces,
            traces=trace,
            policies=policy,
            admissions=admission,
            speeds=speed,
            blocks=blocks,
            requests=requests,
            seed=seed,
            prefills=prefills,
            decodes=decodes,
            picture=picture,
            changes=changes,
            peer_python=peer_python,
            frontends=frontend_counts,
            notes_latencies_s=notes_latency_s,
            jobs=jobs,
            kept=kept,
            profile=profile,
            length_scale=length_scale,
        )
        if every:
            write_all(options, book)
            return
        result = answer(chosen(experiment, options), options, report)
    if as_json:
        print(result.to_json())
    else:
        result.print()


def chosen(experiment: PaperExperiment | None, options: SimulationOptions) -> PaperExperiment:
    """SimulationRefused without an experiment, and for one that fixes its workers."""
    if experiment is None:
        raise SimulationRefused("name the experiment: --experiment NAME, or --all")
    if options.is_any_worker and experiment not in OF_ANY_WORKER:
        raise SimulationRefused(
            f"--profile and --length-scale: not in {experiment.value}, which compares with "
            f"others or with the paper's nodes; in {', '.join(OF_ANY_WORKER)}"
        )
    return experiment


def answer(
    experiment: PaperExperiment, options: SimulationOptions, report: Path | None = None
) -> Result:
    """The experiment's result; writes its picture and page if requested."""
    started_s = time.monotonic()
    with progress_bar() as begin:
        rows, targets = EXPERIMENTS[experiment.value](options, begin)
    if options.picture is not None:
        draw(experiment, options.picture, rows)
    result = Result(
        experiment.value,
        time.monotonic() - started_s,
        rows,
        targets,
        constants=constants.stated(options.settings()),
        shortened=options.is_shortened,
    )
    if report is not None:
        write_experiment(report, chapter_of(result))
        console.print(f"written: {report}", markup=False, soft_wrap=True)
    return result


def chapter_of(result: Result) -> Chapter:
    experiment, rows = PaperExperiment(result.name), list(map(dict, result.rows))
    picture = svg_of(lambda file: draw(experiment, file, rows), result.name)
    return Chapter(result, picture, PAPER_SAYS.get(result.name, ""), WHY_APART.get(result.name, ""))


def draw(experiment: PaperExperiment, path: Path, rows: Rows) -> None:
    """Draw the experiment's picture, if it has one."""
    from bench.paper import pictures  # loads matplotlib
    from bench.paper.figures import pictures as of_papers

    if (save := {**pictures.SAVE, **of_papers.SAVE}.get(experiment.value)) is not None:
        save(path, rows)


def write_all(options: SimulationOptions, path: Path) -> None:
    """Each figure of the papers as a chapter. The page is complete after each chapter."""
    if options.is_any_worker:
        raise SimulationRefused(
            "--all needs the paper's nodes: leave out --profile and --length-scale"
        )
    chapters: list[Chapter] = []
    for experiment in OF_PAPERS:
        chapters.append(chapter_of(answer(experiment, options)))
        write_book(path, chapters)
    console.print(f"written: {path}", markup=False, soft_wrap=True)


def write_book(path: Path, chapters: Sequence[Chapter]) -> None:
    """All figures as one page; OSError when `path` cannot be written."""
    sections = [targets_section(chapters), *map(chapter_section, chapters)]
    page = ReportPage(
        "The papers' figures, simulated",
        sections,
        lead=[SIMULATED],
        settings=constants.stated(),
        settings_heading="Constants of every experiment",
    )
    write_page(page, path)


def run(arguments: list[str] | None = None) -> None:
    """`arguments`: None for those of the process. Raises SystemExit."""
    command = typer.Typer(add_completion=False)
    command.command()(main)
    command(arguments, prog_name="python -m bench.paper")


if __name__ == "__main__":
    run()
