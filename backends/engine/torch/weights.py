"""Loads the weights of a model for the forward pass: fused, folded, on their device.

Fused: the projections of q, k and v are one matrix, and those of gate and up are one. Folded: the
weight of an RMS norm is multiplied into the columns of the next matrix, in float32 and rounded
once. Exceptions are the last norm and Qwen3's norms of q and k. With bfloat16 weights and float32
activations, layer norms are not folded, because rounding the product again would add an error. The
scales of fp8 K and V are folded into matrices or norms too, so attention does not need them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import CheckpointError, LatentConfig, ModelConfig
from backends.engine.torch.layers.feed_forward import (
    DenseFeedForward,
    ExpertsFeedForward,
    FeedForward,
    Router,
)
from backends.engine.torch.layers.grouped_attention import GroupedWeights
from backends.engine.torch.layers.latent_attention import LatentWeights
from backends.engine.torch.linear import Linear
from backends.engine.torch.mixed_products import activations_dtype
from mooncake_store.layout import LayerRange

log = logging.getLogger(__name__)

Matrix = tuple[str, int, int, bool]  # name, rows, columns, has a bias
HEAD = "lm_head.weight"
NAMED_MAX = 20  # most tensor names in a warning
CORRECTION = "mlp.gate.e_score_correction_bias"
SCALAR_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Names of the scale of fp8 K or V. The first name that a checkpoint has is used. The last name is
# one scale for both K and V.
KEY_SCALES = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale")
VALUE_SCALES = ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale")
KV_SCALE_SUFFIXES = tuple(f".{name}" for name in dict.fromkeys(KEY_SCALES + VALUE_SCALES))
NO_FACTORS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: GroupedWeights | LatentWeights
    output: Linear  # attention's output projection
    feed_forward: FeedForward
    input_norm: torch.Tensor | None = None  # [hidden]; None: folded into the next matrices
    inner_norm: torch.Tensor | None = None  # [hidden], before the feed-forward; None: folded


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a pipeline stage. Without pipelining, the one stage is the first and the last."""

    embedding: torch.Tensor | None  # [vocabulary, hidden]; None: not the first stage
    layers: list[LayerWeights]
    last_norm: torch.Tensor | None  # [hidden], not folded into the head; None: not the last stage
    logits: Linear | None  # the head (lm_head); None: not the last stage

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices."""
        return self.layers[0].output.dtype


def expected_shapes(config: ModelConfig, has_own_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor. `has_own_head`: include lm_head even with tied embeddings."""
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary_tokens, hidden),
        "model.norm.weight": (hidden,),
    }
    if has_own_head or not config.has_tied_embeddings:
        shapes[HEAD] = (config.vocabulary_tokens, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        attention = _grouped_matrices(config) if config.latent is None else _latent_matrices(config)
        for name, rows, columns, has_bias in attention + _feed_forward_matrices(config, layer):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.latent is not None:
            shapes[prefix + "self_attn.kv_a_layernorm.weight"] = (config.latent.rank,)
            if config.latent.query_rank:
                shapes[prefix + "self_attn.q_a_layernorm.weight"] = (config.latent.query_rank,)
        if config.experts is not None and config.has_experts(layer):
            shapes[prefix + CORRECTION] = (config.experts.count,)
        if config.has_qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _grouped_matrices(config: ModelConfig) -> list[Matrix]:
    hidden = config.hidden
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return [
        ("self_attn.q_proj", q_rows, hidden, config.has_qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.has_qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.has_qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.has_output_bias),
    ]


def _latent_matrices(config: ModelConfig) -> list[Matrix]:
    latent, hidden, heads = config.latent, config.hidden, config.heads
    assert latent is not None
    query = [("self_attn.q_proj", heads * latent.query_dim, hidden, False)]
    if latent.query_rank:
        query = [
            ("self_attn.q_a_proj", latent.query_rank, hidden, config.has_qkv_bias),
            ("self_attn.q_b_proj", heads * latent.query_dim, latent.query_rank, False),
        ]
    expanded = heads * (latent.plain_dim + latent.value_dim)
    return [
        *query,
        ("self_attn.kv_a_proj_with_mqa", latent.row, hidden, config.has_qkv_bias),
        ("self_attn.kv_b_proj", expanded, latent.rank, False),
        ("self_attn.o_proj", hidden, heads * latent.value_dim, config.has_output_bias),
    ]


def _feed_forward_matrices(config: ModelConfig, layer: int) -> list[Matrix]:
    def dense(prefix: str, inner: int) -> list[Matrix]:
        return [
            (prefix + "gate_proj", inner, config.hidden, config.has_mlp_bias),
            (prefix + "up_proj", inner, config.hidden, config.has_mlp_bias),
            (prefix + "down_proj", config.hidden, inner, config.has_mlp_bias),
        ]

    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return dense("mlp.", config.intermediate)
    found: list[Matrix] = [("mlp.gate", experts.count, config.hidden, False)]
    found += dense("mlp.shared_experts.", experts.shared * experts.intermediate)
    for expert in range(experts.count):
        found += dense(f"mlp.experts.{expert}.", experts.intermediate)
    return found


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layers: LayerRange | None = None,  # None: all
    is_kv_fp8: bool = False,  # True: load the scales of fp8 K and V too
) -> Weights:
    """Check, read and fuse. Raises CheckpointError with all missing, wrong and unknown tensors of
    the model. If there are none, it raises CheckpointError with all invalid values in `layers`."""
    wanted = layers or LayerRange(0, config.layers)
    is_first, is_last = wanted.first == 0, wanted.stop == config.layers
    has_head = HEAD in checkpoint.entries
    shapes = expected_shapes(config, has_head)
    # Layers for multi-token prediction. The engine does not use them, so it reads no such tensor.
    predicting = range(config.layers, config.layers + config.predicting_layers)
    optional = KV_SCALE_SUFFIXES, tuple(f"model.layers.{layer}." for layer in predicting)
    found = checkpoint.problems(shapes, *optional)
    if found:
        raise CheckpointError(checkpoint.folder, found)
    if unread := [*checkpoint.others(shapes, *optional), *checkpoint.stale]:
        more = f" and {len(unread) - NAMED_MAX} more" if len(unread) > NAMED_MAX else ""
        log.warning(
            "%s: tensors that are not read: %s%s",
            checkpoint.folder,
            ", ".join(unread[:NAMED_MAX]),
            more,
        )
    loader = _Loader(checkpoint, dtype, activations_dtype(dtype, device), device)
    loaded = [
        _load_layer(loader, config, layer, is_kv_fp8) for layer in range(wanted.first, wanted.stop)
    ]
    embedding = last_norm = head = None
    if is_first or (is_last and config.has_tied_embeddings):
        embedding = head = loader.place(loader.read("model.embed_tokens.weight"))
    if is_last:
        last_norm = loader.place_activations(loader.read("model.norm.weight"))
        if has_head:
            own_head = loader.place(loader.read(HEAD))
            if head is None or not torch.equal(own_head, head):
                head = own_head
                if config.has_tied_embeddings:  # use both matrices, as transformers does
                    log.warning(
                        "%s: config.json has tie_word_embeddings, but %s is not the embedding: "
                        "both are used",
                        checkpoint.folder,
                        HEAD,
                    )
    if loader.found:
        raise CheckpointError(checkpoint.folder, loader.found)
    logits = Linear(head) if is_last and head is not None else None
    return Weights(embedding if is_first else None, loaded, last_norm, logits)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads tensors as float32 on the CPU and places results on the device."""

    checkpoint: Checkpoint
    dtype: torch.dtype  # of matrices
    activations: torch.dtype  # of the activations, and so of norms and biases
    device: torch.device
    found: list[str] = field(default_factory=list)  # one line per tensor with wrong values

    def read(self, name: str) -> torch.Tensor:
        entry = self.checkpoint.entries[name]
        raw = torch.from_numpy(self.checkpoint.read(name))
        tensor = raw.view(SCALAR_DTYPES[entry.dtype]).view(entry.shape).float()
        # NaN and infinity make the sum NaN or infinite. A sum takes 2 % of the time of isfinite.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            self.found.append(f"tensor {name} holds NaN or infinity; copy it again")
        return tensor

    def scale(self, prefix: str, suffixes: tuple[str, ...]) -> float:
        """Scale in the first existing tensor of these names. Missing or wrong (see `found`): 1."""
        names = (prefix + suffix for suffix in suffixes)
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

    def place_activations(self, tensor: torch.Tensor) -> torch.Tensor:
        """Place a tensor that is added to activations or multiplied with them."""
        return tensor.to(device=self.device, dtype=self.activations).contiguous()

    def norm(self, name: str) -> tuple[torch.Tensor | float, torch.Tensor | None]:
        """A norm's weight: (factors to fold into the next matrices, weight of the norm itself)."""
        weight = self.read(name)
        if self.activations == self.dtype:
            return weight, None
        return 1.0, self.place_activations(weight)

    def linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        has_bias: bool,
        norm: torch.Tensor | float = 1.0,
        factors: Mapping[str, float] = NO_FACTORS,
    ) -> Linear:
        """The matrices `names`, stacked by rows, with their stacked biases.

        `factors`: name -> factor of the matrix and its bias. `norm`: factors of the matrices'
        columns, not of the biases."""

        def stacked(kind: str) -> torch.Tensor:
            parts = (self.read(f"{prefix}{name}.{kind}") for name in names)
            scaled = zip(names, parts, strict=True)
            return torch.cat([part.mul_(factors.get(name, 1.0)) for name, part in scaled])

        bias = self.place_activations(stacked("bias")) if has_bias else None
        return Linear(self.place(stacked("weight").mul_(norm)), bias)


@dataclass(frozen=True, slots=True)
class _KvScales:
    """Scales of fp8 KV in a layer: its pages hold K / `key` and V / `value` (fp8.py)."""

    key: float = 1.0  # > 0
    value: float = 1.0  # > 0


def _load_layer(loader: _Loader, config: ModelConfig, layer: int, is_kv_fp8: bool) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    scales = _KvScales()
    if is_kv_fp8:
        scales = _KvScales(loader.scale(prefix, KEY_SCALES), loader.scale(prefix, VALUE_SCALES))
    if config.latent is not None and scales != _KvScales():
        loader.found.append(f"{prefix}: scales of fp8 KV are not supported in latent attention")
    input_factors, input_norm = loader.norm(prefix + "input_layernorm.weight")
    inner_factors, inner_norm = loader.norm(prefix + "post_attention_layernorm.weight")
    attention = prefix + "self_attn."
    load = _load_experts if config.has_experts(layer) else _load_dense
    feed_forward: FeedForward = load(loader, config, prefix + "mlp.", inner_factors)
    return LayerWeights(
        attention=(
            _load_grouped(loader, config, attention, input_factors, scales)
            if config.latent is None
            else _load_latent(loader, config, config.latent, attention, input_factors)
        ),
        # Pages hold V / scale, so attention's result is too small by that factor.
        output=loader.linear(attention, ("o_proj",), config.has_output_bias, scales.value),
        feed_forward=feed_forward,
        input_norm=input_norm,
        inner_norm=inner_norm,
    )


def _load_grouped(
    loader: _Loader, config: ModelConfig, prefix: str, norm: torch.Tensor | float, scales: _KvScales
) -> GroupedWeights:
    # Scores q x K do not change if q is multiplied by the scale and K is divided by it. Qwen3's
    # norms of q and k would cancel factors before them, so the factors are in these norms.
    key = 1.0 if config.has_qk_norm else scales.key
    factors = {"q_proj": key, "k_proj": 1 / key, "v_proj": 1 / scales.value}
    linear = loader.linear(prefix, tuple(factors), config.has_qkv_bias, norm, factors)
    if not config.has_qk_norm:
        return GroupedWeights(linear)
    q_norm = loader.read(prefix + "q_norm.weight").expand(config.heads, -1) * scales.key
    k_norm = loader.read(prefix + "k_norm.weight").expand(config.kv_heads, -1) / scales.key
    return GroupedWeights(linear, loader.place_activations(torch.cat([q_norm, k_norm])))


def _load_dense(
    loader: _Loader, config: ModelConfig, prefix: str, norm: torch.Tensor | float
) -> DenseFeedForward:
    return DenseFeedForward(
        loader.linear(prefix, ("gate_proj", "up_proj"), config.has_mlp_bias, norm),
        loader.linear(prefix, ("down_proj",), config.has_mlp_bias),
    )


def _load_experts(
    loader: _Loader, config: ModelConfig, prefix: str, norm: torch.Tensor | float
) -> ExpertsFeedForward:
    assert config.experts is not None
    router = Router(
        config.experts,
        (loader.read(prefix + "gate.weight") * norm).to(loader.device),
        loader.read(prefix + "gate.e_score_correction_bias").to(loader.device),
    )
    experts = [
        _load_dense(loader, config, f"{prefix}experts.{expert}.", norm)
        for expert in range(config.experts.count)
    ]
    return ExpertsFeedForward(
        router, experts, _load_dense(loader, config, prefix + "shared_experts.", norm)
    )


def _load_latent(
    loader: _Loader,
    config: ModelConfig,
    latent: LatentConfig,
    prefix: str,
    norm: torch.Tensor | float,
) -> LatentWeights:
    def halved(rotary: torch.Tensor) -> torch.Tensor:
        """Reorder interleaved rows of `rotary` [..., rows, columns]: even rows, then odd rows."""
        if not latent.is_interleaved:
            return rotary
        return torch.cat([rotary[..., 0::2, :], rotary[..., 1::2, :]], dim=-2)

    def query(name: str, own_norm: torch.Tensor) -> torch.Tensor:
        weight = loader.read(f"{prefix}{name}.weight") * own_norm * config.rope.score_factor
        heads = weight.view(config.heads, latent.query_dim, -1)
        plain, rotary = heads.split([latent.plain_dim, latent.rotary_dim], dim=1)
        return torch.cat([plain, halved(rotary)], dim=1).reshape(weight.shape)

    down = loader.read(prefix + "kv_a_proj_with_mqa.weight") * norm
    down = torch.cat([down[: latent.rank], halved(down[latent.rank :])])
    if latent.query_rank:
        first = loader.read(prefix + "q_a_proj.weight") * norm
        own_norm = loader.read(prefix + "q_a_layernorm.weight")
        from_latent = Linear(loader.place(query("q_b_proj", own_norm)))
    else:
        first, from_latent = query("q_proj", norm), None
    bias = None
    if config.has_qkv_bias:
        down_bias = loader.read(prefix + "kv_a_proj_with_mqa.bias").unsqueeze(1)
        down_bias = torch.cat([down_bias[: latent.rank], halved(down_bias[latent.rank :])])
        no_bias = torch.zeros(len(first))
        first_bias = loader.read(prefix + "q_a_proj.bias") if latent.query_rank else no_bias
        bias = loader.place_activations(torch.cat([first_bias, down_bias.squeeze(1)]))
    up = loader.read(prefix + "kv_b_proj.weight") * loader.read(prefix + "kv_a_layernorm.weight")
    keys, values = up.view(config.heads, -1, latent.rank).split(
        [latent.plain_dim, latent.value_dim], dim=1
    )
    into = Linear(loader.place(torch.cat([first, down])), bias)
    keys, values = loader.place_activations(keys), loader.place_activations(values)
    return LatentWeights(into, from_latent, keys, values)
