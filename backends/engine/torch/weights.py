"""The weights of a model as the forward pass wants them: fused, folded, on their device.

q, k and v are one matrix, gate and up are one, and the weight of each RMS norm but the last is
multiplied into the columns of the matrix after it (in float32, rounded once), so that a norm is
only a scale. So are the scales of K and V that are kept as fp8: attention never sees them.

Not here: where the bytes come from (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import CheckpointError, ModelConfig
from backends.engine.torch.linear import GatedLinear, Linear
from mooncake_store.layout import LayerRange

SCALAR_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Of fp8 KV: one number each, by one of these names (vLLM's, llm-compressor's, ModelOpt's); the last
# is of both.
KEY_SCALES = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale")
VALUE_SCALES = ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale")
KV_SCALE_SUFFIXES = tuple(f".{name}" for name in dict.fromkeys(KEY_SCALES + VALUE_SCALES))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: Linear  # heads of q, then of k, then of v
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim] (Qwen3)
    output: Linear
    gate_up: GatedLinear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a range of layers. The first stage has the embedding, the last one what makes logits."""

    embedding: torch.Tensor | None  # [vocabulary, hidden]
    layers: list[LayerWeights]
    last_norm: torch.Tensor | None  # [hidden]; not folded: tied embeddings stay one matrix
    logits: Linear | None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that this model must have."""
    hidden, inner = config.hidden, config.intermediate
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary_tokens, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_tokens, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", q_rows, hidden, config.has_qkv_bias),
            ("self_attn.k_proj", kv_rows, hidden, config.has_qkv_bias),
            ("self_attn.v_proj", kv_rows, hidden, config.has_qkv_bias),
            ("self_attn.o_proj", hidden, q_rows, config.has_output_bias),
            ("mlp.gate_proj", inner, hidden, config.has_mlp_bias),
            ("mlp.up_proj", inner, hidden, config.has_mlp_bias),
            ("mlp.down_proj", hidden, inner, config.has_mlp_bias),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.has_qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layers: LayerRange | None = None,  # None: all
    is_kv_fp8: bool = False,  # then with the scales of K and V
) -> Weights:
    """Read, check, fuse. A CheckpointError lists every tensor that is missing or wrong."""
    wanted = layers or LayerRange(0, config.layers)
    is_first, is_last = wanted.first == 0, wanted.stop == config.layers
    shapes = expected_shapes(config)
    found = checkpoint.problems(shapes, KV_SCALE_SUFFIXES)
    if found:
        raise CheckpointError(checkpoint.folder, found)
    loader = _Loader(checkpoint, dtype, device)
    loaded = [
        _load_layer(loader, config, f"model.layers.{layer}.", is_kv_fp8)
        for layer in range(wanted.first, wanted.stop)
    ]
    embedding = last_norm = head = None
    if is_first or (is_last and config.has_tied_embeddings):
        embedding = head = loader.place(loader.read("model.embed_tokens.weight"))
    if is_last:
        last_norm = loader.place(loader.read("model.norm.weight"))
        if not config.has_tied_embeddings:
            head = loader.place(loader.read("lm_head.weight"))
    if loader.found:
        raise CheckpointError(checkpoint.folder, loader.found)
    logits = Linear(head) if is_last and head is not None else None
    return Weights(embedding if is_first else None, loaded, last_norm, logits)


class _Loader:
    """Reads tensors as float32 on the CPU and places results on the device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.found: list[str] = []  # what is wrong with the numbers

    def read(self, name: str) -> torch.Tensor:
        entry = self.checkpoint.entries[name]
        raw = torch.from_numpy(self.checkpoint.read(name))
        tensor = raw.view(SCALAR_DTYPES[entry.dtype]).view(entry.shape).float()
        if not torch.isfinite(tensor).all():
            self.found.append(f"tensor {name} holds NaN or infinity; copy it again")
        return tensor

    def scale(self, names: tuple[str, ...]) -> float:
        """What the first of these tensors that is there holds; 1 where none is."""
        name = next((name for name in names if name in self.checkpoint.entries), None)
        if name is None:
            return 1.0
        if self.checkpoint.entries[name].dtype not in SCALAR_DTYPES:
            self.found.append(f"tensor {name} is {self.checkpoint.entries[name].dtype}")
            return 1.0
        tensor = self.read(name)
        if tensor.numel() != 1 or not float(tensor.view(-1)[0]) > 0:
            shown = tensor.view(-1)[:4].tolist()
            self.found.append(f"tensor {name} must be one positive number, is {shown}")
            return 1.0
        return float(tensor)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


@dataclass(frozen=True, slots=True)
class _KvScales:
    """Pages hold K / key and V / value of a layer (fp8.py)."""

    key: float
    value: float

    @classmethod
    def of_layer(cls, loader: _Loader, prefix: str) -> _KvScales:
        return cls(
            loader.scale(tuple(prefix + name for name in KEY_SCALES)),
            loader.scale(tuple(prefix + name for name in VALUE_SCALES)),
        )

    def factors(self, has_qk_norm: bool) -> dict[str, float]:
        """What matrices are multiplied by, so that pages hold what they should and attention has
        the result that it would have without: q meets K only, V goes into the output only.

        A norm of q and k would take a factor before it out again: it is in the norm then.
        """
        key = 1.0 if has_qk_norm else self.key
        return {
            "self_attn.q_proj": key, "self_attn.k_proj": 1 / key,
            "self_attn.v_proj": 1 / self.value, "self_attn.o_proj": self.value,
        }  # fmt: skip


def _load_layer(loader: _Loader, config: ModelConfig, prefix: str, is_kv_fp8: bool) -> LayerWeights:
    scales = _KvScales.of_layer(loader, prefix) if is_kv_fp8 else _KvScales(1.0, 1.0)
    factors = scales.factors(config.has_qk_norm)

    def stacked(names: tuple[str, ...], norm: torch.Tensor | None) -> torch.Tensor:
        weight = torch.cat(
            [loader.read(f"{prefix}{name}.weight") * factors.get(name, 1.0) for name in names]
        )
        return loader.place(weight if norm is None else weight * norm)

    def biases(names: tuple[str, ...], has_bias: bool) -> torch.Tensor | None:
        if not has_bias:
            return None
        scaled = {**factors, "self_attn.o_proj": 1.0}  # of what attention made, not of its input
        return loader.place(
            torch.cat(
                [loader.read(f"{prefix}{name}.bias") * scaled.get(name, 1.0) for name in names]
            )
        )

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, down = ("self_attn.o_proj",), ("mlp.down_proj",)
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    input_norm = loader.read(prefix + "input_layernorm.weight")
    inner_norm = loader.read(prefix + "post_attention_layernorm.weight")
    return LayerWeights(
        qkv=Linear(stacked(qkv, input_norm), biases(qkv, config.has_qkv_bias)),
        qk_norm=_qk_norm(loader.read, loader.place, config, prefix, scales.key),
        output=Linear(stacked(output, None), biases(output, config.has_output_bias)),
        gate_up=GatedLinear(stacked(gate_up, inner_norm), biases(gate_up, config.has_mlp_bias)),
        down=Linear(stacked(down, None), biases(down, config.has_mlp_bias)),
    )


def _qk_norm(
    read: Callable[[str], torch.Tensor],
    place: Callable[[torch.Tensor], torch.Tensor],
    config: ModelConfig,
    prefix: str,
    key_scale: float,
) -> torch.Tensor | None:
    if not config.has_qk_norm:
        return None
    q_norm = read(prefix + "self_attn.q_norm.weight").expand(config.heads, -1) * key_scale
    k_norm = read(prefix + "self_attn.k_norm.weight").expand(config.kv_heads, -1) / key_scale
    return place(torch.cat([q_norm, k_norm]))
