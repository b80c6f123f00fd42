"""What of a checkpoint and of an engine's options reaches KV, for the fingerprint of its blocks.

Two engines may exchange blocks only if the same tokens give the same bytes in both. config.json
says how they are computed (RoPE, norms, heads, activations, quantisation, what a later family
adds), `llm_options` may say it otherwise (the attention backend has a page layout of its own). So
the default is: it is part of the fingerprint. The lists name what is known to be harmless; a key
that is missing there costs a cold cache or a refused worker, one too many would cost wrong answers.

Pure, but for reading the files. Not here: shapes and sizes (kv_shape.py), the weights
(../checkpoint.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.engine.model_config import read_json
from backends.engine.trtllm.settings import ONLY, TrtllmConfig

# Of config.json, at any depth: where it came from, how it ends, how it was trained.
HARMLESS_KEYS = frozenset({
    "_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
    "use_cache", "initializer_range", "attention_dropout",
})  # fmt: skip

# Of llm_options: when a step runs and what is counted, drawn or shown; never what it computes.
HARMLESS_OPTIONS = frozenset({
    "cuda_graph_config", "disable_overlap_scheduler", "enable_chunked_prefill", "sampler_type",
    "enable_iter_perf_stats", "enable_iter_req_stats", "iter_stats_max_iterations",
    "request_stats_max_iterations", "return_perf_metrics", "print_iter_log", "stream_interval",
    "batch_wait_timeout_ms", "batch_wait_timeout_iters", "scheduler_config",
    "kv_cache_config.event_buffer_max_size",
})  # fmt: skip

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
