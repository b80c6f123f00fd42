"""What makes two engines' KV different is in the fingerprint; what does not, is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.engine.connected.kv_identity import HARMLESS_KEYS, KvIdentity
from backends.engine.trtllm.kv_shape import (
    HARMLESS_OPTIONS,
    options_that_reach_kv,
    pages_description,
)
from backends.engine.trtllm.settings import TrtllmConfig
from tests.backends.trtllm.test_kv_shape import MISTRAL

FULL: dict[str, Any] = MISTRAL | {
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "rms_norm_eps": 1e-5,
    "_name_or_path": "here",
    "transformers_version": "4.57.3",
}


def identity(folder: Path, raw: dict[str, Any], **beside: dict[str, Any]) -> KvIdentity:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return KvIdentity.of_folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rms_norm_eps": 1e-6},
        {"num_attention_heads": 16},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 8192},  # some kinds of RoPE depend on it
        {"a_key_of_a_later_family": 1},
        {"sliding_window": 4096},
    ],
)
def test_what_config_json_says_of_the_computation_is_part_of_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert identity(tmp_path / "a", FULL) != identity(tmp_path / "b", FULL | change)


@pytest.mark.parametrize("key", sorted(HARMLESS_KEYS))
def test_where_it_came_from_and_how_it_ends_is_not(tmp_path: Path, key: str) -> None:
    changed = FULL | {key: "another"}
    assert identity(tmp_path / "a", FULL) == identity(tmp_path / "b", changed)


def test_the_order_of_keys_is_not(tmp_path: Path) -> None:
    turned = dict(reversed(list(FULL.items())))
    assert identity(tmp_path / "a", FULL) == identity(tmp_path / "b", turned)


def test_quantisation_that_stands_beside_config_json_is_part_of_it(tmp_path: Path) -> None:
    quantised = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    plain = identity(tmp_path / "a", FULL)
    assert plain != identity(tmp_path / "b", FULL, hf_quant_config=quantised)


def test_an_option_is_part_of_it_unless_it_is_known_to_be_harmless() -> None:
    options = {
        "attn_backend": "FLASHINFER",
        "moe_config": {"backend": "CUTLASS"},
        "kv_cache_config": {"dtype": "fp8", "event_buffer_max_size": 9, "enable_block_reuse": True},
        "model_kwargs": {"rope_theta": 1.0},
        "of_a_later_release": 1,
    }
    assert options_that_reach_kv(options) == {
        "attn_backend": "FLASHINFER",
        "moe_config.backend": "CUTLASS",
        "kv_cache_config.dtype": "fp8",
        "model_kwargs.rope_theta": 1.0,
        "of_a_later_release": 1,
    }


@pytest.mark.parametrize("name", sorted(HARMLESS_OPTIONS))
def test_when_a_step_runs_and_what_is_counted_is_not(name: str) -> None:
    outer, _, inner = name.partition(".")
    assert options_that_reach_kv({outer: {inner: 1} if inner else 1}) == {}


def test_two_workers_that_only_a_refusal_tells_apart_read_what_differs() -> None:
    def described(**options: Any) -> str:
        return pages_description(
            "1.2.1", TrtllmConfig(tp_size=2), "bfloat16", options_that_reach_kv(options)
        )

    assert described() == "tensorrt_llm-1.2.1-tp2-page32-bfloat16"
    assert described(attn_backend="FLASHINFER").endswith('{"attn_backend":"FLASHINFER"}')
    newer = pages_description("1.3.0", TrtllmConfig(tp_size=2), "bfloat16", {})
    assert newer != described(), "pages are laid out as that release likes"
