"""The keywords of tensorrt_llm.LLM for a prefill or a decode worker.

Prefill computes one step after the other and has no use for CUDA graphs or for scheduling the next
step early; decode keeps TensorRT-LLM's defaults for both (loads are whole pages before the forward
pass, so no hook has to fire inside a graph). Page reuse inside the engine stays on, since the
connector is only asked with it; partial pages are never reused.

Not here: what may be set (settings.py), the model's shape (kv_shape.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.engine.trtllm.package import (
    CONNECTOR_MODULE,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    Package,
    PackageProblem,
)
from backends.engine.trtllm.settings import OBJECTS, EngineSpec, TrtllmConfig

# What would give the engine pages that the connector does not see, switched off in so many words.
PAGES_OF_ITS_OWN = {"use_kv_cache_manager_v2": False, "host_cache_size": 0, "disk_cache_size": 0}
OBJECT_CLASSES = dict(zip(OBJECTS, ("KvCacheConfig", "SchedulerConfig"), strict=True))
PREFILL_BATCH_MAX = 64  # prompts that may share a step; chunk_tokens bounds their tokens
DECODE_STEP_TOKENS_MIN = 2048  # ends of prompts that join a step; the rest waits for the next one


def is_connected(config: TrtllmConfig, role: str) -> bool:
    """Does KV of this worker's engine come from and go to the store?"""
    return role == "prefill" or config.has_connector_at_decode


def llm_arguments(
    package: Package,
    spec: EngineSpec,
    config: TrtllmConfig,
    folder: Path,
    context_tokens_max: int,
    options: Mapping[str, Any],
    checkpoint_dtype: str,
) -> dict[str, Any]:
    """Raises PackageProblem for what this release does not know."""
    rest, batch = dict(options), _batch(spec)
    unknown = [
        f"{option}.{key}" for option, name in OBJECT_CLASSES.items()
        for key in package.unknown(name, options.get(option, {}))
    ]  # fmt: skip
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,  # tokens in, tokens out: text is the workers'
        "tensor_parallel_size": config.tp_size,
        "dtype": spec.dtype,
        "max_seq_len": context_tokens_max,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        **batch,
        "kv_cache_config": _kv_cache(package, spec, config, batch, rest.pop("kv_cache_config", {})),
        "scheduler_config": package.config(
            "SchedulerConfig",
            **{
                "capacity_scheduler_policy": _guaranteed(package),
                **{
                    name: value
                    for name, value in rest.pop("scheduler_config", {}).items()
                    if name != "capacity_scheduler_policy"
                },
            },
        ),
    }
    if is_connected(config, spec.role):
        arguments["kv_connector_config"] = package.config(
            "KvCacheConnectorConfig",
            connector_module=CONNECTOR_MODULE,
            connector_scheduler_class=SCHEDULER_CLASS,
            connector_worker_class=WORKER_CLASS,
        )
    if config.handoff == "native":
        arguments["cache_transceiver_config"] = package.config(
            "CacheTransceiverConfig",
            backend=config.transceiver, max_tokens_in_buffer=context_tokens_max,
        )  # fmt: skip
    if spec.dtype != checkpoint_dtype:
        rest["model_kwargs"] = _told_dtype(package, spec.dtype, checkpoint_dtype, rest)
    arguments |= rest
    if package.llm_fields is not None:
        unknown += set(arguments) - package.llm_fields
    if unknown:
        raise PackageProblem(
            f"tensorrt_llm {package.version} does not know {', '.join(sorted(unknown))}"
        )
    return arguments


def _kv_cache(
    package: Package, spec: EngineSpec, config: TrtllmConfig, batch: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    return package.config(
        "KvCacheConfig",
        **{
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
            "tokens_per_block": config.page_tokens,
            # A page more for each request: the step that is scheduled early needs a place.
            "max_tokens": spec.pages_tokens + batch["max_batch_size"] * config.page_tokens,
            "free_gpu_memory_fraction": config.gpu_memory_fraction,
            # Each is left out where a release does not know it; defaults have changed.
            **(PAGES_OF_ITS_OWN if is_connected(config, spec.role) else {}),
            **options,
        },
    )


def _told_dtype(
    package: Package, dtype: str, checkpoint_dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """`dtype` is read by the builder of TensorRT engines only: the PyTorch flow computes in what
    the checkpoint's config says, unless it is told otherwise so."""
    if package.llm_fields is not None and "model_kwargs" not in package.llm_fields:
        raise PackageProblem(
            f"dtype is {dtype}, the checkpoint computes in {checkpoint_dtype or '?'}, and "
            f"tensorrt_llm {package.version} cannot be told otherwise (no model_kwargs): set dtype "
            "to the checkpoint's, or use a newer release"
        )
    return {**options.get("model_kwargs", {}), "torch_dtype": dtype}


def _batch(spec: EngineSpec) -> dict[str, Any]:
    """What one step may compute, and how steps follow each other."""
    if spec.role == "prefill":
        return {
            "max_batch_size": min(PREFILL_BATCH_MAX, spec.requests_max),
            "max_num_tokens": spec.chunk_tokens,
            "cuda_graph_config": None,
            "disable_overlap_scheduler": True,
        }
    return {
        "max_batch_size": spec.requests_max,
        "max_num_tokens": max(DECODE_STEP_TOKENS_MIN, spec.requests_max),
    }


def _guaranteed(package: Package) -> Any:
    policies = getattr(package.llm_args, "CapacitySchedulerPolicy", None) or getattr(
        package.llmapi, "CapacitySchedulerPolicy", None
    )
    return "GUARANTEED_NO_EVICT" if policies is None else policies.GUARANTEED_NO_EVICT
