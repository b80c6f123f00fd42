"""A simulated experiment as an HTML page: its numbers, its picture and its targets.

The page loads nothing and runs no script, like every report of this package.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness.result import Cell, Result, rows_alike, shown
from loadtest.report.page import NOTHING, PageTable, ReportPage, Section, write_page
from loadtest.report.pictures.style import Picture, inline
from loadtest.results.tables import duration

ABOUT = (
    "The real conductor, directory, eviction and batching on a virtual clock; models only for the "
    "seconds of GPUs and networks. One set of constants for all of it."
)


@dataclass(frozen=True, slots=True)
class Chapter:
    result: Result
    svg: str = ""  # the picture; "": none
    paper: str = ""  # the paper's result; "": the experiment is not from a paper
    why: str = ""  # why our number differs from the paper's


def write_experiment(path: Path, chapter: Chapter) -> None:
    """One experiment as a page; OSError when `path` cannot be written."""
    result = chapter.result
    sections = [chapter_section(chapter)]
    if result.targets:
        sections.insert(0, targets_section([chapter]))
    page = ReportPage(
        f"Simulated: {result.name}",
        sections,
        lead=[ABOUT],
        settings=result.constants,
        settings_heading="What was assumed",
    )
    write_page(page, path)


def targets_section(chapters: Sequence[Chapter]) -> Section:
    columns = (
        "experiment",
        "the paper",
        "what is counted",
        "ours",
        "goal",
        "met",
        "why they differ",
    )
    rows = []
    for chapter in chapters:
        for number, target in enumerate(chapter.result.targets):
            first = (chapter.result.name, chapter.paper) if not number else ("", "")
            met = {True: "yes", False: "no", None: "not run"}[target.is_met]
            value = NOTHING if target.value is None else str(target.value)
            rows.append(
                (
                    *first,
                    target.name,
                    value,
                    f"{target.op} {target.goal}",
                    f"{met} {target.why}".rstrip(),
                    "" if number else chapter.why,
                )
            )
    table = PageTable(columns, rows, left=(0, 1, 2, 5, 6))
    return Section("Paper, ours, and why they differ", tables=[table])


def chapter_section(chapter: Chapter) -> Section:
    result = chapter.result
    took = duration(result.seconds)
    if result.shortened:
        took += f"; shortened: {result.shortened}"
    tables = [_rows(rows) for rows in rows_alike(result.rows)]
    pictures = [Picture(result.name, took, svg=chapter.svg)] if chapter.svg else []
    return Section(result.name, pictures, tables, [chapter.why or took])


def _rows(rows: Sequence[Mapping[str, Cell]]) -> PageTable:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    words = [n for n, name in enumerate(columns) if any(isinstance(r.get(name), str) for r in rows)]
    cells = [[shown(row.get(column)) for column in columns] for row in rows]
    return PageTable(columns, cells, left=words, is_dense=True)


def svg_of(save: Callable[[Path], None], alt: str) -> str:
    """The drawing of `save` as inline SVG; "" when it draws nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        save(path)
        if not path.exists():
            return ""
        return inline(path.read_text(encoding="utf-8"), alt)
