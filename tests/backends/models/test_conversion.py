"""A GGUF file becomes a checkpoint that the engine reads, or is rejected with all problems."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import read_model_config
from backends.models.catalogue import ModelError
from backends.models.conversion import Conversion, bfloat16
from backends.models.progress import no_progress
from tests.backends.models.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    TOKENS,
    Array,
    SmallModel,
    random_blocks,
    small_model,
)

LAYER = "model.layers.1."


def converted(model: SmallModel, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    Conversion.open(model.write(tmp_path / "model.gguf")).write(folder, no_progress)
    return folder


def tensor(folder: Path, name: str) -> Array:
    checkpoint = Checkpoint.open(folder)
    bits = checkpoint.read(name).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(checkpoint.entries[name].shape)


def problems(model: SmallModel, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Conversion.open(model.write(tmp_path / "model.gguf"))
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_engine_reads_config_and_tensors_of_each_architecture(
    architecture: str, seed: int, tmp_path: Path
) -> None:
    model = small_model(seed, architecture)
    folder = converted(model, tmp_path)
    config = read_model_config(folder)
    assert (config.family, config.layers, config.hidden) == (architecture, LAYERS, HIDDEN)
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.intermediate, config.vocabulary_tokens) == (INNER, len(TOKENS))
    assert (config.norm_epsilon, config.rope.theta) == (1e-5, 100_000.0)
    assert config.context_tokens_max == 512 and not config.has_tied_embeddings
    assert config.eos_token_ids == (2, 0)
    assert config.has_qkv_bias == (architecture == "qwen2")
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        f"{LAYER}self_attn.v_proj.weight": "blk.1.attn_v.weight",
        f"{LAYER}self_attn.o_proj.weight": "blk.1.attn_output.weight",
        f"{LAYER}mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        f"{LAYER}mlp.up_proj.weight": "blk.1.ffn_up.weight",
        f"{LAYER}mlp.down_proj.weight": "blk.1.ffn_down.weight",
        f"{LAYER}input_layernorm.weight": "blk.1.attn_norm.weight",
        f"{LAYER}post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    }.items():
        np.testing.assert_array_equal(tensor(folder, ours), model.tensors[theirs])
    if architecture == "qwen2":
        for kind in "qkv":
            for part in ("weight", "bias"):
                stored = model.tensors[f"blk.1.attn_{kind}.{part}"]
                ours = tensor(folder, f"{LAYER}self_attn.{kind}_proj.{part}")
                np.testing.assert_array_equal(ours, stored)


@pytest.mark.parametrize(("name", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_rows_of_q_and_k_of_a_llama_are_rotated_alike_before_and_after(
    name: str, heads: int, seed: int, tmp_path: Path
) -> None:
    model = small_model(seed)
    stored = model.tensors[f"blk.1.attn_{name}.weight"]
    ours = tensor(converted(model, tmp_path), f"{LAYER}self_attn.{name}_proj.weight")
    assert not np.array_equal(ours, stored)
    hidden = np.random.default_rng(seed).standard_normal(HIDDEN)
    half = HEAD_DIM // 2
    for head in range(heads):
        of_stored = (stored @ hidden)[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        of_ours = (ours @ hidden)[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        for pair in range(half):  # llama.cpp rotates neighbours, transformers the halves
            assert of_stored[2 * pair] == of_ours[pair]
            assert of_stored[2 * pair + 1] == of_ours[half + pair]


def test_quantised_rows_of_q_are_decoded_before_their_order_matters(
    seed: int, tmp_path: Path
) -> None:
    model, kind = small_model(seed), gguf.GGMLQuantizationType.Q8_0
    name = "blk.1.attn_q.weight"
    raw = random_blocks(random.Random(seed), kind, HEADS * HEAD_DIM, HIDDEN)
    model.tensors[name], model.kinds[name] = raw, kind
    ours = tensor(converted(model, tmp_path), f"{LAYER}self_attn.q_proj.weight")
    values = gguf.dequantize(raw, kind)
    expected = bfloat16(values).astype(np.uint32) << 16
    stored = expected.view(np.float32).reshape(HEADS, HEAD_DIM // 2, 2, HIDDEN)
    np.testing.assert_array_equal(ours.reshape(HEADS, 2, -1, HIDDEN), stored.swapaxes(1, 2))


def test_a_model_without_a_head_has_tied_embeddings(seed: int, tmp_path: Path) -> None:
    model = small_model(seed)
    del model.tensors["output.weight"]
    folder = converted(model, tmp_path)
    assert read_model_config(folder).has_tied_embeddings
    assert "lm_head.weight" not in Checkpoint.open(folder).entries


def test_rope_scaling_of_each_known_type_is_in_the_config(seed: int, tmp_path: Path) -> None:
    for kind, more in {"linear": {}, "yarn": {"original_context_length": 128}}.items():
        model = small_model(seed)
        scaling = {"type": kind, "factor": 4.0, **more}
        model.metadata |= {f"llama.rope.scaling.{key}": each for key, each in scaling.items()}
        (tmp_path / kind).mkdir()
        rope = read_model_config(converted(model, tmp_path / kind)).rope
        assert (rope.type, rope.factor) == (kind, 4.0)
    assert rope.original_context_tokens == 128


def test_the_frequency_factors_of_llama_3_become_its_rope_scaling(
    seed: int, tmp_path: Path
) -> None:
    model = small_model(seed)
    model.metadata["llama.rope.freq_base"] = 500_000.0
    factors = []
    for pair in range(HEAD_DIM // 2):  # as llama.cpp's converter computes them
        wavelength = 2 * np.pi * 500_000.0 ** (2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    assert len(set(factors)) > 2
    model.tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    rope = read_model_config(converted(model, tmp_path)).rope
    assert (rope.type, rope.factor, rope.original_context_tokens) == ("llama3", 32.0, 8192)
    model.tensors["rope_freqs.weight"][3] *= 1.01
    assert "rope_freqs.weight is not the RoPE scaling" in problems(model, tmp_path)


def test_all_problems_of_a_file_are_reported_at_once(seed: int, tmp_path: Path) -> None:
    model = small_model(seed)
    model.metadata["tokenizer.ggml.pre"] = "deepseek-llm"
    model.metadata |= {"llama.logit_scale": 0.5, "llama.block_count": 2**31}
    del model.metadata["llama.context_length"]
    name, kind = "blk.0.ffn_up.weight", gguf.GGMLQuantizationType.IQ4_NL
    model.tensors[name] = np.zeros((INNER, HIDDEN // 32 * 18), np.uint8)
    model.kinds[name] = kind
    text = problems(model, tmp_path)
    assert "'deepseek-llm', which is not supported; known: gpt-2, smollm, qwen2, llama-bpe" in text
    assert "llama.logit_scale is 0.5, which is not supported" in text
    assert "llama.block_count is 2147483648, but few tensors are there" in text
    assert "llama.context_length must be a positive integer, is None" in text
    assert f"{name} has the unsupported type IQ4_NL; known: F32, F16, BF16, Q4_0" in text


def test_an_unknown_architecture_is_rejected_by_name(seed: int, tmp_path: Path) -> None:
    model = small_model(seed)
    model.metadata |= {"general.architecture": "mamba", "tokenizer.ggml.pre": ["smollm"]}
    text = problems(model, tmp_path)
    assert "general.architecture is 'mamba', not supported; known: llama, qwen2" in text
    assert "tokenizer.ggml.pre is" in text


def test_missing_extra_and_misshapen_tensors_are_rejected_by_name(
    seed: int, tmp_path: Path
) -> None:
    model = small_model(seed)
    del model.tensors["blk.0.attn_k.weight"]
    model.tensors["blk.0.attn_q.bias"] = np.zeros(HIDDEN, np.float32)
    model.tensors["output_norm.weight"] = np.zeros(HIDDEN + 1, np.float32)
    text = problems(model, tmp_path)
    assert "tensor blk.0.attn_k.weight is missing" in text
    assert "tensor blk.0.attn_q.bias is not supported in this architecture" in text
    assert "tensor output_norm.weight is [65], must be [64]" in text


def test_a_file_that_is_cut_short_anywhere_is_rejected(seed: int, tmp_path: Path) -> None:
    whole = small_model(seed).write(tmp_path / "whole.gguf").read_bytes()
    rng, path = random.Random(seed), tmp_path / "cut.gguf"
    for length in (0, 3, 4, 23, 24, *(rng.randrange(len(whole)) for _ in range(20))):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"is no GGUF file, or damaged .*; copy it again"):
            Conversion.open(path)


def test_damaged_bytes_in_the_header_end_in_no_other_error(seed: int, tmp_path: Path) -> None:
    whole = bytearray(small_model(seed).write(tmp_path / "whole.gguf").read_bytes())
    header_bytes = len(whole) - sum(each.nbytes for each in small_model(seed).tensors.values())
    rng, path = random.Random(seed), tmp_path / "damaged.gguf"
    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(header_bytes)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            Conversion.open(path)
        except ModelError:
            continue


def test_a_file_that_is_no_gguf_or_is_missing_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("a text, not a model " * 100)
    with pytest.raises(ModelError, match="is no GGUF file"):
        Conversion.open(tmp_path / "text.gguf")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        Conversion.open(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        Conversion.open(tmp_path)


def test_the_files_hold_the_special_ids_and_the_chat_template(seed: int, tmp_path: Path) -> None:
    folder = converted(small_model(seed), tmp_path)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_max_length"] == 512 and "<|im_end|>" in config["chat_template"]
