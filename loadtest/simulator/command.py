"""`mooncake simulate`: a trace without a server, its hit rate or its replay on a chosen fleet.

mooncake simulate --experiment hit-rate --traces FOLDER [--json] [--plot hit-rate.png]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from backends.extras import require
from loadtest.harness.result import Result, Target
from loadtest.replay.trace import TraceError
from loadtest.results.digest import digest_of
from loadtest.results.recording import Recording
from loadtest.simulator import constants, hit_rate, replayed
from loadtest.simulator.options import (
    SUFFIXES,
    WHERE,
    SimulationOptions,
    SimulationRefused,
    console,
    progress_bar,
    reasons_shown,
)


class Experiment(str, Enum):
    HIT_RATE = "hit-rate"
    REPLAY = "replay"


MOVED = (
    "all", "scheduling", "limits", "rejection", "dynamo-replay", "frontends", "roles", "gpu-time",
    "capacity", "global-cache", "pd-ratio", "long-prefix", "bandwidth", "replicas",
    "simulated-long", "datasets", "real", "cache-policies", "ssd", "cpp", "scale", "crowd",
)  # fmt: skip

ABOUT = """What to find out.

replay: what `mooncake replay` would have met, request by request; with --report on the page that a
real replay has. Several --speed, --policy or --admission: a page that lays the runs side by side.

hit-rate: which part of the block references of each trace is found by one cache of 1,000 to 100,000
blocks of 512 tokens and by an unlimited one, with each policy of eviction, and what the best policy
would find that knows the future. Order of requests only, no clock.
"""

Which = Annotated[str, typer.Option(help=ABOUT, metavar="hit-rate|replay")]
Folder = Annotated[
    Path | None,
    typer.Option(envvar="MOONCAKE_TRACES", help=f"Folder with NAME_trace.jsonl ({WHERE})."),
]
Traces = Annotated[
    list[str] | None, typer.Option(help="Only this trace, e.g. conversation; repeatable.")
]
Speeds = Annotated[
    list[float] | None, typer.Option(min=0.01, help="Factor of the recorded speed; repeatable.")
]
Requests = Annotated[int | None, typer.Option(min=1, help="Number of the trace's first requests.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, other jitter.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help=f"Draw it: a {', '.join(SUFFIXES)} file.")
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
Prefills = Annotated[int | None, typer.Option(min=1, help="Prefill nodes; default 8.")]
Decodes = Annotated[int | None, typer.Option(min=1, help="Decode nodes; default 8.")]
Blocks = Annotated[
    list[int] | None, typer.Option(min=1, help="Only this size of a cache, in blocks; repeatable.")
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
        "paper's nodes; not in hit-rate.",
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


def simulate(
    experiment: Which = "",
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
    directory: Annotated[
        bool,
        typer.Option("--directory", help="hit-rate: through the whole Directory; same, slower."),
    ] = False,
    changes: Changes = None,
    profile: Measured = None,
    length_scale: LengthScale = 1.0,
    jobs: Jobs = 1,
    kept: Kept = ".mooncake/simulations",
    report: Annotated[
        Path | None,
        typer.Option(help="Write it as one HTML page, which of replay is also the runs' file."),
    ] = None,
    picture: Plot = None,
    is_all: Annotated[bool, typer.Option("--all", hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON only.")] = False,
) -> None:
    """Run an experiment on recorded requests; no server is needed."""
    if picture is not None or report is not None:
        drawing = "--plot" if picture is not None else "--report"
        require("report", f"`mooncake simulate {drawing}`")
    with reasons_shown("simulate", SimulationRefused, TraceError, OSError):
        if is_all:
            raise moved("all")
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
            is_directory=directory,
            picture=picture,
            changes=changes,
            jobs=jobs,
            kept=kept,
            profile=profile,
            length_scale=length_scale,
        )
        result = answer(chosen(experiment, options), options, report)
    if as_json:
        print(result.to_json())
    else:
        result.print()


def chosen(name: str, options: SimulationOptions) -> Experiment:
    """SimulationRefused for none, for one that moved, and for one that --profile cannot change."""
    if name in MOVED:
        raise moved(name)
    names = [experiment.value for experiment in Experiment]
    if name not in names:
        asked = f"--experiment {name}" if name else "no --experiment"
        raise SimulationRefused(f"{asked}: give --experiment {' or '.join(names)}")
    experiment = Experiment(name)
    if options.is_any_worker and experiment is Experiment.HIT_RATE:
        raise SimulationRefused("--profile and --length-scale: not in hit-rate, only in replay")
    return experiment


def moved(name: str) -> SimulationRefused:
    option = "--all" if name == "all" else f"--experiment {name}"
    return SimulationRefused(
        f"{option} has moved: `python -m bench.paper {option}`, in a clone of the repository"
    )


def answer(
    experiment: Experiment, options: SimulationOptions, report: Path | None = None
) -> Result:
    started_s = time.monotonic()
    runs: list[Recording] = []
    with progress_bar() as begin:
        if experiment is Experiment.REPLAY:
            runs = replayed.recordings(options, begin)
            rows, targets = replayed.rows_of(runs), list[Target]()
        else:
            rows, targets = hit_rate.answer(options, begin)
    if options.picture is not None and experiment is Experiment.HIT_RATE:
        from loadtest.simulator.pictures import save_hit_rate  # loads matplotlib

        save_hit_rate(options.picture, rows)
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
    from loadtest.simulator.experiment_page import Chapter, svg_of, write_experiment
    from loadtest.simulator.pictures import save_hit_rate

    if len(runs) == 1:
        write_report(runs[0], path)
    elif runs:
        digests = [digest_of(run, replayed.label_of(run)) for run in runs]
        write_page(sweep_page(digests), path)
    else:
        rows = list(map(dict, result.rows))
        picture = svg_of(lambda file: save_hit_rate(file, rows), result.name)
        write_experiment(path, Chapter(result, picture))
