"""The GPU's benchmark runs on a CPU too, so that it is known to run before there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.engine.torch.weights import expected_shapes
from bench import engine_gpu
from bench.engine.step_costs import step_bytes
from bench.engine_gpu import DeviceEngine, GpuModelShape, main

ROOT = Path(__file__).parents[2]
TINY = ["--shape", "tiny", "--device", "cpu", "--times", "3"]
# In front of everything: what neither torch nor numpy brings is not there.
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "typer", "click", "xxhash", "msgspec", "zmq", "nixl"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.long
def test_it_measures_every_target_with_torch_and_numpy_alone() -> None:
    program = f"{BARE}\nfrom bench.engine_gpu import main\nmain({TINY!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert [target["name"] for target in found["targets"]] == [
        "decode_1_over_memory_bandwidth",
        "decode_16_over_memory_bandwidth",
        "decode_64_over_memory_bandwidth",
        "prefill_8k_over_matrix_rate",
        "load_32k_over_host_to_device",
        "ttft_32k_cached_over_whole",
    ]
    assert all(target["value"] > 0 for target in found["targets"])
    decodes = [row for row in found["rows"] if row["what"] == "decode"]
    assert [row["recorded"] for row in decodes] == [True] * 3 + [False] * 3


def test_it_says_when_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sees no GPU here"):
        main(["--device", "cuda"])


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
