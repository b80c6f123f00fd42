"""A simulated cluster of workers as a profile has them: its times are the profile's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper.__main__ import run as paper
from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    PrefillEstimate,
    PrefillSample,
)
from loadtest.profile.profile import BurstMeans, PrefixSources, Profile, Serving, Sharing
from loadtest.simulator.cluster.fleet import Fault, SimulatedFleet
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.profiled import burst_on, read_profile, settings_of
from tests.loadtest.simulator.fleets import OPEN, START, prompt

PREFILL = PrefillEstimate(0.01, 1e-4, 1e-7)
DECODE = DecodeEstimate(0.004, 3e-4, 2e-7)
SHAPE = ClusterSettings(prefills=1, decodes=1, jitter=0.0)
SERVING = Serving(base_s=0.02, per_cached_token_s=1e-5, handover_s=0.03)
WORKER = {
    "block_tokens": "512",
    "chunk_tokens": "1024",
    "slots": "8",
    "kv_pages": "99",
    "token_bytes": "1000",
}


NOT_MEASURED, NO_BURST = PrefixSources(), BurstMeans()


def profile(
    serving: Serving = SERVING, sources: PrefixSources = NOT_MEASURED, burst: BurstMeans = NO_BURST
) -> Profile:
    prefills = [(64, 0), (512, 0), (512, 512), (1_000, 1_000), (256, 4_096)]
    decodes = [(1, 80), (4, 2_048), (16, 8_192)]
    return Profile(
        "a machine",
        WORKER,
        [PrefillSample(new, prefix, PREFILL.seconds(new, prefix)) for new, prefix in prefills],
        [DecodeSample(n, context, DECODE.step_s(n, context)) for n, context in decodes],
        serving,
        Sharing(1.0, 1.0),
        burst,
        sources,
    )


def fleet(found: Profile, shape: ClusterSettings = SHAPE, *faults: Fault) -> SimulatedFleet:
    settings = settings_of(found, shape)
    return SimulatedFleet(OPEN, settings, settings.gpu(), faults)


def intervals_s(job: SimulatedJob) -> tuple[float, float]:
    """TTFT as a client sees it, and from the first token to when decode begins."""
    assert job.prefilled_s is not None and job.joined_s is not None
    return job.prefilled_s - job.arrived_s, job.joined_s - job.prefilled_s


def test_a_lone_request_takes_the_profiles_times() -> None:
    job = fleet(profile()).run([prompt(0, 0.0, range(2), output_tokens=3)])[0]
    ttft_s, gap_s = intervals_s(job)
    assert ttft_s == pytest.approx(SERVING.base_s + PREFILL.seconds(1_024, 0), rel=1e-6)
    assert gap_s == pytest.approx(SERVING.handover_s, abs=1e-3)
    steps_s = DECODE.step_s(1, 1_025) + DECODE.step_s(1, 1_026)
    assert (job.finished_s or 0.0) - (job.joined_s or 0.0) == pytest.approx(steps_s, rel=1e-6)


BURST = BurstMeans((256, 1_024, 64, 512, 768, 128, 1_536, 384), 16)


def test_the_prices_of_a_burst_are_found_again() -> None:
    truth = replace(
        settings_of(profile(), SHAPE),
        queued_prompt_s=0.02,
        handover_beside_s=0.1,
        sharing=Sharing(1.0, 1.7),
    )
    measured = burst_on(truth, BURST)
    found = settings_of(profile(burst=measured), SHAPE)
    assert found.queued_prompt_s == pytest.approx(truth.queued_prompt_s, rel=0.02)
    assert found.handover_beside_s == pytest.approx(truth.handover_beside_s, rel=0.02)
    assert found.sharing.decode == pytest.approx(truth.sharing.decode, rel=0.02)
    again = burst_on(found, BURST)
    assert again.ttft_s == pytest.approx(measured.ttft_s, rel=1e-3)
    assert again.first_interval_s == pytest.approx(measured.first_interval_s, rel=1e-2)
    assert again.step_s == pytest.approx(measured.step_s, rel=1e-2)


def test_a_burst_is_fitted_though_others_would_find_no_room() -> None:
    """And blocks of an engine that no chunk is a multiple of."""
    odd = replace(
        profile(burst=burst_on(settings_of(profile(), SHAPE), BURST)),
        settings={**WORKER, "kv_pages": "2", "block_tokens": "48"},
    )
    found = settings_of(odd, SHAPE)
    assert found.chunk_tokens % 48 == 0 and found.gpu().pages_bytes == 2 * 48 * 1_000


def test_nobody_gets_faster_by_sharing() -> None:
    """A burst that took less than prompts one by one would: the prices are none."""
    quick = replace(BURST, ttft_s=0.01, first_interval_s=0.001, step_s=0.0001)
    found = settings_of(profile(burst=quick), SHAPE)
    prices = found.queued_prompt_s, found.handover_beside_s, found.sharing.decode
    assert prices == (0.0, 0.0, 1.0)


def test_a_hand_over_takes_longer_while_other_prompts_are_computed() -> None:
    """By as much for each worker that computes: another prompt at first, then the batch too."""
    settings = replace(settings_of(profile(), SHAPE), handover_beside_s=0.2)
    tried = SimulatedFleet(OPEN, settings, settings.gpu())
    gaps_s = sorted(
        intervals_s(job)[1]
        for job in tried.run([prompt(n, 0.0, [2 * n, 2 * n + 1], 3) for n in range(3)])
    )
    assert gaps_s[0] == pytest.approx(SERVING.handover_s, abs=1e-3)
    beside_s = SERVING.handover_s + 0.2
    assert gaps_s[1] == pytest.approx(beside_s, abs=1e-3)
    assert gaps_s[2] == pytest.approx(beside_s, abs=5e-3), "and the step under way"


def test_a_prefix_comes_from_memory_and_from_the_ssd_at_the_profiles_rates() -> None:
    shape = replace(SHAPE, node_blocks=30, ssd_blocks=100)
    others = [prompt(n, 5.0 * n, range(100 * n, 100 * n + 8)) for n in range(1, 10)]
    offered = [
        prompt(0, 0.0, range(8)),
        *others,
        prompt(10, 60.0, range(8)),
        prompt(11, 70.0, range(8)),
    ]
    rate = 2e6
    jobs = fleet(profile(sources=PrefixSources(ssd_bytes_per_s=rate)), shape).run(offered)
    from_ssd, from_memory = jobs[-2:]
    assert (from_ssd.restored_blocks, from_memory.restored_blocks) == (8, 0)
    base_s = SERVING.base_s + PREFILL.seconds(1, 8 * 512 - 1)
    memory_s = 8 * 512 * SERVING.per_cached_token_s
    assert intervals_s(from_memory)[0] == pytest.approx(base_s + memory_s, rel=1e-6)
    ssd_s = 8 * 512 * 1_000 / rate + SHAPE.ssd_latency_s
    assert intervals_s(from_ssd)[0] == pytest.approx(base_s + memory_s + ssd_s, rel=1e-6)


def test_a_request_on_its_way_to_a_worker_that_dies_goes_to_another() -> None:
    slow_way = replace(SERVING, base_s=2.0)
    pair = replace(SHAPE, prefills=2)
    tried = fleet(profile(slow_way), pair, Fault(1.0, "p0", "kill"), Fault(1.5, "p1", "slow", 1.0))
    outcome = outcome_of(tried.run([prompt(n, 0.1 * n, [n]) for n in range(6)]))
    assert outcome.finished == 6 and not outcome.refused


def test_a_file_is_read_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json() + "\n")
    assert read_profile(path) == profile()
    path.write_text("{}")
    with pytest.raises(ValueError, match="no profile"):
        read_profile(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = START.read_text().splitlines(keepends=True)[:24]
    for trace in ("conversation", "synthetic"):
        (tmp_path / f"{trace}_trace.jsonl").write_text("".join(lines))
    (tmp_path / "profile.json").write_text(profile().to_json())
    return tmp_path


def simulated(folder: Path, *asked: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        paper(["--traces", str(folder), "--json", "--kept", "none", *asked])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_an_experiment_states_the_profile_that_it_was_run_with_and_promises_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--experiment", "scheduling", "--policy", "adaptive", "--speed", "1"
    file = str(folder / "profile.json")
    assert simulated(folder, *asked, "--profile", file, "--length-scale", "0.0625") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["constants"]["handover_s"] == SERVING.handover_s
    assert said["constants"]["block_tokens"] == 512 and "mfu" not in said["constants"]
    assert all(target["value"] is None for target in said["targets"])
    assert "profile" in said["shortened"]
    assert [row["finished"] for row in said["rows"]] == [24]


def test_a_profile_decides_what_comes_of_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--experiment", "ssd", "--trace", "conversation", "--blocks", "500"
    scaled = (*asked, "--length-scale", "0.0625")
    assert simulated(folder, *scaled) == 0
    paper = json.loads(capsys.readouterr().out)["rows"][0]["ttft_mean_s"]
    assert simulated(folder, *scaled, "--profile", str(folder / "profile.json")) == 0
    measured = json.loads(capsys.readouterr().out)["rows"][0]["ttft_mean_s"]
    assert measured > paper + SERVING.base_s, "and the hand-over"


@pytest.mark.parametrize(
    "asked",
    [
        ("--experiment", "gpu-time", "--profile", "profile.json"),
        ("--all", "--profile", "profile.json"),
        ("--experiment", "ssd", "--profile", "conversation_trace.jsonl"),
        ("--experiment", "ssd", "--profile", "nowhere.json"),
    ],
)
def test_what_no_profile_can_change_is_refused(
    asked: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert simulated(folder, *asked) == 2
