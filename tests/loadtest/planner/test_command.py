"""`mooncake plan` from a trace to a page and a model repository, and why it refuses."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from backends.cli import GROUP, command_of
from loadtest.results.digest import read_runs
from loadtest.results.metrics import Slo, goodput
from loadtest.results.recording import Recording
from tests.loadtest.report.pages import ParsedPage
from tests.loadtest.simulator.fleets import START

REQUESTS = 60


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[Any, int, str]:
    """What it printed as JSON, its exit status, and what it said beside."""
    command = command_of(EntryPoint("plan", "loadtest.planner.command:plan", GROUP))
    given = {
        "--trace": str(START),
        "--hardware": "A800",
        "--model": "Llama-3-70B",
        "--slo-ttft": "10",
        "--slo-tbt": "0.1",
        "--requests": str(REQUESTS),
        "--out": str(folder / "plan"),
        "--kept": str(folder / "kept"),
    } | dict(zip(more[::2], more[1::2], strict=True))
    arguments = [part for name, value in given.items() if value for part in (name, value)]
    with pytest.raises(SystemExit) as ended:
        command([*arguments, "--json"])
    said = capsys.readouterr()
    code = ended.value.code or 0
    assert isinstance(code, int)
    return json.loads(said.out) if said.out else None, code, said.err


@pytest.mark.slow
def test_a_plan_has_the_common_shape_a_page_and_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, code, words = planned(tmp_path, capsys)
    assert code == 0 and said["name"] == "plan"
    (chosen,) = [row for row in said["rows"] if row["is_chosen"]]
    assert chosen["within_percent"] >= 90 and said["targets"][0]["value"] >= 0.9
    smaller = [row for row in said["rows"] if row["nodes"] < chosen["nodes"]]
    assert smaller and all(row["within_percent"] < 90 for row in smaller)
    assert {row["stage"] for row in said["rows"]} >= {"grid", "cache", "conductor"}
    workers = {path.name for path in (tmp_path / "plan" / "model_repository").iterdir()}
    assert (
        f"decode_{chosen['decodes'] - 1}" in workers
        and f"prefill_{chosen['prefills'] - 1}" in workers
    )
    html = (tmp_path / "plan" / "plan.html").read_text()
    page, runs = ParsedPage(html), read_runs(tmp_path / "plan" / "plan.html")
    assert isinstance(runs, list) and len(runs) == len(said["rows"])
    assert page.scripts == ["application/x-mooncake-runs"] and "Goodput against nodes" in page.words
    assert "Llama-3-70B" in page.words and page.drawn > 100
    for row, run in zip(said["rows"], runs, strict=True):
        assert run.numbers.get("goodput_share") == pytest.approx(
            row["within_percent"] / 100, abs=1e-4
        )
        assert run.numbers.get("ttft_p90_s") == pytest.approx(row["ttft_p90_s"], abs=1e-4)
    number = said["rows"].index(chosen) + 1
    assert page.row(str(number))[2] == "best" and f"Chosen: run {number}." in page.words
    whole = read_runs(tmp_path / "plan" / "chosen.html")
    assert isinstance(whole, Recording) and len(whole.requests) == REQUESTS
    good = goodput(whole.requests, Slo(10.0, 0.1)).share
    assert good == pytest.approx(chosen["within_percent"] / 100, abs=1e-4)
    assert "mooncake serve --model-repository" in words
    kept = len(list((tmp_path / "kept").iterdir()))
    again, _, _ = planned(tmp_path, capsys)
    assert again["rows"] == said["rows"] and len(list((tmp_path / "kept").iterdir())) == kept


@pytest.mark.slow
def test_with_a_number_of_nodes_the_best_split_of_them_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, code, _ = planned(tmp_path, capsys, "--nodes", "4", "--hardware", "H100")
    assert code == 0 and {row["nodes"] for row in said["rows"]} == {4}
    (chosen,) = [row for row in said["rows"] if row["is_chosen"]]
    splits = [row["goodput_per_s"] for row in said["rows"] if row["stage"] in ("grid", "refine")]
    assert len(splits) == 3 and chosen["goodput_per_s"] >= 0.99 * max(splits)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--model", "Llama-3-405B"), "no model 'Llama-3-405B'; there are"),
        (("--hardware", ""), "give the worker: --hardware"),
        (("--gpus", "1"), "does not fit"),
        (("--slo-ttft", "0.2"), "is below the unloaded time: alone on"),
        (("--slo-tbt", "0.01"), "is below the unloaded time: a decode step"),
        (("--trace", "nowhere.jsonl"), "no such file"),
        (("--out", str(START)), "File exists"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(
    more: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, code, words = planned(tmp_path, capsys, *more)
    assert (said, code) == (None, 2) and reason in words, words


def test_a_line_that_makes_no_sense_is_refused_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0, "input_length": 10}\n')
    _, code, words = planned(tmp_path, capsys, "--trace", str(broken))
    assert code == 2 and "broken.jsonl:1: output_length" in words
