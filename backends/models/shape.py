"""The model's architecture and sizes, from a GGUF file's metadata to config.json.

Metadata of the architecture that is not listed here is rejected by name, because it may change what
the model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.models.gguf_file import GgufFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Keys `ARCHITECTURE.KEY` that are read here.
KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
)
# Keys that repeat what the tensors say, or do not matter to a result.
IGNORED_KEYS = ("vocab_size", "rope.scaling.finetuned")
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Llama 3.1 and 3.2, the only models with ROPE_FACTORS. Only `factor` differs between them.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_TOLERANCE = 1e-4  # relative


@dataclass(frozen=True, slots=True)
class ModelShape:
    architecture: str  # a key of ARCHITECTURES
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary_tokens: int
    context_tokens_max: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # as in config.json
    has_tied_embeddings: bool

    def config_json(self) -> dict[str, Any]:
        """The content of config.json without the ids of special tokens."""
        biases = {"attention_bias": False, "mlp_bias": False}
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_tokens_max,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.has_tied_embeddings,
            "vocab_size": self.vocabulary_tokens,
            "torch_dtype": "bfloat16",
            **(biases if self.architecture == "llama" else {"use_sliding_window": False}),
        }


@dataclass(slots=True)
class _Keys:
    """Reads `ARCHITECTURE.KEY`. A wrong value adds a problem to `found` and becomes a 1."""

    file: GgufFile
    prefix: str
    found: list[str] = field(default_factory=list)

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.found.append(f"{self.prefix}{key} must be a positive integer, is {_shown(value)}")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal number whose float32 is the stored one, such as 1e-05."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.found.append(f"{self.prefix}{key} must be a positive number, is {_shown(value)}")
            return 1.0
        return float(str(np.float32(value)))


def read_shape(file: GgufFile) -> tuple[ModelShape | None, list[str]]:
    """(shape, []), or (None, all problems)."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return None, [f"general.architecture is {_shown(name)}, not supported; known: {known}"]
    keys = _Keys(file, f"{name}.")
    listed = {keys.prefix + key for key in (*KEYS, *IGNORED_KEYS)}
    for key in sorted(file.metadata.keys() - listed):
        if key.startswith(keys.prefix):
            keys.found.append(f"{key} is {_shown(file.metadata[key])}, which is not supported")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.integer(key, head_dim)) != head_dim:
            keys.found.append(f"{keys.prefix}{key} is {size}, but a head's K has {head_dim}")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads or head_dim % 2:
        keys.found.append(f"{heads} heads, {kv_heads} KV heads, {head_dim} a head do not fit")
    theta = keys.number("rope.freq_base", 10_000.0)
    embedding = file.tensors.get(EMBEDDING)
    shape = ModelShape(
        architecture=name,
        layers=keys.integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.integer("feed_forward_length"),
        vocabulary_tokens=embedding.shape[0] if embedding else 0,
        context_tokens_max=keys.integer("context_length"),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(keys, theta, head_dim),
        has_tied_embeddings=HEAD not in file.tensors,
    )
    return (None if keys.found else shape), keys.found


def _rope_scaling(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    has_factors = ROPE_FACTORS in keys.file.tensors
    if kind in (None, "none"):
        return _llama3_scaling(keys, theta, head_dim) if has_factors else None
    if kind not in ("linear", "yarn") or has_factors:
        keys.found.append(
            f"{keys.prefix}rope.scaling.type is {_shown(kind)}"
            f"{f' beside {ROPE_FACTORS}' if has_factors else ''}, which is not supported; "
            "known: none, linear, yarn"
        )
        return None
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        tokens = keys.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = tokens
    return scaling


def _llama3_scaling(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling whose divisors of the frequencies are ROPE_FACTORS; a problem if none is."""
    if keys.file.tensors[ROPE_FACTORS].type_name != "F32" or any(
        keys.file.tensor_problems(ROPE_FACTORS)
    ):
        keys.found.append(f"tensor {ROPE_FACTORS} must be a whole tensor of type F32")
        return None
    stored = np.concatenate([each.ravel() for each in keys.file.rows(ROPE_FACTORS, None)])
    factor = float(stored.max())
    low, high, original = LLAMA3_ROPE.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, LLAMA3_TOLERANCE, 0):
        keys.found.append(f"tensor {ROPE_FACTORS} is not RoPE scaling as in Llama 3.1 or 3.2")
        return None
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
