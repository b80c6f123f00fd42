"""Plans for a machine that was measured: its own times, memory, cores and config.pbtxt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends.triton.worker_kinds import read_worker_configs
from loadtest.planner.engine import MeasuredEngine, PlanRefused
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels, run_fleet
from loadtest.planner.overlay import worker_parameters
from loadtest.replay.trace import read_trace
from loadtest.simulator.cluster.job import offered_of
from tests.loadtest.planner.profiles import DECODE, PREFILL, profile, write_profile
from tests.loadtest.planner.test_command import planned
from tests.loadtest.simulator.fleets import START

LEVELS = ServiceLevels(1.0, 0.05)


def test_a_measured_worker_has_the_times_and_the_memory_of_its_profile(tmp_path: Path) -> None:
    engine = MeasuredEngine.read(write_profile(tmp_path))
    gpu, settings = engine.gpu(), engine.settings()
    assert gpu.decode_s(4, 2_048.0) == pytest.approx(DECODE.step_s(4, 2_048), rel=1e-6)
    assert gpu.prefill_s([(512, 256)]) == pytest.approx(PREFILL.seconds(256, 512), rel=1e-6)
    assert (settings.block_tokens, settings.chunk_tokens, settings.decode_slots) == (64, 512, 32)
    assert gpu.pages_bytes == 512 * 64 * 4_096 and settings.workers_at_once == 2.0
    assert engine.node_blocks_max == 2**30 // (64 * 4_096)
    assert MeasuredEngine.read(write_profile(tmp_path), 2**20).node_blocks_max == 4


def test_its_workers_are_configured_as_the_measured_one(tmp_path: Path) -> None:
    engine = MeasuredEngine.read(write_profile(tmp_path))
    for role in ("prefill", "decode"):
        raw = worker_parameters(engine, role == "prefill")
        [config] = read_worker_configs(role, role, raw, 1)
        assert (config.engine, config.threads, config.kv_bytes) == (
            "torch",
            1,
            engine.gpu().pages_bytes,
        )
        assert config.checkpoint == "demo" and config.block_tokens == 64


def test_the_engine_of_the_measured_worker_is_that_of_the_planned_ones(tmp_path: Path) -> None:
    measured = profile(2)
    of_vllm = {"engine": "vllm", "engine_python": "/opt/python", "page_tokens": "64"}
    engine = MeasuredEngine.of(replace(measured, settings={**measured.settings, **of_vllm}))
    for role in ("prefill", "decode"):
        raw = worker_parameters(engine, role == "prefill")
        worker, vllm = read_worker_configs(role, role, raw, 1)
        found = (worker.engine, vllm.engine_python, vllm.page_tokens)
        assert found == ("vllm", "/opt/python", 64)


def served(shape: tuple[int, int], cores: int, speed: float) -> FleetRun:
    engine = MeasuredEngine.of(profile(cores))
    offered = offered_of(read_trace(START, 150), 64, 0.0625)
    plan = FleetPlan(*shape, engine.node_blocks_max)
    return run_fleet(offered, plan, engine, LEVELS, speed, 0)


def test_more_workers_on_the_same_cores_serve_less_than_on_cores_of_their_own() -> None:
    few, many = served((2, 2), 2, 6.0), served((2, 2), 16, 6.0)
    assert few.within < many.within
    assert few.ttft_p90_s > many.ttft_p90_s


@pytest.mark.slow
def test_a_plan_from_a_profile_is_written_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path)
    said, code, words = planned(
        tmp_path,
        capsys,
        "--hardware",
        "",
        "--model",
        "",
        "--profile",
        str(path),
        "--length-scale",
        "0.0625",
        "--slo-ttft",
        "1",
        "--slo-tbt",
        "0.05",
        "--nodes",
        "3",
        "--node-bytes",
        "64M",
    )
    assert code == 0, words
    assert said["constants"]["engine"] == "demo on a machine, 2 cores"
    assert {row["node_blocks"] for row in said["rows"]} >= {2**26 // (64 * 4_096)}
    assert (tmp_path / "plan" / "model_repository" / "prefill_0" / "config.pbtxt").exists()


def test_what_is_no_profile_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    for text, reason in (
        ("{", "profile.json: "),
        ("{}", "profile"),
        (json.dumps({"version": 1}), "version 1"),
    ):
        path.write_text(text)
        with pytest.raises(PlanRefused, match=reason):
            MeasuredEngine.read(path)
    found = json.loads(profile().to_json())
    del found["settings"]["chunk_tokens"]
    found["settings"]["block_tokens"] = "48"
    path.write_text(json.dumps(found))
    settings = MeasuredEngine.read(path).settings()
    assert (settings.block_tokens, settings.chunk_tokens) == (48, 2_016)
    del found["settings"]["block_tokens"]
    path.write_text(json.dumps(found))
    with pytest.raises(PlanRefused, match="'block_tokens'"):
        MeasuredEngine.read(path)
    with pytest.raises(PlanRefused, match="No such file"):
        MeasuredEngine.read(tmp_path / "nowhere")
    _, code, words = planned(tmp_path, capsys, "--profile", str(path))
    assert code == 2 and "leave out --hardware, --model and --gpus" in words
