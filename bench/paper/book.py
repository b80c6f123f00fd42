"""All figures of the papers as one HTML page: paper, ours, and why they differ.

An experiment that could not be run has a chapter with the reason. Not here: the experiments
(figures/), why they differ (figures/reasons.py), the look of a chapter
(loadtest/simulator/experiment_page.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.paper import constants
from loadtest.report.page import ReportPage, write_page
from loadtest.simulator.experiment_page import ABOUT, Chapter, chapter_section, targets_section


def write_book(path: Path, chapters: Sequence[Chapter]) -> None:
    """OSError when `path` cannot be written."""
    write_page(
        ReportPage(
            "The papers' figures, simulated",
            [targets_section(chapters), *map(chapter_section, chapters)],
            lead=[ABOUT],
            settings=constants.stated(),
            settings_heading="Constants of every experiment",
        ),
        path,
    )
