"""How a page of a report is made, whatever it shows: a run, two, many, a plan, an experiment.

One template for all. Nothing is loaded from anywhere and no script runs; the page itself forbids
it, because it shows messages and names that came from a server. What a page was made of stands
inside it (`embedded`), for `mooncake report`.

Not here: what is on a page (run_page.py, comparison.py), how a picture is drawn
(pictures/), how a page looks (templates/).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.report.pictures.style import Picture
from loadtest.results.numbers import setting_text
from loadtest.results.recording import Setting

# Control characters in a message: no browser shows them, and some make a page no HTML.
UNPRINTABLE = dict.fromkeys([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)])
NOTHING = "–"  # in a cell: there is no such number


@dataclass(frozen=True, slots=True)
class FoldedText:
    """A cell that opens with a click."""

    summary: str
    text: str


@dataclass(frozen=True, slots=True)
class PageTable:
    columns: Sequence[str]
    rows: Sequence[Sequence[str | FoldedText]]
    title: str = ""  # it then stands beside the pictures
    caption: str = ""
    left: Collection[int] = (0,)  # columns of words; all others are numbers
    marked: Collection[int] = ()  # rows that are to be seen first
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class ReportTile:
    """The first thing that is read; `values` are (number, what it counts)."""

    name: str
    values: Sequence[tuple[str, str]]
    sub: str = ""
    is_title: bool = False  # words rather than a number


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[PageTable] = ()
    text: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportPage:
    title: str
    sections: Sequence[Section] = ()
    subtitle: str = ""
    lead: Sequence[str] = ()
    command: str = ""  # to copy
    notes: Sequence[str] = ()  # what a reader must know before believing it
    tiles: Sequence[ReportTile] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    settings_heading: str = "Settings"
    footer: Sequence[tuple[str, str]] = ()  # (command, what it does)
    embedded: Sequence[tuple[str, str]] = ()  # (type, printable ASCII)


def rendered(page: ReportPage) -> str:
    """Everything but pictures is escaped."""
    environment = Environment(
        loader=PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"setting": setting_text, "svg": Markup}
    environment.tests["folded"] = lambda cell: isinstance(cell, FoldedText)
    return environment.get_template("page.html").render(page=page).translate(UNPRINTABLE)


def write_page(page: ReportPage, path: Path) -> None:
    """OSError when `path` cannot be written."""
    write_whole(path, rendered(page))


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: whoever reads the page meanwhile sees the one before."""
    if path.exists() and not path.is_file():  # a terminal or a pipe
        path.write_text(text, encoding="utf-8")
        return
    # Of the same folder, so that it can be renamed; a link stays one.
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
