"""Config and tensor names of a Hugging Face folder, from a GGUF file's metadata and tensors.

Metadata and tensors of an architecture that are not listed here are rejected by name, because they
may change what the model computes.

llama.cpp rotates the scalars 2i and 2i + 1 of a Llama's head; transformers rotates i and i + half.
Files of the architecture `llama` therefore hold the rows of q and k in another order, which is
undone here. Qwen2 is rotated alike in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.models.gguf_file import GgufFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
IGNORED_KEYS = ("vocab_size", "rope.scaling.finetuned")  # have no influence on a result
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Llama 3.1 and 3.2 have ROPE_FACTORS. Only `factor` differs between these models.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(slots=True)
class _Keys:
    """Reads `ARCHITECTURE.KEY`. A wrong value adds a problem and becomes a 1."""

    metadata: Mapping[str, Any]
    prefix: str
    found: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(self.prefix + key)
        return self.metadata.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is int and value > 0:
            return value
        self.found.append(f"{self.prefix}{key} must be a positive integer, is {_shown(value)}")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal number whose float32 is the stored one, such as 1e-05."""
        value = self.get(key, default)
        if type(value) in (int, float) and 0 < value < math.inf:
            return float(str(np.float32(value)))
        self.found.append(f"{self.prefix}{key} must be a positive number, is {_shown(value)}")
        return 1.0


def read_config(file: GgufFile) -> tuple[dict[str, Any], list[str]]:
    """(config.json without the ids of special tokens, []), or ({}, all problems)."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return {}, [f"general.architecture is {_shown(name)}, not supported; known: {known}"]
    keys = _Keys(file.metadata, f"{name}.")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.integer(key, head_dim)) != head_dim:
            keys.found.append(f"{keys.prefix}{key} is {size}, but a head's K has {head_dim}")
    if heads % kv_heads or head_dim % 2:
        keys.found.append(f"{heads} heads and {kv_heads} KV heads of {head_dim} scalars do not fit")
    theta, layers = keys.number("rope.freq_base", 10_000.0), keys.integer("block_count")
    if layers > len(file.tensors):
        keys.found.append(f"{keys.prefix}block_count is {layers}, but few tensors are there")
    config = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, keys, theta, head_dim),
        "tie_word_embeddings": HEAD not in file.tensors,
        "vocab_size": file.shape(EMBEDDING)[0] if EMBEDDING in file.tensors else 0,
        "torch_dtype": "bfloat16",
    }
    ignored = {keys.prefix + key for key in IGNORED_KEYS}
    for key in sorted(file.metadata.keys() - keys.read - ignored):
        if key.startswith(keys.prefix):
            keys.found.append(f"{key} is {_shown(file.metadata[key])}, which is not supported")
    return ({} if keys.found else config), keys.found


def _rope_scaling(
    file: GgufFile, keys: _Keys, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = str(keys.get("rope.scaling.type", "none"))
    if ROPE_FACTORS in file.tensors and kind == "none":
        return _llama3_scaling(file, keys, theta, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or ROPE_FACTORS in file.tensors:
        keys.found.append(
            f"{keys.prefix}rope.scaling.type {_shown(kind)} is not supported, or not beside the "
            f"tensor {ROPE_FACTORS}; known: none, linear, yarn"
        )
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        tokens = keys.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = tokens
    return scaling


def _llama3_scaling(
    file: GgufFile, keys: _Keys, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The scaling that divides the frequencies by ROPE_FACTORS; a problem if there is none."""
    stored = np.asarray(file.tensors[ROPE_FACTORS].data, np.float32).ravel()
    factor = float(stored.max(initial=1.0))
    low, high, original = LLAMA3_ROPE.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    keys.found.append(f"tensor {ROPE_FACTORS} is not the RoPE scaling of Llama 3.1 or 3.2")
    return None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of the checkpoint is in the GGUF file."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0  # > 0: the rows of so many heads are in llama.cpp's order

    @property
    def size_bytes(self) -> int:  # in bfloat16
        return 2 * math.prod(self.shape)

    @property
    def row_order(self) -> NDArray[np.intp] | None:
        """The stored row for each row of a Hugging Face folder; None: the same."""
        if not self.rotary_heads:
            return None
        rows = np.arange(self.shape[0], dtype=np.intp)
        return rows.reshape(self.rotary_heads, -1, 2).swapaxes(1, 2).ravel()


def tensors_of(config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by their names in a Hugging Face folder."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    is_llama = config["model_type"] == "llama"
    of_layer = (
        ("self_attn.q_proj", "attn_q", (q_rows, hidden), heads if is_llama else 0),
        ("self_attn.k_proj", "attn_k", (kv_rows, hidden), kv_heads if is_llama else 0),
        ("self_attn.v_proj", "attn_v", (kv_rows, hidden), 0),
        ("self_attn.o_proj", "attn_output", (hidden, q_rows), 0),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0),
        ("mlp.up_proj", "ffn_up", (inner, hidden), 0),
        ("mlp.down_proj", "ffn_down", (hidden, inner), 0),
        ("input_layernorm", "attn_norm", (hidden,), 0),
        ("post_attention_layernorm", "ffn_norm", (hidden,), 0),
    )
    vocabulary = (config["vocab_size"], hidden)
    found = {"model.embed_tokens.weight": StoredTensor(EMBEDDING, vocabulary)}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, shape, rotary_heads in of_layer:
            name, stored = f"model.layers.{layer}.{ours}", f"blk.{layer}.{theirs}"
            found[f"{name}.weight"] = StoredTensor(f"{stored}.weight", shape, rotary_heads)
            if not is_llama and theirs in ("attn_q", "attn_k", "attn_v"):
                found[f"{name}.bias"] = StoredTensor(f"{stored}.bias", shape[:1])
    found["model.norm.weight"] = StoredTensor("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = StoredTensor(HEAD, vocabulary)
    return found


def tensor_problems(file: GgufFile, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Tensors that are missing, have a wrong shape, or are not part of the model."""
    for tensor in tensors.values():
        if tensor.name not in file.tensors:
            yield f"tensor {tensor.name} is missing"
        elif (shape := file.shape(tensor.name)) != tensor.shape:
            yield f"tensor {tensor.name} is {list(shape)}, must be {list(tensor.shape)}"
    names = {tensor.name for tensor in tensors.values()}
    for name in sorted(file.tensors.keys() - names - {ROPE_FACTORS}):
        yield f"tensor {name} is not supported in this architecture"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
