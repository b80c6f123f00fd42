"""A damaged or unsupported checkpoint is one error in words, with all its problems."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import CheckpointError, read_model_config
from backends.engine.torch.torch_engine import TorchEngine
from mooncake_store.layout import KvLayout
from tests.backends.engine.checkpoints import LLAMA3_ROPE, edit_config, make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
Damage = Callable[[Path], None]


def load(path: Path, **values: Any) -> TorchEngine:
    return TorchEngine.load(path, pages_max=4, block_tokens=16, **values)


def problems_of(path: Path, **values: Any) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load(path, **values)
    assert str(path) in str(caught.value)
    return caught.value.problems


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def truncate(path: Path, keep_bytes: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])


def overwrite(path: Path, name: str, text: str) -> None:
    (path / name).write_text(text)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")


EXTRA_BIAS = "model.layers.0.self_attn.q_proj.bias"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut short": (lambda path: truncate(path, 200_000), "model.safetensors is cut short: it has"),
    "cut in the header": (lambda path: truncate(path, 100), "it has no whole header"),
    "empty": (lambda path: truncate(path, 0), "it has no whole header"),
    "garbage": (
        lambda path: overwrite(path, "model.safetensors", "\x10" + "\0" * 7 + "x" * 100),
        "its header is invalid",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json is there",
    ),
    "NaN": (
        lambda path: edit_weights(path, poison),
        "tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity",
    ),
    "integers": (
        lambda path: edit_weights(
            path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).int()})
        ),
        "tensor model.norm.weight is I32",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (
        lambda path: overwrite(path, "config.json", "{,}"),
        "config.json is not valid JSON",
    ),
    "config a list": (
        lambda path: overwrite(path, "config.json", "[]"),
        "config.json must be a JSON object, is a list",
    ),
    "generation config not JSON": (
        lambda path: overwrite(path, "generation_config.json", "{"),
        "generation_config.json is not valid JSON",
    ),
    "architecture": (
        lambda path: edit_config(path, architectures=["MambaForCausalLM"]),
        "architecture 'MambaForCausalLM' is not supported",
    ),
    "no architecture": (
        lambda path: edit_config(path, architectures=None),
        "architecture None is not supported",
    ),
    "sliding window": (
        lambda path: edit_config(path, use_sliding_window=True),
        "use_sliding_window is not supported",
    ),
    "sliding layers": (
        lambda path: edit_config(path, layer_types=["sliding_attention", "full_attention"]),
        "layer_types ['sliding_attention'] are not supported",
    ),
    "activation": (lambda path: edit_config(path, hidden_act="gelu"), "hidden_act 'gelu'"),
    "quantised": (
        lambda path: edit_config(path, quantization_config={"quant_method": "awq"}),
        "quantized weights are not supported",
    ),
    "rope type": (
        lambda path: edit_config(path, rope_parameters={"rope_type": "longrope", "factor": 4.0}),
        "rope type 'longrope' is not supported",
    ),
    "rope per layer type": (
        lambda path: edit_config(path, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
        "RoPE that differs between layers is not supported",
    ),
    "a bias that the config does not mention": (
        lambda path: edit_weights(
            path, lambda tensors: tensors.update({EXTRA_BIAS: torch.ones(64)})
        ),
        f"tensor {EXTRA_BIAS} is not part of the model in config.json",
    ),
    "a bias of the head": (
        lambda path: edit_weights(
            path, lambda tensors: tensors.update({"lm_head.bias": torch.ones(320)})
        ),
        "tensor lm_head.bias is not part of the model in config.json",
    ),
    "one file beside an index of others": (
        lambda path: overwrite(
            path, "model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'
        ),
        "model.safetensors is in the folder, but model.safetensors.index.json does not name it",
    ),
    "heads": (
        lambda path: edit_config(path, num_attention_heads=3, head_dim=16),
        "num_attention_heads (3) must be a multiple of num_key_value_heads (2)",
    ),
    "layers a word": (
        lambda path: edit_config(path, num_hidden_layers="two"),
        "num_hidden_layers must be a positive integer, is 'two'",
    ),
    "end id": (
        lambda path: overwrite(path, "generation_config.json", '{"eos_token_id": [2, 99999]}'),
        "eos_token_id 99999 is no token id of the vocabulary",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_kind_of_damage_is_one_clear_problem(tmp_path: Path, damage: str) -> None:
    make_checkpoint("llama", tmp_path)
    spoil, words = DAMAGES[damage]
    spoil(tmp_path)
    problem, *others = problems_of(tmp_path)
    assert words in problem
    assert not others or "beside an index" in damage


def test_all_wrong_tensors_are_listed_at_once(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.0.self_attn.q_proj.bias"]
        tensors["lm_head.weight"] = torch.zeros(10, 64)

    edit_weights(tmp_path, spoil)
    assert problems_of(tmp_path) == [
        "tensor model.norm.weight is missing; config.json asks for [64]",
        "tensor lm_head.weight is [10, 64]; config.json asks for [320, 64]",
        "tensor model.layers.0.self_attn.q_proj.bias is missing; config.json asks for [64]",
    ]


def test_problems_of_dtype_config_and_files_are_listed_at_once(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    edit_config(tmp_path, use_sliding_window=True, hidden_act="relu", num_hidden_layers=-1)
    (tmp_path / "model.safetensors").unlink()
    assert len(problems_of(tmp_path, dtype="int8")) == 5


def test_a_long_list_of_problems_is_shown_in_part(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    edit_config(tmp_path, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match="and 7 more") as caught:
        load(tmp_path)
    assert len(caught.value.problems) == 27
    edit_config(tmp_path, num_hidden_layers=1)
    assert len(problems_of(tmp_path)) == 9, "a layer more than the config knows is wrong too"


def test_missing_and_damaged_shards_are_listed_at_once(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    problems = problems_of(tmp_path)
    assert len(problems) == 2
    assert f"shard {shards[0].name} is missing" in problems[0]
    assert f"{shards[1].name} is cut short" in problems[1]


@pytest.mark.parametrize("walk", range(30))
def test_each_tensor_comes_from_the_file_of_the_index_or_is_named(
    tmp_path: Path, walk: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies with other numbers in other shards, and an index that leaves out or is wrong."""
    make_checkpoint("llama", tmp_path, max_shard_size="100KB", num_hidden_layers=1)
    rng = random.Random(f"{seed} {walk}")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map: dict[str, str] = content["weight_map"]
    shards = {path.name: load_file(path) for path in tmp_path.glob("model-*.safetensors")}
    good = {name: shards[file][name] for name, file in weight_map.items()}
    copied, unlisted, moved = set(), set(), set()
    for name in rng.sample(sorted(weight_map), 4):
        for file in rng.sample(sorted(shards.keys() - {weight_map[name]}), rng.randint(0, 2)):
            shards[file][name] = good[name] + 5
            copied.add(name)
        is_last = list(weight_map.values()).count(weight_map[name]) == 1  # of its shard
        edit = -1 if is_last else rng.randrange(4)
        if edit == 0:
            del weight_map[name]
            unlisted.add(name)
        elif edit == 1:
            others = [file for file in sorted(shards) if name not in shards[file]]
            weight_map[name] = rng.choice(others)
            moved.add(name)
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    index.write_text(json.dumps(content))
    wrong = moved | (unlisted & copied)
    if wrong:
        problems = problems_of(tmp_path)
        assert len(problems) == len(wrong)
        assert all(any(f"tensor {name} " in each for each in problems) for name in wrong)
        return
    load(tmp_path)
    assert all(f"{name} in model-" in caplog.text for name in copied)
    checkpoint = Checkpoint.open(tmp_path)
    for name, expected in good.items():
        raw = torch.from_numpy(checkpoint.read(name)).view(torch.float32)
        assert torch.equal(raw, expected.flatten()), name


def test_a_tensor_that_no_model_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("llama", tmp_path)
    load(tmp_path)
    assert "not read" not in caplog.text
    edit_weights(tmp_path, lambda tensors: tensors.update({"v_head.weight": torch.ones(3)}))
    (tmp_path / "model-1-of-2.safetensors").touch()
    load(tmp_path)
    assert "not read: v_head.weight, all of model-1-of-2.safetensors" in caplog.text


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, max_shard_size="100KB")
    overwrite(tmp_path, "model.safetensors.index.json", "{}")
    assert "has no weight_map" in problems_of(tmp_path)[0]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "config.json is missing" in problems_of(tmp_path / "nowhere")[0]


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    assert "dtype 'int8' is not supported" in problems_of(tmp_path, dtype="int8")[0]


def test_the_kv_layout_is_read_without_torch(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    assert read_model_config(tmp_path).layout("float32", 64) == KvLayout(2, 2, 24, "float32", 64)
    assert load(tmp_path).layout == read_model_config(tmp_path).layout("float32", 16)
    script = (
        "import sys\n"
        "from backends.engine import batching, interface, sampling\n"
        "from backends.engine.model_config import read_model_config\n"
        f"print(read_model_config({str(tmp_path)!r}).layout('bfloat16', 64).block_bytes)\n"
        "assert 'torch' not in sys.modules\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout.strip() == str(2 * 2 * 2 * 64 * 24 * 2), answer.stderr


@pytest.mark.parametrize(
    ("window", "context_tokens"), [(None, 8192), (512, 512), (9000, 8192), ("not said", 4096)]
)
def test_a_mistral_is_taken_as_far_as_its_sliding_window(
    tmp_path: Path, window: int | str | None, context_tokens: int
) -> None:
    path = make_checkpoint("mistral", tmp_path, max_position_embeddings=8192)
    config = json.loads((path / "config.json").read_text())
    config["sliding_window"] = window
    if window == "not said":
        del config["sliding_window"]
    (path / "config.json").write_text(json.dumps(config))
    assert read_model_config(path).context_tokens_max == context_tokens


@pytest.mark.parametrize(
    ("rope", "values", "context_tokens"),
    [
        (YARN, {}, 4096),
        (YARN, {"max_position_embeddings": 4096}, 4096),
        (YARN, {"max_position_embeddings": 16384}, 4096),
        (YARN | {"factor": 2.5}, {}, 2560),
        ({"rope_type": "yarn", "factor": 4.0}, {}, 4096),
        (YARN, {"original_max_position_embeddings": 512}, 2048),
        (LLAMA3_ROPE, {}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, {}, 1024),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_the_context_with_yarn_is_the_original_one_times_the_factor(
    tmp_path: Path, rope: dict[str, Any], values: dict[str, Any], context_tokens: int, is_old: bool
) -> None:
    make_checkpoint("qwen2", tmp_path)
    keys = {"rope_scaling": rope, "rope_parameters": None} if is_old else {"rope_parameters": rope}
    edit_config(tmp_path, **keys, **values)
    assert read_model_config(tmp_path).context_tokens_max == context_tokens


def test_all_that_is_wrong_with_latent_attention_and_experts_is_listed(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    assert read_model_config(tmp_path).layout("float32", 64) == KvLayout(
        3, 1, 40, "float32", 64, kv_factor=1
    )
    edit_config(
        tmp_path,
        scoring_func="softmax",
        topk_method="greedy",
        moe_layer_freq=2,
        n_group=3,
        num_key_value_heads=2,
        qk_rope_head_dim=7,
    )
    words = "scoring_func", "topk_method", "moe_layer_freq", "n_group 3", "must be equal", "qk_rope"
    problems = problems_of(tmp_path)
    assert len(problems) == len(words)
    assert all(any(word in problem for problem in problems) for word in words), problems


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    without = load(tmp_path)
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    edit_weights(tmp_path, lambda tensors: tensors.update(extra))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert len(load(tmp_path).layers) == len(without.layers) == 3
    edit_config(tmp_path, num_nextn_predict_layers=0)
    assert "eh_proj.weight is not part of the model" in problems_of(tmp_path)[0]


def test_a_window_that_is_no_number_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mistral", tmp_path)
    edit_config(tmp_path, sliding_window="wide")
    assert "sliding_window must be a positive integer, is 'wide'" in problems_of(tmp_path)[0]


def test_end_ids_come_from_the_generation_config_when_it_has_some(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    overwrite(tmp_path, "generation_config.json", '{"eos_token_id": [5, 7]}')
    assert read_model_config(tmp_path).eos_token_ids == (5, 7)
    overwrite(tmp_path, "generation_config.json", "{}")
    assert read_model_config(tmp_path).eos_token_ids == (2,)


def test_bfloat16_weights_are_read_exactly(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entries["model.norm.weight"].dtype == "BF16"
    expected = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    raw = torch.from_numpy(checkpoint.read("model.norm.weight")).view(torch.bfloat16)
    assert torch.equal(raw, expected)


def test_the_weights_id_names_the_weights_and_not_their_files(tmp_path: Path) -> None:
    def weights_id(path: Path) -> str:
        return Checkpoint.open(path).weights_id(read_model_config(path))

    first = weights_id(make_checkpoint("llama", tmp_path / "a"))
    assert first == weights_id(make_checkpoint("llama", tmp_path / "b"))
    assert first == weights_id(make_checkpoint("llama", tmp_path / "c", max_shard_size="100KB"))
    assert first != weights_id(make_checkpoint("llama", tmp_path / "d", seed=1))
    edit_weights(tmp_path / "b", lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    assert first != weights_id(tmp_path / "b")
    edit_config(tmp_path / "a", rms_norm_eps=1e-5)
    assert first != weights_id(tmp_path / "a"), "the same weights, used differently"
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]


def test_a_large_tensor_is_sampled_from_end_to_end() -> None:
    from backends.engine import checkpoint

    samples = checkpoint._samples(10_000_000, is_whole=False)
    assert samples[0] == (0, 4096)
    assert samples[-1] == (10_000_000 - 4096, 4096)
    assert len(samples) == 16
    assert checkpoint._samples(10_000_000, is_whole=True) == [(0, 10_000_000)]
    assert checkpoint._samples(5000, is_whole=False) == [(0, 5000)]
