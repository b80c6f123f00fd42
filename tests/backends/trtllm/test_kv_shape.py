"""What is read of a model's config.json, and which models are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.engine.model_config import CheckpointError
from backends.engine.trtllm.kv_shape import read_kv_dtype, read_kv_shape
from mooncake_store.layout import KvLayout
from tests.backends.small_tokenizers import DEMO

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "eos_token_id": 2,
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
KIMI_K2 = {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64}


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


@pytest.mark.parametrize("changes", [{}, KIMI_K2])
@pytest.mark.parametrize("tp_size", [1, 8])
def test_a_latent_is_in_a_block_once_however_many_ranks_have_it(
    tmp_path: Path, tp_size: int, changes: dict[str, Any]
) -> None:
    made = folder(tmp_path, **(DEEPSEEK_V3 | changes))
    found: list[str] = []
    shape = read_kv_shape(made, tp_size)
    dtype = read_kv_dtype(made, "auto", "bfloat16", found)
    layout = shape.layout(dtype, 64, tp_size)
    assert layout == KvLayout(61, 1, 576, "bfloat16", 64, kv_factor=1) and not found
    assert layout.block_bytes == 61 * 64 * 576 * 2


def test_a_window_that_is_written_down_but_not_used_is_no_window(tmp_path: Path) -> None:
    assert read_kv_shape(folder(tmp_path, sliding_window=4096, use_sliding_window=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window is 4096, less than the context of 32768"),
        ({"build_config": {}, "pretrained_config": {}}, "engine directory of trtllm-build"),
        ({"architecture": "LlamaForCausalLM", "mapping": {}}, "checkpoint .convert_checkpoint."),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 512}, "latent attention .kv_lora_rank. of MistralForCausalLM"),
        (
            DEEPSEEK_V3 | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048},
            "(?s)DeepseekV32ForCausalLM is not supported.*sparse attention",
        ),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": "absent"}, "qk_rope_head_dim must be a positive"),
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


def test_a_folder_of_engines_is_recognised_by_its_files_too(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "rank0.engine").write_bytes(b"")
    with pytest.raises(CheckpointError, match="engine directory"):
        read_kv_shape(tmp_path)


@pytest.mark.parametrize(
    ("window", "limit", "is_full"),
    [(4096, 4096, True), (4096, 4097, False), (32768, 0, True), (4096, 0, False)],
)
def test_a_window_that_no_request_outgrows_is_full_attention(
    tmp_path: Path, window: int, limit: int, is_full: bool
) -> None:
    kinds = ["full_attention", "sliding_attention"]
    made = folder(tmp_path, sliding_window=window, layer_types=kinds)
    if is_full:
        assert read_kv_shape(made, context_tokens_max=limit).layers == 32
    else:
        with pytest.raises(CheckpointError, match="Set context_tokens_max to the window"):
            read_kv_shape(made, context_tokens_max=limit)


FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("asked", "beside", "inline", "kept"),
    [
        ("auto", None, None, "bfloat16"),
        ("bfloat16", None, None, "bfloat16"),
        ("fp8", None, None, "fp8"),
        ("auto", {"quantization": FP8}, None, "fp8"),
        (
            "auto",
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
            None,
            "bfloat16",
        ),
        ("auto", None, FP8 | {"quant_method": "modelopt"}, "fp8"),
        (
            "auto",
            None,
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "fp8",
        ),
        ("nvfp4", None, None, "KV would be kept in nvfp4"),
        ("auto", {"quantization": {"kv_cache_quant_algo": "INT8"}}, None, "kept in int8"),
        ("fp8", {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, None, "fp8"),
    ],
)
def test_kv_is_kept_in_what_is_asked_for_or_in_what_the_checkpoint_says(
    tmp_path: Path, asked: str, beside: Any, inline: Any, kept: str
) -> None:
    folder(tmp_path, **({"quantization_config": inline} if inline else {}))
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found: list[str] = []
    dtype = read_kv_dtype(tmp_path, asked, "bfloat16", found)
    assert kept in (found or [dtype])[0]


def test_a_block_of_fp8_has_one_byte_a_number(tmp_path: Path) -> None:
    shape = read_kv_shape(folder(tmp_path))
    assert shape.layout("fp8", 256, 1).block_bytes * 2 == (
        shape.layout("bfloat16", 256, 1).block_bytes
    )
