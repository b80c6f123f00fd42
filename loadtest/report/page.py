"""How a page of a report is made: of a run, two, many, a plan or an experiment.

One template serves all. The page loads nothing and runs no script. Its policy forbids both, because
it shows messages and names that came from a server. The page embeds its data (`embedded`), for
`mooncake report`.

Not here: the content of a page (run_page.py, comparison.py), drawing a picture (pictures/), the
look of a page (templates/).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.report.pictures.style import Picture
from loadtest.results.numbers import setting_text
from loadtest.results.recording import Setting

# Control characters: no browser shows them, and some are invalid in HTML.
UNPRINTABLE = dict.fromkeys([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)])
NOTHING = "–"  # a cell without a number


@dataclass(frozen=True, slots=True)
class FoldedText:
    """A cell that a click opens."""

    summary: str
    text: str


@dataclass(frozen=True, slots=True)
class PageTable:
    columns: Sequence[str]
    rows: Sequence[Sequence[str | FoldedText]]
    title: str = ""  # with a title, the table is beside the pictures
    caption: str = ""
    left: Collection[int] = (0,)  # left-aligned columns of words; all others are numbers
    marked: Collection[int] = ()  # highlighted rows
    is_dense: bool = False

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str | FoldedText]], **look: Any) -> PageTable:
        """`rows`: at least one, each with its cells by column."""
        return cls(tuple(rows[0]), [tuple(row.values()) for row in rows], **look)


@dataclass(frozen=True, slots=True)
class ReportTile:
    """A large number at the top; `values` are (number, what it counts)."""

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
    command: str = ""  # to copy; "": none
    notes: Sequence[str] = ()  # conditions that make the numbers unreliable
    tiles: Sequence[ReportTile] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    settings_heading: str = "Settings"
    footer: Sequence[tuple[str, str]] = ()  # (command, description)
    embedded: Sequence[tuple[str, str]] = ()  # (media type, printable ASCII)


def rendered(page: ReportPage) -> str:
    """The HTML text; everything but pictures is escaped."""
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
    """Replace the file atomically; OSError when `path` cannot be written."""
    text = rendered(page)
    if path.exists() and not path.is_file():  # a terminal or a pipe
        path.write_text(text, encoding="utf-8")
        return
    # The temporary file is in the same folder, so that it can be renamed; a link stays a link.
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
