"""The GPU's benchmark runs on a CPU too, so that it is known to run before there is a GPU."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from backends.engine.torch.weights import expected_shapes
from loadtest.bench import engine_gpu
from loadtest.bench.engine.own_engine import step_bytes
from loadtest.bench.engine_gpu import DeviceEngine, GpuModelShape, main

APP = typer.Typer()
APP.command()(main)


def test_it_measures_every_target() -> None:
    done = CliRunner().invoke(APP, ["--shape", "tiny", "--device", "cpu", "--times", "3"])
    found = json.loads(done.output.strip().splitlines()[-1])
    assert len(found["targets"]) == 6
    assert all(target["value"] > 0 for target in found["targets"])


def test_it_says_when_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(APP, ["--device", "cuda"])
    assert done.exit_code == 1 and "sees no GPU here" in done.output


def test_what_a_step_must_read_is_all_matrices_once() -> None:
    own = DeviceEngine(engine_gpu.WORKLOADS[GpuModelShape.TINY].config, torch.device("cpu"), 1_024)
    shapes = expected_shapes(own.config)
    matrices = sum(
        rows_columns[0] * rows_columns[1]
        for name, rows_columns in shapes.items()
        if len(rows_columns) == 2 and "embed_tokens" not in name
    )
    assert step_bytes(own.config, own.layout, 0, 512) == 2 * matrices
    with_kv = 2 * matrices + 3 * 512 * own.layout.token_bytes
    assert step_bytes(own.config, own.layout, 3, 512) == with_kv


def test_a_prefix_in_host_memory_is_in_the_pages_after_a_load() -> None:
    own = DeviceEngine(engine_gpu.WORKLOADS[GpuModelShape.TINY].config, torch.device("cpu"), 1_024)
    own.engine.kv_pool[:] = 1
    assert own.load(512) == 2 * own.layout.block_bytes
    memory = own.engine._memory
    assert (memory.pool[:2].view(torch.uint8) == 1).all()
    assert not (memory.pool[2:].view(torch.uint8) == 1).all()
