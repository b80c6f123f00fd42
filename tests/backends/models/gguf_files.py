"""Small GGUF files of random models, and the tensors of the checkpoints that they become."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "12 3", "123 4", "Ġ Ġ", "ĠĠ Ġ", "a b"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>", "[PAD0]"]
TYPES = [3] * len(SPECIAL) + [1] * (len(BYTES) + len(MERGES)) + [4, 5]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
Array = NDArray[Any]


@dataclass
class SmallModel:
    """A GGUF file before it is written; tests change its parts."""

    metadata: dict[str, Any]
    tensors: dict[str, Array]  # float32 values, or raw bytes if the name is in `kinds`
    kinds: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.metadata["general.architecture"])
        for key, value in self.metadata.items():
            if key == "general.architecture":
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values, raw_dtype=self.kinds.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def small_model(seed: int, architecture: str = "llama") -> SmallModel:
    """A random model with an untied head. All values are exact in bfloat16."""
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> Array:
        return rng.integers(-128, 128, shape).astype(np.float32) / 64

    tensors = {"token_embd.weight": values(len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = values(*shape)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}.bias"] = values(shape[0])
    tensors |= {"output_norm.weight": values(HIDDEN), "output.weight": values(len(TOKENS), HIDDEN)}
    sizes = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100_000.0,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    return SmallModel(metadata, tensors)


def random_blocks(
    rng: random.Random, kind: gguf.GGMLQuantizationType, rows: int, scalars: int
) -> Array:
    """Random bytes of whole blocks, [rows, bytes]. Halves that are not finite become finite."""
    block_scalars, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows * scalars // block_scalars
    raw = np.frombuffer(rng.randbytes(blocks * block_bytes), np.uint8).reshape(blocks, -1).copy()
    for offset in HALVES[kind.name]:
        raw[:, offset + 1] &= 0b10111111  # the exponent is never all ones
    return raw.reshape(rows, -1)


# Offsets of the float16 scales and minima in a block.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
