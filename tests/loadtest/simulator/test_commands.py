"""`mooncake simulate` refuses mistakes with a reason, moved experiments with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.cli import main
from bench.paper.__main__ import PaperExperiment
from loadtest.simulator.command import MOVED
from tests.loadtest.simulator.fleets import START


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--experiment", "hit-rate", "--set", "queue_stretch=3"], "no conductor decides"),
        (["--experiment", "replay", "--set", "queue_order=lifo"], "queue_order is 'lifo'; use"),
        (["--experiment", "hit-rate", "--length-scale", "0.5"], "not in hit-rate, only in replay"),
        ([], "no --experiment: give --experiment hit-rate or replay"),
        (["--experiment", "hitrate"], "--experiment hitrate: give --experiment hit-rate or"),
    ],
)
def test_a_mistake_is_refused_with_a_reason(
    given: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = START.read_text().splitlines(keepends=True)[:40]
    (tmp_path / "conversation_trace.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--traces", str(tmp_path), *given])
    assert ended.value.code == 2
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("asked", [["--all"], ["--experiment", "scheduling"]])
def test_an_experiment_that_moved_is_refused_with_its_new_command(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *asked])
    assert ended.value.code == 2
    assert f"python -m bench.paper {' '.join(asked)}" in " ".join(capsys.readouterr().err.split())


def test_each_experiment_of_bench_is_known_as_moved() -> None:
    assert set(MOVED) == {"all", *(experiment.value for experiment in PaperExperiment)}
