"""`mooncake simulate`: experiments on the published traces, without a server.

mooncake simulate --experiment hit-rate --traces FOLDER [--json] [--plot hit-rate.png]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.extras import require
from loadtest.harness.result import Result, Target
from loadtest.profile.profile import Profile
from loadtest.replay.trace import TraceError
from loadtest.results.digest import digest_of
from loadtest.results.recording import Recording
from loadtest.simulator.experiments import (
    constants,
    coupled_baselines,
    crowd,
    dynamo_replay,
    frontends,
    hit_rate,
    pipeline_groups,
    rejection,
    replayed,
    roles,
    scale,
    scheduling,
    ssd,
)
from loadtest.simulator.experiments.paper import (
    bandwidth,
    cache_policies,
    capacity,
    datasets,
    global_cache,
    gpu_time,
    long_prefix,
    pd_ratio,
    real,
    replicas,
    simulated_long,
)
from loadtest.simulator.options import (
    SUFFIXES,
    WHERE,
    Answer,
    Begin,
    Rows,
    SimulationOptions,
    SimulationRefused,
    console,
    progress_bar,
    reasons_shown,
)
from loadtest.simulator.profiled import read_profile

if TYPE_CHECKING:
    from loadtest.simulator.book import BookChapter


class Experiment(str, Enum):
    HIT_RATE = "hit-rate"
    SCHEDULING = "scheduling"
    REJECTION = "rejection"
    COUPLED = "coupled"
    DYNAMO_REPLAY = "dynamo-replay"
    FRONTENDS = "frontends"
    ROLES = "roles"
    GPU_TIME = "gpu-time"
    CAPACITY = "capacity"
    GLOBAL_CACHE = "global-cache"
    PD_RATIO = "pd-ratio"
    LONG_PREFIX = "long-prefix"
    BANDWIDTH = "bandwidth"
    REPLICAS = "replicas"
    SIMULATED_LONG = "simulated-long"
    DATASETS = "datasets"
    REAL = "real"
    CACHE_POLICIES = "cache-policies"
    SSD = "ssd"
    CPP = "cpp"
    SCALE = "scale"
    CROWD = "crowd"
    REPLAY = "replay"


EXPERIMENTS: Mapping[Experiment, Callable[[SimulationOptions, Begin], Answer]] = {
    Experiment.HIT_RATE: hit_rate.answer,
    Experiment.SCHEDULING: scheduling.answer,
    Experiment.REJECTION: rejection.answer,
    Experiment.COUPLED: coupled_baselines.answer,
    Experiment.DYNAMO_REPLAY: dynamo_replay.answer,
    Experiment.FRONTENDS: frontends.answer,
    Experiment.ROLES: roles.answer,
    Experiment.GPU_TIME: gpu_time.answer,
    Experiment.CAPACITY: capacity.answer,
    Experiment.GLOBAL_CACHE: global_cache.answer,
    Experiment.PD_RATIO: pd_ratio.answer,
    Experiment.LONG_PREFIX: long_prefix.answer,
    Experiment.BANDWIDTH: bandwidth.answer,
    Experiment.REPLICAS: replicas.answer,
    Experiment.SIMULATED_LONG: simulated_long.answer,
    Experiment.DATASETS: datasets.answer,
    Experiment.REAL: real.answer,
    Experiment.CACHE_POLICIES: cache_policies.answer,
    Experiment.SSD: ssd.answer,
    Experiment.CPP: pipeline_groups.answer,
    Experiment.SCALE: scale.answer,
    Experiment.CROWD: crowd.answer,
}

OF_PAPERS = (
    Experiment.GPU_TIME,
    Experiment.CAPACITY,
    Experiment.GLOBAL_CACHE,
    Experiment.REPLICAS,
    Experiment.BANDWIDTH,
    Experiment.LONG_PREFIX,
    Experiment.PD_RATIO,
    Experiment.SIMULATED_LONG,
    Experiment.DATASETS,
    Experiment.REAL,
    Experiment.CACHE_POLICIES,
    Experiment.SSD,
    Experiment.CPP,
    Experiment.ROLES,
    Experiment.SCALE,
    Experiment.CROWD,
)

ABOUT = """What to find out.

replay: what `mooncake replay` would have met, request by request; with --report on the page that a
real replay has. Several --speed, --policy or --admission: a page that lays the runs side by side.

hit-rate: which part of the block references of each trace is found by one cache of 1,000 to 100,000
blocks of 512 tokens and by an unlimited one, with each policy of eviction, and what the best policy
would find that knows the future. Order of requests only, no clock.

scheduling: mean TTFT under each prefill policy (the paper's Figure 5, and ours); the real
conductor, directory and batching on a virtual clock, 8 + 8 nodes, a model of the GPUs.

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

frontends: mean TTFT with several frontends that tell each other what they routed, or not.

roles: requests within both limits when the load changes from short of prefill to short of decode:
every fixed split, workers that flip with the load, and an oracle that knows when it changes.

coupled: the same trace on as many nodes of vLLM-like engines, swept over their knobs.

Figures of FAST'25, beside the paper's numbers and with one set of constants: gpu-time (Figure 8),
capacity (1 and 7), global-cache (10), replicas (11), bandwidth (13), long-prefix (14), pd-ratio
(15); of the arXiv report: datasets (11), simulated-long (12), real (13), cache-policies (Table 1).
"""
# What simulates workers of this project and nothing to compare them with.
OF_ANY_WORKER = (
    Experiment.SCHEDULING,
    Experiment.REJECTION,
    Experiment.FRONTENDS,
    Experiment.GLOBAL_CACHE,
    Experiment.REPLICAS,
    Experiment.BANDWIDTH,
    Experiment.PD_RATIO,
    Experiment.SSD,
    Experiment.REPLAY,
)
Which = Annotated[Experiment | None, typer.Option(help=ABOUT)]
Every = Annotated[
    bool, typer.Option("--all", help="Every figure of the papers, as one HTML page: --book.")
]
Book = Annotated[Path, typer.Option(help="Where --all writes its page.")]
Folder = Annotated[
    Path | None,
    typer.Option(envvar="MOONCAKE_TRACES", help=f"Folder with NAME_trace.jsonl ({WHERE})."),
]
WholeDirectory = Annotated[
    bool, typer.Option("--directory", help="hit-rate: through the whole Directory; same, slower.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Another value of a parameter of the conductor, for every run: NAME=VALUE; "
        "repeatable.",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(help="Only this policy (of eviction, or of prefill); repeatable."),
]
Admissions = Annotated[list[str] | None, typer.Option(help="Only this admission; repeatable.")]
Prefills = Annotated[int | None, typer.Option(min=1, help="Prefill nodes: 8, in dynamo-replay 2.")]
Decodes = Annotated[int | None, typer.Option(min=1, help="Decode nodes: 8, in dynamo-replay 2.")]
Blocks = Annotated[
    list[int] | None,
    typer.Option(min=1, help="hit-rate, dynamo-replay, ssd: only this size; repeatable."),
]
Frontends = Annotated[
    list[int] | None, typer.Option("--frontends", min=1, help="frontends: so many; repeatable.")
]
NotesLatency = Annotated[
    list[float] | None,
    typer.Option(
        "--notes-latency-s",
        min=0.0,
        help="frontends: what one routed, the others know so much later; repeatable.",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at once, each in a process of its own.")]
Kept = Annotated[
    str,
    typer.Option(
        "--kept",
        envvar="MOONCAKE_SIMULATIONS",
        help="Folder of runs that are known: the same run is not made twice, and an experiment "
        "that was stopped goes on. Only a folder of one's own. none: make all, keep none.",
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Workers as `mooncake profile --out FILE` measured them, instead of the "
        f"paper's nodes: in {', '.join(OF_ANY_WORKER)}.",
    ),
]
LengthScale = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Prompts and answers so many times as long, in the same "
        "experiments: a small worker cannot serve a trace as it was recorded.",
    ),
]
PeerPython = Annotated[
    str | None,
    typer.Option(
        help="dynamo-replay: a Python with ai-dynamo-runtime; Dynamo's own replay runs too, "
        "instead of what was recorded of it."
    ),
]


def simulate(
    experiment: Which = None,
    every: Every = False,
    book: Book = Path("papers.html"),
    traces: Folder = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="Only this trace, e.g. conversation; repeatable.")
    ] = None,
    policy: Policies = None,
    admission: Admissions = None,
    speed: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="So many times as fast as recorded; repeatable."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many of the trace.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other jitter.")] = 0,
    prefills: Prefills = None,
    decodes: Decodes = None,
    blocks: Blocks = None,
    frontend_counts: Frontends = None,
    notes_latency_s: NotesLatency = None,
    directory: WholeDirectory = False,
    changes: Changes = None,
    profile: Measured = None,
    length_scale: LengthScale = 1.0,
    peer_python: PeerPython = None,
    jobs: Jobs = 1,
    kept: Kept = ".mooncake/simulations",
    report: Annotated[
        Path | None,
        typer.Option(help="Write it as one HTML page, which of replay is also the runs' file."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help=f"Draw it: a {', '.join(SUFFIXES)} file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and nothing else.")
    ] = False,
) -> None:
    """Run an experiment on recorded requests; no server is needed."""
    if every or picture is not None or report is not None:
        drawing = "--all" if every else "--plot" if picture is not None else "--report"
        require("report", f"`mooncake simulate {drawing}`")
    with reasons_shown("simulate", SimulationRefused, TraceError, OSError):
        options = SimulationOptions(
            folder=traces,
            traces=tuple(trace or ()),
            policies=tuple(policy or ()),
            admissions=tuple(admission or ()),
            speeds=tuple(speed or ()),
            blocks=tuple(blocks or ()),
            requests=requests,
            seed=seed,
            prefills=prefills,
            decodes=decodes,
            is_directory=directory,
            picture=picture,
            changes=tuple(changes or ()),
            peer_python=peer_python,
            frontends=tuple(frontend_counts or ()),
            notes_latencies_s=tuple(notes_latency_s or ()),
            jobs=jobs,
            kept=None if kept == "none" else Path(kept),
            profile=_profile_of(profile),
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


def chosen(experiment: Experiment | None, options: SimulationOptions) -> Experiment:
    """SimulationRefused for none, and for one that these workers say nothing about."""
    if experiment is None:
        raise SimulationRefused("say what to find out: --experiment NAME, or --all")
    if options.is_any_worker and experiment not in OF_ANY_WORKER:
        raise SimulationRefused(
            f"--profile and --length-scale: not in {experiment.value}, which compares with "
            f"others or with the paper's nodes; in {', '.join(OF_ANY_WORKER)}"
        )
    return experiment


def _profile_of(path: Path | None) -> Profile | None:
    if path is None:
        return None
    try:
        return read_profile(path)
    except (OSError, ValueError) as problem:
        raise SimulationRefused(f"--profile {path}: {problem}") from None


def answer(
    experiment: Experiment, options: SimulationOptions, report: Path | None = None
) -> Result:
    """What the experiment found; the picture and the page when they were asked for."""
    started_s = time.monotonic()
    runs: list[Recording] = []
    with progress_bar() as begin:
        if experiment is Experiment.REPLAY:
            runs = replayed.recordings(options, begin)
            rows, targets = replayed.rows_of(runs), list[Target]()
        else:
            rows, targets = EXPERIMENTS[experiment](options, begin)
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
        write(report, result, runs)
        console.print(f"written: {report}", markup=False, soft_wrap=True)
    return result


def write(path: Path, result: Result, runs: Sequence[Recording]) -> None:
    """`runs`: of an experiment whose runs are recorded request by request."""
    # These load matplotlib.
    from loadtest.report.page import write_page
    from loadtest.report.run_page import write_report
    from loadtest.report.sweep_page import sweep_page
    from loadtest.simulator.book import write_experiment

    if len(runs) == 1:
        write_report(runs[0], path)
    elif runs:
        digests = [digest_of(run, replayed.label_of(run)) for run in runs]
        write_page(sweep_page(digests), path)
    else:
        write_experiment(path, chapter_of(result))


def chapter_of(result: Result) -> BookChapter:
    from loadtest.simulator.book import BookChapter, svg_of

    experiment, rows = Experiment(result.name), list(map(dict, result.rows))
    return BookChapter(result, svg_of(lambda file: draw(experiment, file, rows), result.name))


def draw(experiment: Experiment, path: Path, rows: Rows) -> None:
    """Its picture, if it has one."""
    from loadtest.simulator.experiments import pictures  # loads matplotlib
    from loadtest.simulator.experiments.paper import pictures as of_papers

    if (save := {**pictures.SAVE, **of_papers.SAVE}.get(experiment.value)) is not None:
        save(path, rows)


def write_all(options: SimulationOptions, path: Path) -> None:
    """Each figure of the papers as a chapter; the page is there, and true, after each of them."""
    if options.is_any_worker:
        raise SimulationRefused("--all is about the paper's nodes: no --profile, no scale")
    from loadtest.simulator.book import write_book  # loads matplotlib

    chapters: list[BookChapter] = []
    for experiment in OF_PAPERS:
        chapters.append(chapter_of(answer(experiment, options)))
        write_book(path, chapters)
    console.print(f"written: {path}", markup=False, soft_wrap=True)
