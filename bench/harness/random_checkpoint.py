"""A random Llama in the format of Hugging Face, for benchmarks that need a model of some size.

Made without transformers: config.json and one safetensors file (its header in JSON, then numbers).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.engine.model_config import read_model_config
from backends.engine.torch.weights import expected_shapes


@dataclass(frozen=True, slots=True)
class LlamaShape:
    layers: int = 12
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1024
    vocabulary_tokens: int = 2048
    positions: int = 16_640

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in float32."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 4


def make_llama(folder: Path, shape: LlamaShape, seed: int = 1) -> Path:
    """Writes the checkpoint into an empty folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",  # transformers requires it
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary_tokens,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(read_model_config(folder))
    rng, header, at = np.random.default_rng(seed), {}, 0
    for name, sizes in shapes.items():
        length_bytes = 4 * int(np.prod(sizes))
        header[name] = {
            "dtype": "F32",
            "shape": list(sizes),
            "data_offsets": [at, at + length_bytes],
        }
        at += length_bytes
    packed = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for name, sizes in shapes.items():
            is_norm = name.endswith("norm.weight")
            numbers = rng.standard_normal(sizes, dtype=np.float32)
            values = 1 + 0.1 * numbers if is_norm else numbers / np.float32(np.sqrt(sizes[-1]))
            file.write(values.astype(np.float32).tobytes())
    return folder
