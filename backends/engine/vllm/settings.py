"""Settings of workers of engine vllm, and options that are refused.

`VllmConfig` has the parameters that only this engine has. `vllm_options` passes all further options
to vLLM's AsyncEngineArgs. An option is refused by name, with the reason, if another parameter sets
it, or if it does not work with KV from a store.

Not here: vLLM's own checks (arguments.py, in its process).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.engine.connected.settings import (
    AllowedValues,
    EngineSpec,
    device_problems,
    refused_options,
)
from backends.engine.vllm.guided import GUIDED_BACKEND
from backends.token_logprobs import TOP_LOGPROBS_MAX

# Options that another parameter of config.pbtxt sets.
SAID_ELSEWHERE = {
    "model": "checkpoint",
    "model_weights": "checkpoint",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_dtype",
    "tensor_parallel_size": "tp_size",
    "block_size": "page_tokens",
    "max_num_seqs": "slots, or queue_requests_max of a prefill worker",
    "max_num_batched_tokens": "chunk_tokens",
    "max_model_len": "context_tokens_max",
    "kv_cache_memory_bytes": "kv_bytes",
    "num_gpu_blocks_override": "kv_bytes",
    "kv_transfer_config": "nothing: it is ours",
    "logits_processors": "nothing: it is ours",
    "disable_log_stats": "nothing: the conductor needs them",
}

ONLY: AllowedValues = {
    "pipeline_parallel_size": ((1,), "the connector is not implemented for pipeline stages"),
    "data_parallel_size": ((1,), "each worker has one engine: copy the worker's folder instead"),
    "decode_context_parallel_size": ((1,), "a rank would have a part of each page's tokens"),
    "prefill_context_parallel_size": ((1,), "a rank would have a part of each page's tokens"),
    "enable_prefix_caching": ((True,), "the connector is asked only with it"),
    "enable_chunked_prefill": ((True,), "a prompt would have to fit into one step"),
    "disable_hybrid_kv_cache_manager": ((True,), "the connector has one group of pages"),
    "speculative_config": ((None,), "draft tokens fill pages that may be taken back"),
    "spec_method": ((None,), "draft tokens fill pages that may be taken back"),
    "spec_model": ((None,), "draft tokens fill pages that may be taken back"),
    "kv_offloading_size": ((None,), "the store is the host cache"),
    "enable_sleep_mode": ((False,), "pages would be lost behind the connector's back"),
    "runner": (("auto", "generate"), "workers generate text"),
    "logprobs_mode": (("raw_logprobs",), "clients get logprobs of the model's own logits"),
    "structured_outputs_config": ((GUIDED_BACKEND,), "grammars are in llguidance's language"),
}

# Options that decide when a step runs, or what is counted or shown; not what is computed.
HARMLESS_OPTIONS = frozenset({
    "enforce_eager", "gpu_memory_utilization", "scheduling_policy", "async_scheduling",
    "long_prefill_token_threshold", "watermark", "log_level",
    "enable_log_requests", "scheduler_reserve_full_isl",
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "max_logprobs", "seed",
    "skip_tokenizer_init", "tokenizer", "tokenizer_mode", "use_tqdm_on_load", "load_format",
    "safetensors_load_strategy", "download_dir", "shutdown_timeout", "stream_interval",
    "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
})  # fmt: skip

CONNECTOR = {
    "kv_connector": "MooncakeConnector",
    "kv_connector_module_path": "backends.engine.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Further parameters of a worker's config.pbtxt, with engine vllm only."""

    # Python that has vLLM: a path, beside the model repository if relative. "": the environment of
    # `make vllm`, without it the worker's own interpreter.
    engine_python: str = ""
    gpus: str = ""  # CUDA devices of this worker, "0" or "0,1"; empty: the first tp_size
    tp_size: int = 1  # tensor parallel size: over so many GPUs
    page_tokens: int = 32  # tokens of a page of vLLM; block_tokens is a multiple of it
    vllm_options: str = ""  # a JSON file, or an object: further arguments of AsyncEngineArgs

    def problems(self) -> Iterator[str]:
        return device_problems(self.gpus, self.tp_size, self.page_tokens)


def option_problems(options: Mapping[str, Any]) -> Iterator[str]:
    """Refused `vllm_options`."""
    return refused_options("vllm_options", options, SAID_ELSEWHERE, ONLY)


def options_that_reach_kv(options: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_options` for the fingerprint."""
    left_out = HARMLESS_OPTIONS | ONLY.keys()
    return {name: value for name, value in options.items() if name not in left_out}


def first_arguments(
    spec: EngineSpec, config: VllmConfig, folder: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that depend on the settings alone."""
    return {
        "model": str(folder),
        "dtype": spec.dtype,
        "kv_cache_dtype": spec.kv_dtype,
        "tensor_parallel_size": config.tp_size,
        "block_size": config.page_tokens,
        "max_num_seqs": spec.step_requests_max,
        "max_num_batched_tokens": max(spec.step_tokens_max, spec.step_requests_max),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": False,
        "generation_config": "vllm",  # the worker has the end tokens
        "kv_transfer_config": CONNECTOR,
        "max_logprobs": TOP_LOGPROBS_MAX,
        "structured_outputs_config": GUIDED_BACKEND,
        **({"max_model_len": spec.context_tokens_max} if spec.context_tokens_max else {}),
        **options,
    }


def environment(threads: int, devices: str) -> dict[str, str]:
    """For the process of vLLM. `devices`: its CUDA_VISIBLE_DEVICES; "": as the worker's."""
    return {
        **({"CUDA_VISIBLE_DEVICES": devices} if devices else {}),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
