"""The KV of TensorRT-LLM for a Hugging Face folder: its shape, and what it depends on.

The shape is read from config.json, because the staging pool is made before the engine starts. The
ranks report the real size of their pages, and a difference is refused (engine.py). Every layer must
have full attention with the same number of heads, or a latent (DeepSeek-V3). TensorRT-LLM keeps a
latent as one head of K alone, of kv_lora_rank + qk_rope_head_dim, on every rank.

Of `llm_options` all but the harmless ones listed here are in the fingerprint.

Not here: the weights (../checkpoint.py), what of a checkpoint is in the fingerprint
(../connected/kv_identity.py), the arguments of the engine (package.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.engine.connected.kv_identity import canonical
from backends.engine.model_config import CheckpointError, ConfigReader, quantised_kv, read_config
from backends.engine.trtllm.settings import ONLY, TrtllmConfig
from mooncake_store.layout import KvLayout

# Also the name of Kimi K2. Other families with a latent have more KV, or were not examined.
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
    dtype: str  # of the computation, by config.json; "" if it has none
    is_latent: bool = False  # one row of head_dim for each token of a layer: kv_heads is 1

    @property
    def model_id(self) -> str:
        """Names the model, not its folder."""
        return f"{self.architecture}-{self.layers}x{self.hidden}-v{self.vocabulary_tokens}"

    def layout(self, kv_dtype: str, block_tokens: int, tp_size: int) -> KvLayout:
        """Layout of a block. With fewer heads than ranks it has a head of each rank, but a latent
        only once."""
        if self.is_latent:
            return KvLayout(self.layers, 1, self.head_dim, kv_dtype, block_tokens, kv_factor=1)
        heads_of_rank = max(1, self.kv_heads // tp_size)
        return KvLayout(self.layers, heads_of_rank * tp_size, self.head_dim, kv_dtype, block_tokens)


def read_kv_shape(
    checkpoint_dir: str | Path, tp_size: int = 1, context_tokens_max: int = 0
) -> KvShape:
    """Raises CheckpointError with all problems. `context_tokens_max` 0: that of the model."""
    folder = Path(checkpoint_dir)
    found: list[str] = []
    raw, eos_values = read_config(folder, found)
    if foreign := _foreign(folder, raw or {}):
        raise CheckpointError(folder, [foreign])
    if raw is None:
        raise CheckpointError(folder, found)
    found += _unsupported(raw, context_tokens_max)
    read = ConfigReader(raw, found)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", hidden // heads or 1)
    if is_latent := bool(raw.get("kv_lora_rank")):
        kv_heads, head_dim = 1, read.integer("kv_lora_rank") + read.integer("qk_rope_head_dim")
    shape = KvShape(
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        layers=read.integer("num_hidden_layers"),
        hidden=hidden,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary_tokens=read.integer("vocab_size"),
        context_tokens_max=read.integer("max_position_embeddings"),
        eos_token_ids=tuple(each for each in eos_values if isinstance(each, int)),
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


def read_kv_dtype(folder: Path, asked: str, dtype: str, found: list[str]) -> str:
    """The dtype of KV; `asked` is kv_dtype. With auto a quantised checkpoint decides, if any."""
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
    """Recognises the folders of older deployments of TensorRT-LLM."""
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
    """Problems with KV that is not one page of equal layers for each token."""
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
    if is_windowed and window < context:  # otherwise no token leaves the window
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


# Options that decide when a step runs, or what is counted, drawn or shown; not what is computed.
HARMLESS_OPTIONS = frozenset({
    "cuda_graph_config", "disable_overlap_scheduler", "enable_chunked_prefill", "sampler_type",
    "enable_iter_perf_stats", "enable_iter_req_stats", "iter_stats_max_iterations",
    "request_stats_max_iterations", "return_perf_metrics", "print_iter_log", "stream_interval",
    "batch_wait_timeout_ms", "batch_wait_timeout_iters", "scheduler_config",
    "kv_cache_config.event_buffer_max_size",
})  # fmt: skip


def options_that_reach_kv(options: Mapping[str, Any]) -> dict[str, Any]:
    """`llm_options` for the fingerprint; objects are flattened, as in `kv_cache_config.dtype`.

    Options that have only one allowed value (settings.ONLY) are equal in all engines.
    """
    left_out = HARMLESS_OPTIONS | ONLY.keys()
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in left_out and isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name not in left_out}


def pages_description(
    version: str, config: TrtllmConfig, dtype: str, reaching: Mapping[str, Any]
) -> str:
    """All that distinguishes the pages of engines, as text for a refusal."""
    parts = ["tensorrt_llm", version, f"tp{config.tp_size}", f"page{config.page_tokens}", dtype]
    if config.handoff == "native":
        parts.append("native")
    if reaching:
        parts.append(canonical(reaching))
    return "-".join(parts)
