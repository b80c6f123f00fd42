"""Reads and validates config.json of a Hugging Face folder.

Supported models are Llama, Mistral, Qwen2, Qwen3 and DeepSeek-V3. Kimi K2 is supported too, because
it has the architecture of DeepSeek-V3. RoPE keys may be those of transformers 4 (`rope_theta`,
`rope_scaling`) or of transformers 5 (`rope_parameters`). A feature that the engine cannot compute
exactly is rejected by name. The keys of an unknown architecture are not checked. This module does
not import torch, so that `mooncake config` works without torch.

Not here: the tensors (checkpoint.py), the computation of RoPE (rope.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mooncake_store.layout import KvLayout, LayerRange

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
MISTRAL_WINDOW_TOKENS = 4096  # sliding window if a Mistral's config.json has no such key
T = TypeVar("T")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of rotary position embedding (RoPE), with the meanings in transformers."""

    theta: float  # base of the frequencies, > 0
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0  # ratio of the extended to the original context; > 0
    low_freq_factor: float = 1.0  # only `llama3`
    high_freq_factor: float = 4.0  # only `llama3`; above low_freq_factor
    original_context_tokens: int = 0  # context before the extension; > 0 for `llama3` and `yarn`
    beta_fast: float = 32.0  # only `yarn`
    beta_slow: float = 1.0  # only `yarn`
    table_factor: float = 1.0  # multiplies cosines and sines; 1 except for `yarn`
    score_factor: float = 1.0  # multiplies attention scores; only latent attention uses it


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA) of DeepSeek-V3. Sizes are numbers of scalars."""

    query_rank: int  # size of the query's latent; 0: q is projected from the hidden state
    rank: int  # size of the latent from which K and V of all heads are projected
    plain_dim: int  # size of the part of a head's q and k that RoPE does not rotate
    rotary_dim: int  # size of the part that RoPE rotates; all heads share this part of k
    value_dim: int  # size of a head's V
    is_interleaved: bool  # RoPE rotates scalars 2i and 2i+1; False: i and i + rotary_dim / 2

    @property
    def row(self) -> int:
        """Number of scalars per token and layer in a page: the latent and the rotated part of k."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:  # scalars of a head's q and k
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture of experts with sigmoid routing in groups (torch/layers/feed_forward.py)."""

    count: int  # routed experts of a layer
    shared: int  # shared experts of a layer, which every token uses
    chosen: int  # routed experts that each token uses
    groups: int  # number of groups, each with `count / groups` routed experts
    chosen_groups: int  # number of groups from which a token's experts are chosen; <= groups
    intermediate: int  # inner width of one expert
    dense_layers: int  # number of leading layers with a dense feed-forward
    are_weights_normed: bool  # weights of a token's experts are normalised to a sum of 1
    weights_factor: float  # multiplies the weights after normalisation; > 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str  # llama | mistral | qwen2 | qwen3 | deepseek_v3
    layers: int
    hidden: int  # width of hidden states
    heads: int  # query heads; a multiple of kv_heads
    kv_heads: int
    head_dim: int  # scalars of a head's K in a page
    intermediate: int  # inner width of a dense feed-forward
    vocabulary_tokens: int
    context_tokens_max: int  # largest number of prompt and output tokens
    norm_epsilon: float
    rope: RopeConfig
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool  # bias of attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: tuple[int, ...]
    # Whether the checkpoint requests fp8 KV. It does not change `weights_id`, a hash of `repr`.
    is_kv_fp8: bool = field(default=False, repr=False)
    latent: LatentConfig | None = None  # if set, kv_heads is 1 and head_dim is `latent.row`
    experts: ExpertsConfig | None = None
    predicting_layers: int = 0  # multi-token prediction layers after `layers`; not computed

    @property
    def rotary_dim(self) -> int:
        """Scalars of a head that RoPE rotates."""
        return self.latent.rotary_dim if self.latent else self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def model_id(self) -> str:
        """Family and shape. The checkpoint's path is left out, because it may differ per host."""
        return f"{self.family}-{self.layers}x{self.hidden}-v{self.vocabulary_tokens}"

    def stage_layers(self, stage: int, stages: int) -> LayerRange:
        """The consecutive layers of a pipeline stage. The remainder goes to the first stages."""
        assert 0 <= stage < stages <= self.layers, (stage, stages, self.layers)
        share, larger = divmod(self.layers, stages)
        first = stage * share + min(stage, larger)
        return LayerRange(first, first + share + (stage < larger))

    def kv_dtype(self, asked: str, dtype: str) -> str:
        """The dtype of KV in pages. `asked`: the worker's parameter kv_dtype, "auto" or "fp8".
        `dtype`: the dtype of computation."""
        return "fp8" if asked == "fp8" or self.is_kv_fp8 else dtype

    def layout(self, dtype: str, block_tokens: int) -> KvLayout:
        factor = 1 if self.latent else 2
        return KvLayout(self.layers, self.kv_heads, self.head_dim, dtype, block_tokens, factor)


def read_model_config(checkpoint_dir: str | Path) -> ModelConfig:
    """Read config.json of this folder. Raises a CheckpointError with all problems."""
    folder = Path(checkpoint_dir)
    found: list[str] = []
    raw, eos_values = read_config(folder, found)
    config = None if raw is None else _parsed(raw, eos_values, found)
    kv = quantised_kv(folder)
    if kv is not None and kv != "fp8":
        found.append(
            f"KV is quantised as {kv}, but only fp8 with one scale per tensor is supported"
        )
    if config is None or found:
        raise CheckpointError(folder, found)
    return replace(config, is_kv_fp8=kv == "fp8")


def read_config(folder: Path, found: list[str]) -> tuple[dict[str, Any] | None, list[Any]]:
    """(config.json, end-of-sequence ids of generation_config.json or else of config.json)."""
    raw = read_json(folder / "config.json", found)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json", found) or {}
    value = generation.get("eos_token_id", (raw or {}).get("eos_token_id"))
    return raw, value if isinstance(value, list) else [] if value is None else [value]


def quantised_kv(folder: Path) -> str | None:
    """The checkpoint's quantisation of KV in lower case, such as "fp8"; None: not quantised.

    Reads the keys that vLLM and TensorRT-LLM read: kv_cache_quant_algo (ModelOpt) in
    hf_quant_config.json or config.json, or else kv_cache_scheme (llm-compressor) in config.json.
    """
    beside = read_json(folder / "hf_quant_config.json", []) or {}
    inline = (read_json(folder / "config.json", []) or {}).get("quantization_config") or {}
    if not isinstance(inline, Mapping):
        return None
    for holder in (beside.get("quantization"), inline.get("quantization"), inline):
        if isinstance(holder, Mapping) and holder.get("kv_cache_quant_algo"):
            return str(holder["kv_cache_quant_algo"]).lower()
    scheme = inline.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or not scheme.get("num_bits"):
        return None
    kind = str(scheme.get("type") or "float")
    per = scheme.get("strategy") or "tensor"
    name = "fp8" if (scheme["num_bits"], kind) == (8, "float") else f"{kind}{scheme['num_bits']}"
    odd = [f"per {per}"] if per != "tensor" else []
    odd += ["dynamic"] if scheme.get("dynamic") else []
    odd += ["asymmetric"] if scheme.get("symmetric") is False else []
    return " ".join([name, *odd])


def _has_quantised_weights(quantization: Any) -> bool:
    """Whether weights are quantised. Every unknown method counts as quantisation of weights."""
    if not isinstance(quantization, Mapping):
        return bool(quantization)
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping) or quantization.get("quant_algo"):
        return True
    has_weights = any(
        isinstance(group, Mapping) and group.get("weights") for group in groups.values()
    )
    is_known = quantization.get("quant_method") in ("compressed-tensors", "modelopt")
    return has_weights or not is_known


def read_json(path: Path, found: list[str]) -> dict[str, Any] | None:
    """The JSON object in this file. On failure returns None and appends the problem to `found`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        problem = f"must be a JSON object, is a {type(value).__name__}"
    except FileNotFoundError:
        problem = "is missing; is this a Hugging Face folder?"
    except OSError as error:
        problem = f"cannot be read: {error}"
    except ValueError as error:  # JSON and UTF-8 errors
        problem = f"is not valid JSON: {error}"
    found.append(f"{path.name} {problem}")
    return None


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads typed values. A wrong value adds a problem to `found` and becomes a placeholder."""

    raw: Mapping[str, Any]
    found: list[str]

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        return self._value(key, default, kind, lambda value: type(value) is int and value >= least)

    def number(self, key: str, default: float | None = None) -> float:
        kind = "a positive number"
        is_right = lambda value: type(value) in (int, float) and value > 0  # noqa: E731
        return float(self._value(key, default, kind, is_right))

    def flag(self, key: str, default: bool = False) -> bool:
        return self._value(key, default, "true or false", lambda value: type(value) is bool)

    def _value(self, key: str, default: Any, kind: str, is_right: Callable[[Any], bool]) -> Any:
        """`type(value)`, because True is an instance of int."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if is_right(value):
            return value
        self.found.append(f"config.json: {key} must be {kind}, is {value!r}")
        return 1


def _parsed(raw: dict[str, Any], eos_values: list[Any], found: list[str]) -> ModelConfig | None:
    architectures = raw.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        found.append(f"config.json: architecture {name!r} is not supported; known: {known}")
        return None  # the keys of another family have other meanings
    found += _unsupported(raw)
    read = ConfigReader(raw, found)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    # The default is 128 in transformers' Qwen3Config. Other families have hidden // heads.
    head_dim = read.integer("head_dim", default=128 if family == "qwen3" else hidden // heads or 1)
    latent = _latent(read) if family == "deepseek_v3" else None
    if latent is not None:
        if kv_heads != heads:
            found.append("config.json: num_key_value_heads and num_attention_heads must be equal")
        kv_heads, head_dim = 1, latent.row
    if heads % kv_heads:
        found.append(
            f"config.json: num_attention_heads ({heads}) must be a multiple of "
            f"num_key_value_heads ({kv_heads})"
        )
    rotary_dim = latent.rotary_dim if latent else head_dim
    if rotary_dim % 2:
        name = "qk_rope_head_dim" if latent else "head_dim"
        found.append(f"config.json: {name} is {rotary_dim}; rotary embedding needs an even number")
    has_own_bias = family in ("llama", "qwen3", "deepseek_v3")  # these have a key attention_bias
    attention_bias = has_own_bias and read.flag("attention_bias")
    vocabulary_tokens = read.integer("vocab_size")
    rope = _rope(raw, found)
    return ModelConfig(
        family=family,
        layers=read.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read.integer("intermediate_size"),
        vocabulary_tokens=vocabulary_tokens,
        context_tokens_max=_context_tokens_max(family, read, rope),
        norm_epsilon=read.number("rms_norm_eps", default=1e-6),
        rope=rope,
        has_tied_embeddings=read.flag("tie_word_embeddings"),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=family == "llama" and read.flag("mlp_bias"),
        has_qk_norm=family == "qwen3",
        eos_token_ids=_eos_token_ids(eos_values, vocabulary_tokens, found),
        latent=latent,
        experts=_experts(read) if latent else None,
        predicting_layers=read.integer("num_nextn_predict_layers", 0, least=0) if latent else 0,
    )


def _latent(read: ConfigReader) -> LatentConfig:
    return LatentConfig(
        query_rank=read.integer("q_lora_rank", 0),
        rank=read.integer("kv_lora_rank"),
        plain_dim=read.integer("qk_nope_head_dim"),
        rotary_dim=read.integer("qk_rope_head_dim"),
        value_dim=read.integer("v_head_dim"),
        is_interleaved=read.flag("rope_interleave", default=True),
    )


def _experts(read: ConfigReader) -> ExpertsConfig:
    raw, found = read.raw, read.found
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, known) != known:
            found.append(f"config.json: {key} {raw[key]!r} is not supported; only {known} is")
    if raw.get("moe_layer_freq", 1) != 1:
        found.append("config.json: moe_layer_freq other than 1 is not supported")
    experts = ExpertsConfig(
        count=read.integer("n_routed_experts"),
        shared=read.integer("n_shared_experts"),
        chosen=read.integer("num_experts_per_tok"),
        groups=read.integer("n_group"),
        chosen_groups=read.integer("topk_group"),
        intermediate=read.integer("moe_intermediate_size"),
        dense_layers=read.integer("first_k_dense_replace", least=0),
        are_weights_normed=read.flag("norm_topk_prob", default=True),
        weights_factor=read.number("routed_scaling_factor", 2.5),
    )
    of_group, rest = divmod(experts.count, experts.groups)
    can_choose = experts.chosen <= of_group * experts.chosen_groups
    if rest or of_group < 2 or experts.chosen_groups > experts.groups or not can_choose:
        found.append(
            f"config.json: n_routed_experts {experts.count}, n_group {experts.groups}, topk_group "
            f"{experts.chosen_groups} and num_experts_per_tok {experts.chosen} do not fit together"
        )
    return experts


def _context_tokens_max(family: str, read: ConfigReader, rope: RopeConfig) -> int:
    """Longest context that the engine computes exactly, in tokens.

    A sliding window (Mistral) limits the context to the window, because the engine computes full
    attention. With YaRN the context is the original context times the factor, as in vLLM. Reason:
    Qwen documents a config.json whose max_position_embeddings stays the original context.
    """
    context_tokens = read.integer("max_position_embeddings")
    if rope.type == "yarn":
        context_tokens = int(rope.original_context_tokens * rope.factor)
    if family != "mistral" or read.raw.get("sliding_window", MISTRAL_WINDOW_TOKENS) is None:
        return context_tokens
    return min(context_tokens, read.integer("sliding_window", MISTRAL_WINDOW_TOKENS))


def _unsupported(raw: Mapping[str, Any]) -> Iterator[str]:
    """A problem for each key that requests a feature that the engine does not compute."""
    if raw.get("hidden_act", "silu") != "silu":
        yield f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only silu is"
    if raw.get("use_sliding_window"):
        yield "config.json: use_sliding_window is not supported; only full attention is"
    other = {str(kind) for kind in raw.get("layer_types") or []} - {"full_attention"}
    if other:
        yield f"config.json: layer_types {sorted(other)} are not supported; only full_attention is"
    if raw.get("quantization_config") and _has_quantised_weights(raw["quantization_config"]):
        yield "config.json: quantized weights are not supported; use float32, bfloat16 or float16"
    if raw.get("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        yield "config.json: partial_rotary_factor is not supported"


def _rope(raw: Mapping[str, Any], found: list[str]) -> RopeConfig:
    """RoPE from the keys of transformers 5 (`rope_parameters`), or else of transformers 4."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        found.append(f"config.json: rope_parameters or rope_scaling is {given!r}, not an object")
        given = {}
    if any(isinstance(value, dict) for value in given.values()):
        found.append("config.json: RoPE that differs between layers is not supported")
        return RopeConfig(1.0)
    merged = {"rope_theta": raw.get("rope_theta"), **given}
    # As in transformers, this key has precedence at the top level of config.json.
    key = "original_max_position_embeddings"
    merged[key] = raw.get(key) or given.get(key) or raw.get("max_position_embeddings")
    if merged["rope_theta"] is None:
        merged["rope_theta"] = 10_000.0
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        found.append(f"config.json: rope type {kind!r} is not supported; known: {known}")
        return RopeConfig(1.0)
    if given.get("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        found.append("config.json: partial_rotary_factor is not supported")
    read = ConfigReader(merged, found)
    theta = read.number("rope_theta")
    if kind == "default":
        return RopeConfig(theta)
    factor = read.number("factor")
    score_factor = _magnitude(read, "mscale_all_dim", factor) ** 2
    rope = RopeConfig(theta, kind, factor, score_factor=score_factor)
    if kind == "linear":
        return rope
    rope = replace(rope, original_context_tokens=read.integer(key))
    if kind == "yarn":
        return _yarn(rope, read)
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    if not found and high <= low:
        found.append("config.json: high_freq_factor must be above low_freq_factor")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _magnitude(read: ConfigReader, key: str, factor: float) -> float:
    """YaRN's magnitude for `key` = mscale or mscale_all_dim; 1 without it or for factor <= 1."""
    if not read.raw.get(key) or factor <= 1:
        return 1.0
    return 0.1 * read.number(key) * math.log(factor) + 1.0


def _yarn(rope: RopeConfig, read: ConfigReader) -> RopeConfig:
    """Adds the fields of YaRN, computed as in transformers' `_compute_yarn_parameters`."""
    given, factor = read.raw, rope.factor
    if not given.get("truncate", True):
        read.found.append("config.json: truncate false of rope type 'yarn' is not supported")
    if given.get("attention_factor") is not None:
        table_factor = read.number("attention_factor")
    elif given.get("mscale") and given.get("mscale_all_dim"):
        whole = _magnitude(read, "mscale_all_dim", factor)
        table_factor = _magnitude(read, "mscale", factor) / whole
    else:
        table_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return replace(
        rope,
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        table_factor=table_factor,
    )


def _eos_token_ids(values: list[Any], vocabulary_tokens: int, found: list[str]) -> tuple[int, ...]:
    for token_id in values:
        if type(token_id) is not int or not 0 <= token_id < vocabulary_tokens:
            found.append(f"eos_token_id {token_id!r} is no token id of the vocabulary")
    return tuple(values)


SHOWN_MAX = 20  # limit of problems in one message; a wrong number of layers causes hundreds


class CheckpointError(Exception):
    """`problems` has all problems of a check. The message has only the first SHOWN_MAX."""

    def __init__(self, folder: str | Path, problems: Sequence[str]) -> None:
        assert problems, "an error without a problem"
        self.problems = list(problems)
        lines = self.problems[:SHOWN_MAX]
        if len(self.problems) > SHOWN_MAX:
            lines.append(f"and {len(self.problems) - SHOWN_MAX} more")
        super().__init__(f"checkpoint {folder}:\n  - " + "\n  - ".join(lines))


def read_or_problems(read: Callable[[Path], T], folder: Path) -> tuple[T | None, list[str]]:
    """(result of read(folder), []). If `read` raises a CheckpointError, (None, its problems)."""
    try:
        return read(folder), []
    except CheckpointError as error:
        return None, error.problems
