"""`python -m bench.paper` on simulated clusters: a JSON line, a picture, and reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.paper.__main__ import run
from tests.loadtest.simulator.fleets import START


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = START.read_text().splitlines(keepends=True)[:40]
    (tmp_path / "conversation_trace.jsonl").write_text("".join(lines))
    return tmp_path


def simulated(
    folder: Path, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[dict[str, Any], bytes]:
    picture = folder / "picture.png"
    asked = ["--traces", str(folder), "--prefills", "2", "--decodes", "2", "--json", *given]
    with pytest.raises(SystemExit) as ended:
        run([*asked, "--plot", str(picture)])
    assert ended.value.code == 0
    drawn = picture.read_bytes() if picture.exists() else b""
    return json.loads(capsys.readouterr().out), drawn


@pytest.mark.slow
def test_scheduling_says_the_paper_s_numbers_beside_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, drawn = simulated(folder, capsys, "--experiment", "scheduling", "--speed", "1")
    rows = {row["policy"]: row for row in said["rows"]}
    assert [row["finished"] for row in said["rows"]] == [40] * 5
    assert rows["kvcache_centric"]["paper_ttft_s"] == 3.07 and rows["adaptive"]["queue"] != "fifo"
    assert all(target["value"] is None and target["why"] for target in said["targets"])
    assert drawn.startswith(b"\x89PNG")


def test_a_parameter_of_the_conductor_is_changed_for_every_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--experiment", "scheduling", "--speed", "1", "--policy", "adaptive"]
    said, _ = simulated(folder, capsys, *asked, "--set", "queue_order=fifo")
    assert [row["queue"] for row in said["rows"]] == ["fifo"]
    assert "--set queue_order=fifo" in said["targets"][0]["why"]


@pytest.mark.slow
def test_rejection_stops_at_the_speed_that_was_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, drawn = simulated(folder, capsys, "--experiment", "rejection", "--speed", "2")
    assert [row["admission"] for row in said["rows"]] == [
        "baseline",
        "early",
        "predictive",
        "predictive_lengths",
    ]
    assert all(row["finished"] + row["rejected"] == 40 for row in said["rows"])
    assert said["rows"][0]["paper_rejected"] == 4_183
    assert drawn.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["scheduling", "--policy", "fastest"], "no policy fastest; there are random"),
        (["rejection", "--admission", "all"], "no admission all"),
        (["rejection", "--trace", "a", "--trace", "b"], "one --trace at a time"),
        (["scheduling", "--set", "queue_stretch"], "write NAME=VALUE"),
        (["scheduling", "--set", "order=3"], "write NAME=VALUE"),
        (["scheduling", "--set", "queue_stretch=fast"], "'fast' is no float"),
        (["scheduling", "--set", "queue_order=lifo"], "queue_order is 'lifo'; use one of"),
        (["scheduling", "--set", "overtaker_share=2"], "expected_arrivals_share is 2.0; it is"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(
    given: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--traces", str(folder), "--experiment", *given])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
