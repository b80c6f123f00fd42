"""What TensorRT-LLM's KV of a Hugging Face folder is: its shape, and what it depends on.

Both are read from config.json alone. The pool that its pages are copied to is made before the
engine starts, so its size must be known before; when the engine is up, each rank says how big its
pages really are and a difference is refused (engine.py). TensorRT-LLM serves many more families
than the torch engine: what counts is that every layer has full attention with the same number of
heads, or with a latent (DeepSeek-V3: MLA): TensorRT-LLM keeps it as one head of K alone, of
kv_lora_rank + qk_rope_head_dim, and so every rank has the same rows. Loads neither torch nor
tensorrt_llm.

`KvIdentity` is what of a checkpoint and of an engine's options reaches KV, for the fingerprint of
its blocks. Two engines may exchange blocks only if the same tokens give the same bytes in both.
config.json says how they are computed (RoPE, norms, heads, activations, quantisation, what a later
family adds), `llm_options` may say it otherwise (the attention backend has a page layout of its
own). So the default is: it is part of the fingerprint. The lists name what is known to be harmless;
a key that is missing there costs a cold cache or a refused worker, one too many would cost wrong
answers.

Not here: the weights (../checkpoint.py), which settings the engine gets (package.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.engine.model_config import CheckpointError, quantised_kv, read_json
from backends.engine.trtllm.settings import ONLY, TrtllmConfig
from mooncake_store.layout import KvLayout

# Kimi K2 says so too. Others with a latent have something beside it, or were not looked at.
LATENT_FAMILIES = ("DeepseekV3ForCausalLM",)


@dataclass(frozen=True, slots=True)
class KvShape:
    architecture: str
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary_tokens: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # that config.json says its weights are computed in; "" where it says none
    is_latent: bool = False  # one row of head_dim for each token of a layer: kv_heads is 1

    @property
    def model_id(self) -> str:
        """Says what it is, not where it lies."""
        return f"{self.architecture}-{self.layers}x{self.hidden}-v{self.vocabulary_tokens}"

    def layout(self, kv_dtype: str, block_tokens: int, tp_size: int) -> KvLayout:
        """Of a block over all ranks: where there are fewer heads than ranks, each has a copy in it.

        Of latents each rank has a copy too, but a block has one only.
        """
        if self.is_latent:
            return KvLayout(self.layers, 1, self.head_dim, kv_dtype, block_tokens, kv_factor=1)
        heads_of_rank = max(1, self.kv_heads // tp_size)
        return KvLayout(self.layers, heads_of_rank * tp_size, self.head_dim, kv_dtype, block_tokens)


def read_kv_shape(
    checkpoint_dir: str | Path, tp_size: int = 1, context_tokens_max: int = 0
) -> KvShape:
    """Of this folder, or a CheckpointError that lists all problems.

    `context_tokens_max`: no request is longer; 0: as long as the model allows.
    """
    folder = Path(checkpoint_dir)
    found: list[str] = []
    raw = read_json(folder / "config.json", found)
    if foreign := _foreign(folder, raw or {}):
        raise CheckpointError(folder, [foreign])
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json", found) or {}
    if raw is None:
        raise CheckpointError(folder, found)
    found += _unsupported(raw, context_tokens_max)
    heads, hidden = (
        _positive(raw, "num_attention_heads", found),
        _positive(raw, "hidden_size", found),
    )
    kv_heads = _positive(raw, "num_key_value_heads", found, heads)
    head_dim = _positive(raw, "head_dim", found, hidden // heads or 1)
    if is_latent := bool(raw.get("kv_lora_rank")):
        kv_heads = 1
        head_dim = sum(_positive(raw, key, found) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    shape = KvShape(
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        layers=_positive(raw, "num_hidden_layers", found),
        hidden=hidden,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary_tokens=_positive(raw, "vocab_size", found),
        context_tokens_max=_positive(raw, "max_position_embeddings", found),
        eos_token_ids=_eos_token_ids(raw, generation),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
        is_latent=is_latent,
    )
    if max(kv_heads, tp_size) % min(kv_heads, tp_size) or heads % tp_size:
        found.append(
            f"tp_size is {tp_size}, but {heads} heads and {kv_heads} KV heads cannot be divided so"
        )
    if found:
        raise CheckpointError(folder, found)
    return shape


def _positive(
    raw: Mapping[str, Any], key: str, found: list[str], default: int | None = None
) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found.append(f"config.json: {key} must be a positive integer, is {value!r}")
        return 1
    return value


def read_kv_dtype(folder: Path, asked: str, dtype: str, found: list[str]) -> str:
    """What the engine will keep KV in; `asked` is the parameter kv_dtype.

    By itself TensorRT-LLM quantises KV where the checkpoint says so, as NVIDIA's FP8 ones do.
    """
    if asked == "auto":
        asked = quantised_kv(folder) or "auto"
    if asked in ("auto", "none", dtype):
        return dtype
    if asked == "fp8":
        return "fp8"
    found.append(
        f"KV would be kept in {asked}: only fp8 and the engine's own dtype are supported, others "
        "have scales in a pool of their own, which the connector does not see. Set "
        "kv_dtype to fp8, or take another checkpoint"
    )
    return dtype


def _foreign(folder: Path, raw: Mapping[str, Any]) -> str:
    """What older deployments of TensorRT-LLM have instead of a Hugging Face folder."""
    use = "set checkpoint to the Hugging Face folder that it was made of"
    if "build_config" in raw or any(folder.glob("rank*.engine")):
        return (
            "this is an engine directory of trtllm-build: KV cache connectors exist in the PyTorch "
            f"flow only, which reads Hugging Face folders; {use}"
        )
    if "mapping" in raw and "architecture" in raw:
        return f"this is a TensorRT-LLM checkpoint (convert_checkpoint), for trtllm-build; {use}"
    return ""


def _unsupported(raw: Mapping[str, Any], context_tokens_max: int) -> Iterator[str]:
    """KV that is not one page of equal layers for each token position."""
    families = raw.get("architectures") or ["unknown"]
    if raw.get("kv_lora_rank") and families[0] not in LATENT_FAMILIES:
        yield (
            f"config.json: latent attention (kv_lora_rank) of {families[0]} is not supported; of "
            f"{' and '.join(LATENT_FAMILIES)} it is"
        )
    if any(raw.get(key) for key in ("index_topk", "index_head_dim", "index_n_heads")):
        yield "config.json: sparse attention (index_*) has keys beside the pages: not supported"
    window = raw.get("sliding_window")
    limits = [raw.get("max_position_embeddings"), context_tokens_max or None]
    context = min((each for each in limits if isinstance(each, int)), default=0)
    is_windowed = isinstance(window, int) and raw.get("use_sliding_window", True)
    is_narrow = is_windowed and window < context  # else nothing ever leaves it
    if is_narrow:
        yield (
            f"config.json: sliding_window is {window}, less than the context of {context} tokens: "
            "the connector needs full attention. Set context_tokens_max to the window or less"
        )
    whole = {"full_attention", "sliding_attention"} if is_windowed else {"full_attention"}
    other = {str(kind) for kind in raw.get("layer_types") or []} - whole
    if other:
        yield f"config.json: layer_types {sorted(other)} are not supported; only full_attention is"
    if any(key in raw for key in ("ssm_state_size", "mamba_d_state", "hybrid_override_pattern")):
        yield "config.json: state-space layers are not supported; the connector cannot move them"


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token_id for token_id in values if isinstance(token_id, int))


HARMLESS_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_cache",
        "initializer_range",
        "attention_dropout",
    }
)

# Of llm_options: when a step runs and what is counted, drawn or shown; never what it computes.
HARMLESS_OPTIONS = frozenset(
    {
        "cuda_graph_config",
        "disable_overlap_scheduler",
        "enable_chunked_prefill",
        "sampler_type",
        "enable_iter_perf_stats",
        "enable_iter_req_stats",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "return_perf_metrics",
        "print_iter_log",
        "stream_interval",
        "batch_wait_timeout_ms",
        "batch_wait_timeout_iters",
        "scheduler_config",
        "kv_cache_config.event_buffer_max_size",
    }
)

# Beside config.json, where a checkpoint has them: which tensors are quantised, KV among them.
QUANTISATION_FILES = ("hf_quant_config.json", "quant_cfg.json", "dtypes.json")


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """How the weights are used; its repr is hashed together with them."""

    config: str
    quantisation: str

    @classmethod
    def of_folder(cls, folder: Path) -> KvIdentity:
        """Of a folder that read_kv_shape could read."""
        config = read_json(folder / "config.json", [])
        beside = {
            name: read_json(folder / name, [])
            for name in QUANTISATION_FILES
            if (folder / name).exists()
        }
        return cls(canonical(without_harmless_keys(config or {})), canonical(beside))


def without_harmless_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: without_harmless_keys(inner)
            for key, inner in value.items()
            if key not in HARMLESS_KEYS
        }
    if isinstance(value, list):
        return [without_harmless_keys(inner) for inner in value]
    return value


def options_that_reach_kv(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of `llm_options`, objects flattened by one level as in `kv_cache_config.dtype`.

    What is fixed where there is a connector (settings.ONLY) is the same in every engine that has
    blocks to exchange, whether it is said or not.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in HARMLESS_OPTIONS or name in ONLY:
            continue
        if isinstance(value, Mapping):
            found |= {
                f"{name}.{key}": inner
                for key, inner in value.items()
                if f"{name}.{key}" not in HARMLESS_OPTIONS and f"{name}.{key}" not in ONLY
            }
        else:
            found[name] = value
    return found


def pages_description(
    version: str, config: TrtllmConfig, dtype: str, reaching: Mapping[str, Any]
) -> str:
    """What makes one engine's pages different from another's, readable in a refusal."""
    parts = ["tensorrt_llm", version, f"tp{config.tp_size}", f"page{config.page_tokens}", dtype]
    if config.handoff == "native":
        parts.append("native")
    if reaching:
        parts.append(canonical(reaching))
    return "-".join(parts)


def canonical(value: Any) -> str:
    """The same text for the same JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
