"""Experiments as pages: every target, row and reason is there, and nothing but text is text."""

from __future__ import annotations

from pathlib import Path

from bench.paper.__main__ import write_book
from loadtest.harness.result import Result, Target
from loadtest.simulator.experiment_page import Chapter, svg_of, write_experiment
from tests.loadtest.report.pages import ParsedPage

RESULT = Result(
    "capacity",
    12.0,
    [{"policy": "<b>", "ttft_s": 1.23456, "met": None}, {"other": 7}],
    [Target("share <i>", 0.5, ">=", 0.4), Target("never run", None, "<=", 1.0, "no trace")],
    constants={"mfu": 0.5},
    shortened="only 3 requests",
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0" style="stroke: #0072b2"/></svg>'


def drawn() -> str:
    return svg_of(lambda path: path.write_text(SVG) and None, "what is to be seen")


def test_an_experiment_is_a_page_with_its_targets_rows_and_picture(tmp_path: Path) -> None:
    write_experiment(tmp_path / "page.html", Chapter(RESULT, drawn()))
    html = (tmp_path / "page.html").read_text()
    page = ParsedPage(html)
    assert page.alts == ["what is to be seen"] and "var(--blue)" in html
    assert page.rows[1][2:6] == ["share <i>", "0.5", ">= 0.4", "yes"]
    assert page.rows[2][2:6] == ["never run", "–", "<= 1.0", "not run no trace"]
    assert ["policy", "ttft_s", "met"] in page.rows and ["<b>", "1.235", "-"] in page.rows
    assert ["other"] in page.rows and ["7"] in page.rows  # rows of another shape: another table
    assert "shortened: only 3 requests" in page.words and "<b>" in page.words


def test_the_book_has_a_chapter_for_each_experiment_also_without_a_picture(tmp_path: Path) -> None:
    bare = Chapter(Result("datasets", 1.0, [], []), svg_of(lambda path: None, "nothing"))
    write_book(tmp_path / "book.html", [Chapter(RESULT, drawn()), bare])
    page = ParsedPage((tmp_path / "book.html").read_text())
    assert len(page.alts) == 1 and "datasets" in page.words and "capacity" in page.words
