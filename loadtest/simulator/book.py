"""All figures of the papers as one HTML page: paper, ours, and why they differ.

The page loads nothing and runs no script, as every report here. An experiment that could not be run
has a chapter that says why.

Not here: the experiments (experiments/paper), why they differ (experiments/paper/reasons.py).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness.result import Result
from loadtest.report.page import rendered
from loadtest.simulator.experiments import constants
from loadtest.simulator.experiments.paper.reasons import PAPER_SAYS, WHY_APART


@dataclass(frozen=True, slots=True)
class BookChapter:
    result: Result
    svg: str = ""

    @property
    def paper(self) -> str:
        return PAPER_SAYS.get(self.result.name, "")

    @property
    def why(self) -> str:
        return WHY_APART.get(self.result.name, "")


def write_book(path: Path, chapters: Sequence[BookChapter]) -> None:
    """OSError when `path` cannot be written."""
    page = rendered("book.html", chapters=chapters, constants=constants.stated())
    path.write_text(page, encoding="utf-8")


def svg_of(save: Callable[[Path], None]) -> str:
    """What `save` draws into a file, as it can stand in a page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        save(path)
        text = path.read_text(encoding="utf-8")
    return re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL)
