"""`mooncake report`: the numbers of one run, or of two beside each other, from their pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from backends.extras import require
from loadtest.results import tables
from loadtest.results.numbers import (
    Compared,
    compare,
    differing,
    numbers,
    setting_text,
    settings_of,
    summary_of,
)
from loadtest.results.recording import Recording, RecordingError, goodput_of, read_report


def report(
    a: Annotated[Path, typer.Argument(metavar="A", help="Report of a run.")],
    b: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="Report of another, to compare with A.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page: the comparison, or the run's page drawn anew."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as one JSON line, last.")
    ] = False,
) -> None:
    """Print what a run's report holds, or compare two: B - A and B / A of every number.

    A report is the HTML page that `mooncake replay --report` and the Locust users write.
    """
    raise typer.Exit(carry_out([file for file in (a, b) if file is not None], out, as_json))


def carry_out(files: Sequence[Path], out: Path | None, as_json: bool) -> int:
    """The whole command; returns its exit status."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if out is not None:
        require("report", "`mooncake report --out`")
    try:
        runs = [read_report(file) for file in files]
        console.print(_one(runs[0]) if len(runs) == 1 else _two(files, runs))
        if out is not None:
            _write(files, runs, out)
            console.print(Text(f"page: {out}"), soft_wrap=True)
    except (RecordingError, OSError) as error:
        why = f"{out}: {error.strerror}" if isinstance(error, OSError) else error
        errors.print(f"cannot report: {why}", style="bold red", markup=False, soft_wrap=True)
        return 1
    if as_json:
        print(json.dumps(json_line(files, runs)))
    return 0


def json_line(files: Sequence[Path], runs: Sequence[Recording]) -> dict[str, object]:
    found: list[dict[str, object]] = [
        {
            "file": str(file), "title": run.title, "started_at": run.started_at,
            "settings": settings_of(run),
            "numbers": {number.name: number.value for number in numbers(run)},
        }
        for file, run in zip(files, runs, strict=True)
    ]  # fmt: skip
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
    # Here, because both draw: printing numbers does not wait for matplotlib.
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
