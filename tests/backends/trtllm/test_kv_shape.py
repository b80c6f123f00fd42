"""What is read of a model's config.json, and which models are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.engine.checkpoint_error import CheckpointError
from backends.engine.trtllm.kv_shape import read_kv_shape
from mooncake_store.layout import KvLayout
from tests.backends.small_tokenizers import DEMO

MISTRAL = {
    "architectures": ["MistralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768,
    "max_position_embeddings": 32768, "sliding_window": None, "eos_token_id": 2,
}  # fmt: skip


def folder(tmp_path: Path, **changes: Any) -> Path:
    raw = {name: value for name, value in (MISTRAL | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def test_the_demo_checkpoint_has_the_torch_engine_s_block_size() -> None:
    layout = read_kv_shape(DEMO).layout("float32", 64, tp_size=1)
    assert layout == KvLayout(4, 2, 32, "float32", 64)


def test_families_that_the_torch_engine_does_not_know_are_read(tmp_path: Path) -> None:
    shape = read_kv_shape(folder(tmp_path), tp_size=4)
    assert shape.layout("bfloat16", 256, 4).block_bytes == 32 * 2 * 8 * 256 * 128 * 2
    assert shape.model_id == "MistralForCausalLM-32x4096-v32768"
    assert shape.eos_token_ids == (2,)


def test_a_head_that_several_ranks_share_is_in_each_rank_s_part(tmp_path: Path) -> None:
    shape = read_kv_shape(folder(tmp_path, num_key_value_heads=2), tp_size=4)
    assert shape.layout("bfloat16", 64, 4).kv_heads == 4


def test_a_window_that_is_written_down_but_not_used_is_no_window(tmp_path: Path) -> None:
    assert read_kv_shape(folder(tmp_path, sliding_window=4096, use_sliding_window=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 4096}, "sliding windows"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"mamba_d_state": 16}, "state-space"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers must be a positive integer"),
    ],
)
def test_kv_that_is_not_one_page_of_equal_layers_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_kv_shape(folder(tmp_path, **changes))


def test_heads_that_cannot_be_divided_over_the_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tp_size is 3"):
        read_kv_shape(folder(tmp_path), tp_size=3)
