"""The experiments on the papers' figures: what they count, and what they call met."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.paper import __main__ as command
from bench.paper import constants
from bench.paper.__main__ import run
from bench.paper.figures import (
    capacity,
    gpu_time,
    long_prefix,
    pd_ratio,
    poisson,
    reasons,
    replicas,
)
from bench.paper.figures.served import ServedRun, ServePlan, ours, serve, speeds
from conductor import ConductorConfig
from loadtest.simulator.cluster.gpu import MFU
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS
from tests.loadtest.simulator.fleets import OPEN, START, prompt, start_of_trace

SMALL = ClusterSettings(prefills=2, decodes=2)


def ran(system: str, speed: float, tbts_s: Sequence[float], **outcome: float) -> ServedRun:
    """A run of whose requests only the time between tokens matters."""
    times = np.array(tbts_s)
    at_once = np.where(np.isfinite(times), 0.0, np.inf)
    empty: SimulationOutcome = replace(outcome_of([]), offered=len(tbts_s), **outcome)  # type: ignore[arg-type]
    return ServedRun(system, speed, at_once, times, at_once, times, empty)


def test_a_request_without_an_answer_is_within_no_service_level() -> None:
    plan = ours("start", SMALL, 50.0, admission="baseline", advisory=False, ttft_slo_s=1.0)
    crowded = serve(start_of_trace()[:60], plan)
    assert 0 < crowded.outcome.finished < 60
    assert crowded.within(1e9, 1e9) == crowded.outcome.finished / 60


def test_what_does_not_count_by_default_is_shown_beside() -> None:
    run = serve(start_of_trace()[:60], ours("start", SMALL))
    assert constants.HANDOVER_IN_TTFT and constants.FIRST_INTERVAL_IN_TBT
    assert (run.ttfts_s >= run.ttfts_prefill_s).all()
    assert (run.tbts_s >= run.tbts_decode_s - 1e-9).all(), "but for rounding"
    for tbt_slo_s in (0.03, 0.05, 0.1):
        assert run.within(30.0, tbt_slo_s) <= run.within_at_best(30.0, tbt_slo_s)


def test_the_report_states_the_constants_that_were_used() -> None:
    assert constants.stated()["mfu"] == MFU
    assert constants.stated()["chunk_tokens"] == ClusterSettings().chunk_tokens
    assert constants.CHUNKED_SMALL.chunk_tokens == 512


def test_a_grid_of_speeds_has_both_ends() -> None:
    assert speeds(1.0, 1.2, 0.05) == [1.0, 1.05, 1.1, 1.15, 1.2]


def test_gpu_time_is_met_within_a_tenth_of_the_paper_s_ratio() -> None:
    def found(vllm_s: float) -> Mapping[str, Sequence[ServedRun]]:
        runs = [ran("ours", 1.0, [0.0], prefill_s=1.0, prefills=1)]
        runs += [
            ran(system, 1.0, [0.0], prefill_s=vllm_s, prefills=1)
            for system in gpu_time.PAPER["conversation"]
        ]
        return {"conversation": runs}

    vllm, cached, chunked, *synthetic = gpu_time.targets_of(found(1.7))
    assert vllm.is_met and not cached.is_met and not chunked.is_met
    assert [target.is_met for target in synthetic] == [None] * 3
    assert gpu_time.targets_of(found(1.2))[0].is_met is False, "too cheap is as wrong as too dear"


def tried(own: Mapping[float, Sequence[float]], theirs: Sequence[float]) -> Any:
    found = capacity.TraceCapacity("conversation")
    found.ours[7] = {speed: ran("ours", speed, tbts) for speed, tbts in own.items()}
    for baseline in capacity.BASELINES:
        found.theirs[baseline.name] = {s: ran(baseline.name, s, theirs) for s in (0.1, *own)}
    return found


def test_the_lowest_speed_at_which_every_goal_holds_is_compared_at() -> None:
    good, fair, bad = [0.05] * 100, [0.05] * 96 + [1.0] * 4, [0.05] * 94 + [1.0] * 6
    slow = [0.05] * 10 + [1.0] * 90
    assert tried({1.0: good, 1.5: fair, 2.0: bad}, slow).compared_at() == 1.0
    assert tried({1.0: bad, 1.5: fair}, slow).compared_at() == 1.5
    ungained = tried({1.0: good, 1.5: fair, 2.0: bad}, [0.05] * 50 + [1.0] * 50)
    assert ungained.compared_at() == 1.5, "the highest at which ours serves nearly all"
    assert ungained.gain(1.5, 0.1) == pytest.approx(0.96 / 0.5 - 1)


def test_a_speed_is_sustained_when_every_lower_one_is() -> None:
    good, bad = [0.05] * 10, [0.05] * 8 + [1.0] * 2
    found = tried({1.0: good, 1.1: bad, 1.2: good}, bad)
    assert found.sustained_of_ours(0.1) == 1.0
    assert capacity.sustained(found.theirs[capacity.SMALL], 0.1) == 0.0
    assert found.sustained_gain(0.1) == pytest.approx(1.0 / 0.1 - 1), "at most the slowest run"


def test_ours_is_in_the_split_that_is_best_for_each_reading() -> None:
    good, bad = [0.05] * 10, [0.05] * 8 + [0.15] * 2
    found = tried({1.35: good, 1.5: [5.0] * 10}, bad)
    found.ours[8] = {speed: ran("ours", speed, bad) for speed in (1.35, 1.5, 1.6)}
    assert (found.best_split(1.35), found.best_split(1.5)) == (7, 8)
    assert (found.sustained_of_ours(0.1), found.sustained_of_ours(0.2)) == (1.35, 1.6)


def test_a_split_is_judged_by_its_distance_from_the_best() -> None:
    shares = {5: 90, 7: 99, 8: 100, 9: 98}
    runs = [
        (prefills, ran("", 1.0, [0.05] * good + [1.0] * (100 - good)))
        for prefills, good in shares.items()
    ]
    assert [target.is_met for target in pd_ratio.targets_of(runs)] == [True, True, False, True]
    assert {target.value for target in pd_ratio.targets_of(runs, "shortened")} == {None}


def test_a_cached_prefix_saves_a_long_prompt_what_the_paper_says() -> None:
    length = long_prefix.LENGTHS[-1]
    found = [long_prefix.run(length, where, NO_OPTIONS) for where in long_prefix.WHERE]
    assert all(target.is_met for target in long_prefix.targets_of(found))
    own, other = found[1:]
    assert other.ttft_s > own.ttft_s and other.prefill_s == pytest.approx(own.prefill_s)


def test_copies_of_hot_blocks_are_those_that_the_directory_has() -> None:
    hot = [prompt(number, number * 0.01, [7, 100 + number]) for number in range(12)]
    ranked = replicas.hottest_first(hot)
    assert ranked[0] == hot[0].keys[0]
    config: ConductorConfig = replace(OPEN, policy="load_balance", replicate=False)
    fleet = replicas.WatchedFleet("load_balance", config, SMALL, ranked)
    fleet.run(hot)
    fleet.count()
    found = fleet.site.store.directory.lookup(ranked[:1], "test", 1.0, fleet.clock.now_s)
    assert fleet.counts[-1].of_rank[0] == len(found[0]) > 1


def test_a_baseline_is_named_as_the_paper_names_it() -> None:
    names = [serve([], ServePlan("start", one)).system for one in capacity.BASELINES]
    assert names == ["vllm", "vllm + prefix cache", "chunked 2048", "chunked 512"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = START.read_text().splitlines(keepends=True)[:24]
    for trace in ("conversation", "synthetic"):
        (tmp_path / f"{trace}_trace.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "rows", "given"),
    [
        ("gpu-time", 10, []),
        ("capacity", 10, ["--speed", "1"]),
        ("global-cache", 8, []),
        ("pd-ratio", 1, []),
        ("long-prefix", 15, []),
        ("bandwidth", 6, []),
        ("replicas", 2, ["--requests", "10"]),
        ("real", 26, []),
        ("datasets", 14, ["--requests", "2"]),
        ("cache-policies", 48, ["--requests", "20"]),
        ("ssd", 4, ["--blocks", "300"]),
        ("cpp", 3, ["--requests", "40"]),
    ],
)
def test_an_experiment_states_its_constants_and_what_was_left_out(
    experiment: str,
    rows: int,
    given: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poisson, "DOUBLINGS_MAX", 1)  # two requests are served at any rate
    asked = ["--experiment", experiment, "--traces", str(folder), "--json", "--kept", "none"]
    asked += given
    asked += ["--prefills", "2", "--decodes", "2", "--plot", str(folder / "picture.png")]
    with pytest.raises(SystemExit) as ended:
        run([*asked])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["rows"]) == rows
    assert said["constants"] == constants.stated() and said["shortened"]
    if experiment != "long-prefix":  # which reads no trace and has one prefill and one decode node
        assert all(target["value"] is None and target["why"] for target in said["targets"])
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_book_has_a_chapter_for_each_figure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapters = (command.PaperExperiment.BANDWIDTH, command.PaperExperiment.REAL)
    assert set(chapters) < set(command.OF_PAPERS)
    assert {experiment.value for experiment in command.OF_PAPERS} == set(reasons.PAPER_SAYS)
    monkeypatch.setattr(command, "OF_PAPERS", chapters)
    asked = ["--all", "--traces", str(folder), "--book", str(folder / "book.html")]
    asked += ["--kept", "none"]
    with pytest.raises(SystemExit) as ended:
        run([*asked, "--requests", "8", "--prefills", "2", "--decodes", "2"])
    assert ended.value.code == 0
    page = (folder / "book.html").read_text()
    assert "per_sequence_s" in page and "only the first 8 requests" in page
    assert page.count("<svg") == 2 and "<script" not in page
    assert page.count("<h2>") == 2 + len(chapters) and "FAST&#39;25, Figure 13" in page


def test_without_an_experiment_the_command_says_what_to_ask(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--traces", str(folder)])
    assert ended.value.code == 2 and "--experiment NAME, or --all" in capsys.readouterr().err
