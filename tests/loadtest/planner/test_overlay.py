"""What a plan writes is what our own config reader takes, and what was simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from backends.config_pbtxt import FrontendConfig, TokenizerConfig, read_configs
from backends.launcher.repository import WorkerFolders
from backends.triton.worker_kinds import read_worker_configs
from conductor import ConductorConfig
from loadtest.planner.engine import NodeEngine
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels
from loadtest.planner.overlay import serve_command, store_bytes, write_overlay
from tests.loadtest.planner.test_search import run_of

ENGINE = NodeEngine.named("H200", "Qwen3-32B", gpus=4)
LEVELS = ServiceLevels(7.5, 0.05)
PLAN = FleetPlan(2, 3, 777, "kvcache_centric", "none")


def written(folder: Path, run: FleetRun) -> dict[str, dict[str, str]]:
    """The parameters of every model, by Triton's own parser."""
    repository = write_overlay(folder, run, ENGINE, LEVELS)
    found = {}
    for path in repository.glob("*/config.pbtxt"):
        config = text_format.Parse(path.read_text(), ModelConfig())
        assert (path.parent / "1").is_dir()
        found[path.parent.name] = {k: v.string_value for k, v in config.parameters.items()}
    return found


def test_every_model_is_read_by_our_reader_and_says_what_was_simulated(tmp_path: Path) -> None:
    run = run_of(PLAN, 900)
    models = written(tmp_path, run)
    workers = WorkerFolders(tmp_path / "model_repository").names()
    assert workers == {"prefill_0", "prefill_1", "decode_0", "decode_1", "decode_2"}
    assert models.keys() - workers == {"conductor", "ensemble", "preprocessing", "postprocessing"}
    frontend, config = read_configs((FrontendConfig, ConductorConfig), "c", models["conductor"])
    assert config == PLAN.config(LEVELS)
    assert frontend.checkpoint == "checkpoints/Qwen3-32B" and frontend.requests_max == 256
    read_configs((TokenizerConfig,), "p", models["preprocessing"])
    nodes, kv_bytes = set(), ENGINE.gpu().pages_bytes
    for name in workers:
        role = name.partition("_")[0]
        found: list[Any] = read_worker_configs(role, name, models[name], 1)
        worker, engine = found
        assert (worker.engine, worker.dtype, engine.tp_size) == ("tensorrt_llm", "bfloat16", 4)
        assert (worker.block_tokens, worker.kv_bytes) == (512, kv_bytes)
        assert worker.chunk_tokens == 2_048 if role == "prefill" else worker.slots == 256
        nodes.add(worker.store_node)
    assert nodes == {f"s{number}" for number in range(5)}


@pytest.mark.parametrize("policy", ["adaptive", "kvcache_centric"])
@pytest.mark.parametrize("admission", ["predictive_lengths", "none"])
def test_the_conductor_that_is_written_is_the_one_that_was_simulated(
    tmp_path: Path, policy: str, admission: str
) -> None:
    plan = FleetPlan(1, 1, 9, policy, admission)
    models = written(tmp_path, run_of(plan, 900))
    _, config = read_configs((FrontendConfig, ConductorConfig), "c", models["conductor"])
    assert config == plan.config(LEVELS)


def test_workers_of_an_earlier_plan_go(tmp_path: Path) -> None:
    written(tmp_path, run_of(PLAN, 900))
    models = written(tmp_path, run_of(FleetPlan(1, 1, 777), 900))
    assert {name for name in models if "_" in name} == {"prefill_0", "decode_0"}


def test_the_command_names_a_storage_node_for_each_worker_and_room_for_its_blocks() -> None:
    said = serve_command(Path("a folder"), PLAN, ENGINE)
    assert "--model-repository 'a folder' --nodes s0,s1,s2,s3,s4 --store-bytes" in said
    assert store_bytes(PLAN, ENGINE) >= 777 * 512 * 256 * 1024
