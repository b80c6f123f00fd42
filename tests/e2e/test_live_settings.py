"""Options of `mooncake serve` stand above every config.pbtxt: another checkpoint, other counts of
workers, and what `mooncake config` then says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import read_model_config
from backends.engine.torch.mixed_products import activations_dtype
from mooncake_store import layout as kv_layout
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.small_tokenizers import DEMO
from tests.e2e.config_command import run_config, run_doctor
from tests.e2e.load import B
from tests.e2e.server import Server, running, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, of another family than the demo's; with its tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", folder, vocab_size=2048)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, state_dir: Path, checkpoint: Path
) -> Iterator[Server]:
    options = ["--checkpoint", str(checkpoint), "--dtype", "bfloat16", "--device", "cpu"]
    counts = ["--prefill", "3", "--decode", "1"]
    yield from running(tmp_path_factory.mktemp("live"), state_dir, {}, [*options, *counts])


def test_options_serve_another_checkpoint_with_other_counts_of_workers(
    server: Server, checkpoint: Path
) -> None:
    asked = {"text_input": "It was", "max_tokens": 4, "end_id": -1, "return_decision": True}
    answers = {
        worker: server.ask(parameters={"prefill_worker": worker}, **asked)
        for worker in ("prefill_0", "prefill_1", "prefill_2")
    }
    for worker, answer in answers.items():
        assert not answer.error and len(answer.output_ids) == 4
        assert (answer.decision["prefill"], answer.decision["decode"]) == (worker, "decode_0")
    assert not (server.repository / "prefill_2").exists(), "the repository is only read"
    assert server.is_gone("decode_1"), "--decode 1 leaves the second one out"
    model = read_model_config(checkpoint)
    weights_id = Checkpoint.open(checkpoint).weights_id(model)
    is_mixed = activations_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    shape = "tp1 in bfloat16+float32" if is_mixed else "tp1"  # of this machine's CPU
    layout = model.layout("bfloat16", B)
    fingerprint = kv_layout.fingerprint(model.model_id, weights_id, layout, shape)
    wait_until(
        lambda: server.metric("mooncake_worker_info", fingerprint=fingerprint) == 4,
        "all four workers serve it in its dtype",
    )
    assert server.ask("ensemble", text_input="It was", max_tokens=4, end_id=-1).error == ""
    status, said = run_config(server, "set", "conductor.output_tokens_default=5")
    assert status == 0 and "conductor serves with it" in said
    assert len(server.ask(text_input="It was", end_id=-1).output_ids) == 5


def test_what_cannot_be_changed_live_is_said_with_every_mistake_and_nothing_is_written(
    server: Server, checkpoint: Path
) -> None:
    before = [path.read_bytes() for path in sorted(server.repository.glob("*/config.pbtxt"))]
    status, said = run_config(
        server,
        "set",
        f"*.checkpoint={checkpoint}",
        "prefill_*.block_tokens=32",
        "prefill_2.threads=2",
        "conductor.policy=best",
    )
    assert status == 1 and said.endswith("nothing was changed")
    for part in (
        "conductor.checkpoint: --checkpoint of the running `mooncake serve` overrides the file",
        "prefill_1.block_tokens cannot be changed while it serves",
        "prefill_2 has no folder and is made from prefill_0",
        "conductor: policy is 'best'",
        "all workers need the same block_tokens",
    ):
        assert part in said, (part, said)
    after = [path.read_bytes() for path in sorted(server.repository.glob("*/config.pbtxt"))]
    assert after == before


def test_a_diff_says_what_the_running_server_has_instead_of_the_files(server: Server) -> None:
    status, said = run_config(server, "diff")
    assert status == 0
    for part in (
        "conductor.output_tokens_default = '5' (default '256', shipped '256')",
        "--dtype bfloat16 overrides the files",
        "prefill_2 is made from prefill_0",
        "decode_1 is not served",
    ):
        assert part in said, (part, said)


def test_a_doctor_tells_a_broken_file_from_a_running_system_that_is_well(server: Server) -> None:
    path = server.repository / "decode_0" / "config.pbtxt"
    before = path.read_text()
    slots = 'key: "slots" value { string_value: "%s" }'
    path.write_text(before.replace(slots % 32, slots % "none"))
    try:
        status, said = run_doctor(server, "--json")
    finally:
        path.write_text(before)
    found = json.loads(said)
    broken = [each["what"] for each in found["findings"] if each["state"] == "BROKEN"]
    assert status == 1 and not found["is_well"]
    assert broken == ["decode_0: slots is 'none'; expected int"]
    by_subject = {each["subject"]: each for each in found["findings"]}
    for subject in ("models", "torch build", "/dev/shm"):
        assert by_subject[subject]["state"] == "ok", by_subject[subject]
    assert "GB/s" in by_subject["path nixl"]["what"], "a real read of a real node"
    assert "prefill_2" in by_subject["models"]["what"]
    assert "first token after" in by_subject["request"]["what"]
