"""The fields of a model.yaml of TensorRT-LLM's Triton model `llmapi`.

A field is one keyword of tensorrt_llm.LLM, a key of one of the objects in OBJECTS, or a key of
`triton_config`, which upstream's model reads itself. Keys of other objects are not looked at. The
names are those of TorchLlmArgs in TensorRT-LLM 1.2 and in upstream's main branch of November 2026
(llm_args_golden_manifest.json and references of its API tests).

Not here: the conversion (llmapi.py), options that workers refuse (engine/trtllm/settings.py).
"""

from __future__ import annotations

from collections.abc import Mapping

OBJECTS = ("kv_cache_config", "model_kwargs", "scheduler_config", "triton_config")
# Objects whose keys are not known here, but in the release that runs.
ANY_KEYS = ("model_kwargs", "scheduler_config")
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
# Another name of a field, as in the options of trtllm-serve.
OTHER_NAMES = {"kv_cache_free_gpu_memory_fraction": FRACTION}
# Steps of prefill have no CUDA graphs and no overlap scheduler (engine/trtllm/package.py).
DECODE_ONLY = ("cuda_graph_config", "disable_overlap_scheduler")

_OF_LLM = """
allreduce_strategy attention_dp_config attn_backend backend batch_wait_max_tokens_ratio
batch_wait_timeout_iters batch_wait_timeout_ms batched_logits_processor batching_type build_config
cache_transceiver_config checkpoint_format checkpoint_io_policy checkpoint_loader
context_parallel_size cp_config cuda_graph_config decoding_config disable_mm_encoder
disable_overlap_scheduler dtype dwdp_config enable_attention_dp enable_autotuner
enable_chunked_prefill enable_early_first_token_response enable_encoder_decoder_mixed_cuda_graph
enable_energy_metrics enable_in_graph_sampling enable_iter_perf_stats enable_iter_req_stats
enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_lora enable_low_latency_host_dispatch
enable_min_latency enable_mla_skip_correction enable_resource_governor
enable_speculative_beam_history_d2h encode_only encoder_cuda_graph_config encoder_max_batch_size
encoder_max_num_tokens env_overrides fail_fast_on_attention_window_too_large
force_dynamic_quantization garbage_collection_gen0_threshold gather_generation_logits
generation_config gms_config gpus_per_node guided_decoding_backend iter_stats_max_iterations
kv_cache_compression_config kv_cache_config kv_connector_config layer_wise_benchmarks_config
load_format lora_config max_batch_size max_beam_width max_input_len max_num_tokens max_seq_len
max_stats_len mla_skip_correction_threshold mm_encoder_only model model_kwargs
moe_cluster_parallel_size moe_config moe_expert_parallel_size moe_tensor_parallel_size
multimodal_config mx_config normalize_log_probs num_postprocess_workers num_serve_frontends
nvfp4_gemm_config orchestrator_type otlp_traces_endpoint peft_cache_config
perf_metrics_max_requests pipeline_parallel_size postprocess_tokenizer_dir pp_partition
prefill_capture_num_tokens prefill_cuda_graph_backend print_iter_log prometheus_metrics_config
quant_config ray_placement_config ray_worker_extension_cls reasoning_parser reorder_policy_config
request_stats_max_iterations return_perf_metrics revision sampler_force_async_worker sampler_type
scheduler_config skip_tokenizer_init sparse_attention_config speculative_config stream_interval
telemetry_config tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision
torch_compile_config trust_remote_code use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm
use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm use_fine_grained_sync
"""
_OF_KV_CACHE = """
attention_dp_events_gather_period_ms avg_seq_len block_reuse_config copy_on_partial_reuse
cross_kv_cache_fraction disk_cache_path disk_cache_size disk_prefetch_num_reqs dtype
enable_block_reuse enable_kv_pool_rebalance enable_partial_reuse enable_swa_scratch_reuse
event_buffer_max_size fp8_context_mla_kv_len_cap free_gpu_memory_fraction host_cache_size
iteration_stats_interval kv_cache_event_hash_algo kv_events_config
kv_pool_rebalance_check_interval kv_pool_rebalance_cooldown_secs
kv_pool_rebalance_min_sampled_kv_caches kv_pool_rebalance_moving_average_decay
kv_pool_rebalance_ratio_threshold kv_pool_rebalance_target_ratio_update_interval
mamba_ssm_cache_dtype mamba_ssm_philox_rounds mamba_ssm_stochastic_rounding mamba_state_config
max_attention_window max_gpu_total_bytes max_tokens max_util_for_resume onboard_blocks pool_ratio
secondary_offload_min_priority sink_token_length tokens_per_block use_kv_cache_manager_v2 use_uvm
"""
LLM_FIELDS = frozenset(_OF_LLM.split())
KV_CACHE_FIELDS = frozenset(_OF_KV_CACHE.split())
TRITON_FIELDS = ("cancellation_check_period_ms", "decoupled", "max_batch_size", "multimodal")
# `logits_post_processors` is a key of upstream's model, not of LLM.
OF_MODEL = ("logits_post_processors", "triton_config")

NO_LORA = "LoRA is not supported"
NO_IMAGES = "requests are text: images are refused"
NO_ATTENTION_DP = "attention DP is off: the connector does not work with it"
NO_ENGINES = "an option of the builder of TensorRT engines"
NO_POSTPROCESSING = "the conductor converts tokens to text"
NO_RAY = "the connector is started by MPI or by this process"
# Field -> why it has no counterpart.
LEFT_OUT: Mapping[str, str] = {
    "attention_dp_config": NO_ATTENTION_DP,
    "batched_logits_processor": "requests cannot name code",
    "batching_type": NO_ENGINES,
    "build_config": NO_ENGINES,
    "cache_transceiver_config": "KV goes through the store; handoff and transceiver set it",
    "checkpoint_loader": "a Python object, not a value",
    "cp_config": "the connector is not implemented for context parallelism",
    "decoding_config": NO_ENGINES,
    "disable_mm_encoder": NO_IMAGES,
    "enable_chunked_prefill": "always on, in steps of chunk_tokens",
    "enable_iter_perf_stats": "always on: metrics are made of it",
    "enable_lm_head_tp_in_adp": NO_ATTENTION_DP,
    "enable_lora": NO_LORA,
    "encode_only": "workers generate text",
    "gpus_per_node": "gpus names the GPUs of each worker",
    "kv_cache_compression_config": "a page would not hold all of its tokens' KV",
    "kv_cache_config.max_gpu_total_bytes": "kv_bytes bounds KV memory",
    "kv_cache_config.use_kv_cache_manager_v2": "the release decides it",
    "kv_connector_config": "the connector is the one of this project",
    "logits_post_processors": "requests cannot name code",
    "lora_config": NO_LORA,
    "max_input_len": "context_tokens_max bounds prompt and output together",
    "mm_encoder_only": NO_IMAGES,
    "multimodal_config": NO_IMAGES,
    "num_postprocess_workers": NO_POSTPROCESSING,
    "num_serve_frontends": NO_POSTPROCESSING,
    "peft_cache_config": NO_LORA,
    "postprocess_tokenizer_dir": NO_POSTPROCESSING,
    "pp_partition": "the connector is not implemented for pipeline stages",
    "ray_placement_config": NO_RAY,
    "ray_worker_extension_cls": NO_RAY,
    "reasoning_parser": "reasoning_parser of conductor finds it in the chat template",
    "revision": "the checkpoint is a folder",
    "skip_tokenizer_init": "the engine needs no tokenizer, except for grammars",
    "stream_interval": "each request may have its own stream_interval",
    "tokenizer": "the tokenizer of the checkpoint's folder is used",
    "tokenizer_mode": NO_POSTPROCESSING,
    "tokenizer_revision": "the checkpoint is a folder",
    "triton_config.decoupled": "always decoupled: stream decides for each request",
    "triton_config.max_batch_size": "always 1: the workers batch requests",
    "triton_config.multimodal": NO_IMAGES,
}


def is_known(name: str) -> bool:
    """Whether a field, with a dot before the key of an object, exists upstream."""
    owner, _, key = name.partition(".")
    if not key:
        return owner in LLM_FIELDS or owner in OF_MODEL or owner in OTHER_NAMES
    if owner == "kv_cache_config":
        return key in KV_CACHE_FIELDS
    return owner in ANY_KEYS or key in TRITON_FIELDS


def all_names() -> list[str]:
    """Names of known fields, to suggest one for a misspelled field."""
    named = [*LLM_FIELDS, *OF_MODEL, *OTHER_NAMES]
    named += [f"kv_cache_config.{key}" for key in KV_CACHE_FIELDS]
    return named + [f"triton_config.{key}" for key in TRITON_FIELDS]
