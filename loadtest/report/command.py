"""`mooncake report`: one run in numbers, two compared, or the trade-off between many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from backends.extras import require
from loadtest.report import sweep
from loadtest.report.timeline import decode_workers, prefill_workers
from loadtest.results import tables
from loadtest.results.digest import RunDigest, digest_of, read_runs
from loadtest.results.lengths import by_length
from loadtest.results.metrics import Slo
from loadtest.results.numbers import (
    Compared,
    compare,
    differing,
    numbers,
    setting_text,
    settings_of,
    shown,
    summary_of,
)
from loadtest.results.recording import Recording, RecordingError, goodput_of

PROBLEMS_MAX = 5
COLUMNS = (  # of the table of many runs
    ("sent/s", "offered_per_s", "per_s"), ("goodput", "goodput_share", "share"),
    ("goodput/s", "goodput_per_s", "per_s"), ("TTFT p90", "ttft_p90_s", "s"),
    ("TBT p90", "tbt_p90_s", "s"), ("rejected", "rejected_share", "share"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportOptions:
    out: Path | None = None
    as_json: bool = False
    by: tuple[str, ...] = ()
    slo: Slo | None = None  # replaces each run's own service level
    share: float = sweep.SHARE_LEAST


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Pages of runs: of `mooncake replay`, Locust, `mooncake simulate`, `mooncake "
            "plan`, in any mix. One: its numbers. Two: B - A and B / A. More, or a page of many: "
            "the trade-off between them.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page: the run's page redrawn, the comparison, the sweep."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Of many: draw goodput against this setting or number of the runs too; repeatable."
        ),
    ] = None,
    slo_ttft_s: Annotated[
        float | None,
        typer.Option(min=0.0, help="Judge all runs by this TTFT instead of their own limits."),
    ] = None,
    slo_tbt_s: Annotated[
        float | None,
        typer.Option(min=0.0, help="Judge all runs by this TBT instead of their own limits."),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Of many: the best has the most goodput of the runs that serve "
            "this share within the limits.",
        ),
    ] = sweep.SHARE_LEAST,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as one JSON line, last.")
    ] = False,
) -> None:
    """Print the numbers of a run's report; compare two; or lay many side by side, with --out as a
    page that draws goodput against load and cost, and TTFT against throughput."""
    has_level = slo_ttft_s is not None or slo_tbt_s is not None
    slo = Slo(slo_ttft_s, slo_tbt_s) if has_level else None
    raise typer.Exit(carry_out(files, ReportOptions(out, as_json, tuple(by or ()), slo, share)))


def carry_out(files: Sequence[Path], options: ReportOptions) -> int:
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    out = options.out
    if out is not None:
        require("report", "`mooncake report --out`")
    if out is not None and len(files) > 1:
        kept = [file for file in files if file.resolve() != out.resolve()]
        if len(kept) < len(files):
            errors.print(f"{out} is the output: it is not read", markup=False, soft_wrap=True)
        if not kept:
            errors.print(
                "cannot report: nothing is left to read; give another file to --out, or name "
                f"{out} once to redraw it",
                style="bold red",
                markup=False,
                soft_wrap=True,
            )
            return 1
        files = kept
    try:
        found = read_all(files, options.slo)
        line = _report(files, found, options, console)
        if out is not None:
            console.print(Text(f"page: {out}"), soft_wrap=True)
    except (RecordingError, OSError) as error:
        why = f"{out}: {error.strerror}" if isinstance(error, OSError) else error
        errors.print(f"cannot report: {why}", style="bold red", markup=False, soft_wrap=True)
        return 1
    if options.as_json:
        print(json.dumps(line))
    return 0


def read_all(files: Sequence[Path], slo: Slo | None) -> list[Recording | list[RunDigest]]:
    """Each page's content, of more than two runs digests. RecordingError has every mistake."""
    problems: list[str] = []
    found: list[Recording | list[RunDigest]] = []
    for file, label in zip(files, labels_of(files), strict=True):
        try:
            if file.is_dir():
                raise RecordingError(f"{file}: a folder: name its pages, {file}/*.html")
            run = judged(read_runs(file), slo, file)
        except RecordingError as problem:
            problems.append(str(problem))
            continue
        is_kept = isinstance(run, Recording) and len(files) < 3
        found.append(run if is_kept else digested(run, label, is_alone=len(files) == 1))
    if problems:
        more = len(problems) - PROBLEMS_MAX
        text = "; ".join(problems[:PROBLEMS_MAX])
        raise RecordingError(f"{text}; and {more} more files" if more > 0 else text)
    return found


def labels_of(files: Sequence[Path]) -> list[str]:
    """The name of each file, with its folder where another has the same name."""
    count = Counter(file.stem for file in files)
    return [
        file.stem if count[file.stem] == 1 else f"{file.resolve().parent.name}/{file.stem}"
        for file in files
    ]


def judged(
    run: Recording | list[RunDigest], slo: Slo | None, file: Path
) -> Recording | list[RunDigest]:
    """The run judged by these limits instead of its own."""
    if slo is None:
        return run
    if isinstance(run, Recording):
        run.slo, run.slo_by_workload = slo, {}
    elif any(digest.slo != slo for digest in run):
        own = ", ".join(sorted({_level(digest) for digest in run}))
        raise RecordingError(
            f"{file}: holds only the numbers of its runs, judged by {own}: name the pages of the "
            "runs themselves, or give those limits"
        )
    return run


def _level(digest: RunDigest) -> str:
    return tables.slo_text(digest.slo) if digest.slo else "no limits"


def digested(
    run: Recording | list[RunDigest], label: str, is_alone: bool = False
) -> list[RunDigest]:
    """The digest with its file's name, and with the size of the fleet if it is known."""
    if isinstance(run, Recording):
        workers = len(prefill_workers(run.samples) | decode_workers(run.samples))
        if workers:
            run.settings = {"workers": workers, **run.settings}
        return [digest_of(run, label)]
    if is_alone:
        return run
    return [msgspec.structs.replace(one, label=f"{label}: {one.label}") for one in run]


def _report(
    files: Sequence[Path],
    found: Sequence[Recording | list[RunDigest]],
    options: ReportOptions,
    console: Console,
) -> dict[str, object]:
    """Print the report, write its page if asked for, and print its JSON."""
    whole = [run for run in found if isinstance(run, Recording)]
    if len(whole) == len(found) and not options.by:
        console.print(_one(whole[0]) if len(whole) == 1 else _two(files, whole))
        if options.out is not None:
            _write(files, whole, options.out)
        return json_line(files, whole)
    runs: list[RunDigest] = []
    for label, run in zip(labels_of(files), found, strict=True):
        runs += digested(run, label) if isinstance(run, Recording) else run
    unknown = [name for name in options.by if all(sweep.value_of(r, name) is None for r in runs)]
    if unknown:
        known = [
            name for name in sweep.different(runs) if sweep.value_of(runs[0], name) is not None
        ]
        raise RecordingError(
            f"--by {unknown[0]}: no run has such a number; settings that differ: "
            f"{', '.join(known) or 'none'}; numbers: those of --json"
        )
    console.print(_many(runs, options.share))
    if options.out is not None:
        # Imported here because it loads matplotlib, which printing does not need.
        from loadtest.report.page import write_page
        from loadtest.report.sweep_page import sweep_page

        write_page(sweep_page(runs, options.by, options.share), options.out)
    return {
        "name": "sweep",
        "best": sweep.best_of(runs, options.share),
        "pareto": sorted(sweep.pareto_runs(runs)),
        "different": list(sweep.different(runs)),
        "runs": [msgspec.to_builtins(run) for run in runs],
    }


def json_line(files: Sequence[Path], runs: Sequence[Recording]) -> dict[str, object]:
    found: list[dict[str, object]] = [
        {
            "file": str(file),
            "title": run.title,
            "started_at": run.started_at,
            "settings": settings_of(run),
            "numbers": {number.name: number.value for number in numbers(run)},
            "lengths": msgspec.to_builtins(by_length(run)),
        }
        for file, run in zip(files, runs, strict=True)
    ]
    if len(runs) == 1:
        return {"name": "report", **found[0]}
    compared = compare(*runs)
    return {
        "name": "comparison",
        "a": found[0],
        "b": found[1],
        "difference": {row.name: row.difference for row in compared},
        "ratio": {row.name: row.ratio for row in compared},
    }


def _write(files: Sequence[Path], runs: Sequence[Recording], out: Path) -> None:
    # Imported here because they load matplotlib, which printing does not need.
    from loadtest.report.comparison import comparison_page
    from loadtest.report.page import write_page
    from loadtest.report.run_page import write_report

    if len(runs) == 1:
        write_report(runs[0], out)
    else:
        write_page(comparison_page(runs[0], runs[1], (files[0], files[1])), out)


def _one(run: Recording) -> Group:
    parts = [Text(run.title, style="bold"), tables.summary_tables(summary_of(run))]
    if (found := goodput_of(run)) is not None:
        parts.append(Text(tables.goodput_line(found, run.slo)))
    return Group(*parts)


def _many(runs: Sequence[RunDigest], share: float) -> Group:
    best, unbeaten = sweep.best_of(runs, share), sweep.pareto_runs(runs)
    table = Table(title=f"{len(runs)} runs", box=None, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("run", overflow="fold", min_width=12)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for number, run in enumerate(runs, 1):
        values = [
            shown(value, unit) if (value := sweep.value_of(run, name)) is not None else "-"
            for _, name, unit in COLUMNS
        ]
        mark = "best" if number == best else "Pareto" if number in unbeaten else ""
        style = "bold" if number == best else ""
        table.add_row(*map(Text, (str(number), run.label, *values, mark)), style=style)
    lines = [Text(f"settings that differ: {', '.join(sweep.different(runs)) or 'none'}")]
    lines.append(Text(sweep.best_text(runs, share)))
    lines += [Text(text, style="bold yellow") for text in sweep.warnings_of(runs)]
    return Group(table, *lines)


def _two(files: Sequence[Path], runs: Sequence[Recording]) -> Group:
    parts: list[Text | Table] = [
        Text(f"{name}: {file.name}: {run.title}")
        for name, file, run in zip("AB", files, runs, strict=True)
    ]
    different = differing(*map(settings_of, runs))
    if different:
        table = Table("setting", "A", "B", title="settings that differ")
        for name, of_a, of_b in different:
            table.add_row(*(Text(cell) for cell in (name, setting_text(of_a), setting_text(of_b))))
        parts.append(table)
    return Group(*parts, _table(compare(*runs)))


def _table(compared: Sequence[Compared]) -> Table:
    table = Table()
    table.add_column("")
    for heading in ("A", "B", "B - A", "B / A"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("better is")
    for row in compared:
        cells = (row.label, *row.texts, row.better or "-")
        table.add_row(*(Text(cell) for cell in cells))
    return table
