"""A simulated run has the record of a real one: same numbers as its jobs, same page."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from backends.cli import GROUP, command_of
from conductor import ConductorConfig
from loadtest.results.digest import read_runs
from loadtest.results.lengths import by_length
from loadtest.results.metrics import COMPLETED, REJECTED, Slo, compact, goodput, summarize
from loadtest.results.phases import measured
from loadtest.results.recording import Recording, from_bytes, to_bytes
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.outcome import within
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.recorded_run import FleetSampler, recording_of
from tests.loadtest.report.pages import ParsedPage
from tests.loadtest.report.runs import answered
from tests.loadtest.simulator.fleets import START, start_of_trace

REQUESTS, SPEED = 120, 6.0
LEVEL = Slo(5.0, 0.1)


@pytest.fixture(scope="module")
def simulated() -> tuple[SimulatedFleet, Recording]:
    settings = ClusterSettings(prefills=2, decodes=2)
    config = ConductorConfig(ttft_slo_s=5.0, tbt_slo_s=0.09, admission="predictive_lengths")
    fleet = SimulatedFleet(config, settings, settings.gpu())
    offered = start_of_trace()[:REQUESTS]
    sampler = FleetSampler(offered[-1].at_s / SPEED)
    fleet.reported = sampler.look
    jobs = fleet.run(offered, SPEED)
    return fleet, recording_of(jobs, "simulate", "a run", {"speed": SPEED}, LEVEL, sampler.samples)


def test_every_job_is_one_record_and_the_counts_are_those_of_the_jobs(simulated) -> None:
    fleet, run = simulated
    done = [job for job in fleet.jobs if job.finished_s is not None]
    summary = summarize(run.requests)
    assert summary.requests == REQUESTS and summary.completed == len(done)
    assert 0 < sum(r.outcome == REJECTED for r in run.requests) == REQUESTS - len(done)
    assert summary.output_tokens == sum(job.output_tokens for job in done)
    assert summary.short_outputs == 0
    assert summary.hit_rate == pytest.approx(
        sum(job.cached_tokens for job in done) / sum(job.prompt_tokens for job in done)
    )
    ttfts_s = [job.prefilled_s - job.arrived_s for job in done]
    assert summary.ttft_s.p90 == pytest.approx(np.percentile(ttfts_s, 90))
    several = [job.tbt_s for job in done if job.output_tokens > 1]
    assert summary.tbt_s.p90 == pytest.approx(np.percentile(several, 90))


def test_goodput_of_the_record_is_what_the_jobs_kept(simulated) -> None:
    fleet, run = simulated
    good = sum(
        job.finished_s is not None
        and job.prefilled_s - job.arrived_s <= LEVEL.ttft_s
        and job.tbt_s <= LEVEL.tbt_s
        for job in fleet.jobs
    )
    found = goodput(run.requests, LEVEL).requests
    assert 0 < found == good == sum(bucket.within for bucket in by_length(run))
    assert good >= within(fleet.jobs, LEVEL.ttft_s, LEVEL.tbt_s)  # whose TTFT has the hand-over


def test_phases_add_up_to_what_a_client_waited(simulated) -> None:
    _, run = simulated
    found = measured(run.requests)
    assert len(found) == sum(r.outcome == COMPLETED for r in run.requests)
    for phases in found:
        assert sum(phases.until_first_token.values()) == pytest.approx(phases.ttft_s)
        assert sum(phases.all.values()) == pytest.approx(phases.latency_s)
    assert any(phases.all["transfer"] > 0 for phases in found)


def test_samples_name_every_worker(simulated) -> None:
    fleet, run = simulated
    assert 2 <= len(run.samples) <= 2 * 300
    said = {key for sample in run.samples for key in sample.values}
    for worker in (*fleet.prefills, *fleet.decodes):
        assert f'mooncake_requests_running{{model="{worker}"}}' in said


def test_the_recording_survives_its_page(simulated) -> None:
    _, run = simulated
    assert from_bytes(to_bytes(run)) == run


def test_a_compact_record_has_the_numbers_of_the_whole_one() -> None:
    whole = answered(0, token_times_s=tuple(0.5 + 0.01 * n * n for n in range(40)))
    small = compact(whole)
    assert (small.ttft_s, small.tbt_s, small.tokens) == (whole.ttft_s, whole.tbt_s, 40)
    assert len(small.token_times_s) == 2 and compact(small) is small
    assert summarize([small]) == summarize([whole])
    one, none = compact(answered(0, token_times_s=(0.5,))), compact(answered(0, token_times_s=()))
    assert (one.tokens, one.tbt_s, one.ttft_s) == (1, None, 0.5)
    assert (none.tokens, none.tbt_s, none.ttft_s) == (0, None, None)


def simulate(folder: Path, *more: str) -> int:
    command = command_of(EntryPoint("simulate", "loadtest.simulator.command:simulate", GROUP))
    (folder / "conversation_trace.jsonl").write_bytes(START.read_bytes())
    with pytest.raises(SystemExit) as ended:
        command(
            [
                "--experiment",
                "replay",
                "--traces",
                str(folder),
                "--requests",
                "40",
                "--kept",
                str(folder / "kept"),
                "--report",
                str(folder / "page.html"),
                "--json",
                *more,
            ]
        )
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_one_simulated_run_has_the_page_of_a_replay(tmp_path: Path, capsys) -> None:
    assert simulate(tmp_path, "--prefills", "1", "--decodes", "1") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    run = read_runs(tmp_path / "page.html")
    assert isinstance(run, Recording) and len(run.requests) == 40 == row["requests"]
    page = ParsedPage((tmp_path / "page.html").read_text())
    for heading in ("Goodput by prompt length", "Prefill workers", "Where the whole time went"):
        assert heading in page.words
    assert page.drawn > 100 and run.settings["nodes"] == 2


@pytest.mark.slow
def test_several_simulated_runs_are_a_sweep_and_known_ones_are_not_made_again(
    tmp_path: Path, capsys
) -> None:
    assert simulate(tmp_path, "--speed", "1", "--speed", "4") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    runs = read_runs(tmp_path / "page.html")
    assert isinstance(runs, list) and [run.settings["speed"] for run in runs] == [1.0, 4.0]
    assert [run.numbers.get("goodput_share") for run in runs] == pytest.approx(
        [row["goodput_share"] for row in rows], abs=1e-5
    )
    kept = sorted((tmp_path / "kept").iterdir())
    assert simulate(tmp_path, "--speed", "1", "--speed", "4") == 0
    assert sorted((tmp_path / "kept").iterdir()) == kept and len(kept) == 2


def test_a_page_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path, capsys) -> None:
    assert simulate(tmp_path, "--report", str(tmp_path / "no" / "page.html")) == 2
    assert "No such file" in capsys.readouterr().err
