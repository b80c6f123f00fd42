"""The arguments of an LLM, as far as an executor and its connector read them. Strict, like ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from backends.engine.trtllm.releases import V2
from tensorrt_llm._fake.api import MANAGER


@dataclass
class KvCacheConnectorConfig:
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    event_buffer_max_size: int = 0
    host_cache_size: int | None = None
    disk_cache_size: int | None = None
    use_kv_cache_manager_v2: bool | str = "auto"  # here: that of the release
    dtype: str = "auto"

    @property
    def is_v2(self) -> bool:
        asked = self.use_kv_cache_manager_v2
        return MANAGER == V2 if asked == "auto" else bool(asked)


@dataclass
class CacheTransceiverConfig:
    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


@dataclass
class SchedulerConfig:
    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"


@dataclass
class CudaGraphConfig:
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0


@dataclass
class Mapping:
    rank: int
    tp_size: int

    @property
    def tp_rank(self) -> int:
        return self.rank


@dataclass
class ParallelConfig:
    rank: int
    tp_size: int

    def to_mapping(self) -> Mapping:
        return Mapping(self.rank, self.tp_size)


@dataclass
class TorchLlmArgs:
    model: str = ""
    backend: str = "pytorch"
    tokenizer: object = None
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_beam_width: int = 1
    enable_attention_dp: bool = False
    enable_chunked_prefill: bool = False
    cuda_graph_config: CudaGraphConfig | None = field(default_factory=CudaGraphConfig)
    disable_overlap_scheduler: bool = False
    enable_iter_perf_stats: bool = False
    iter_stats_max_iterations: int | None = None
    return_perf_metrics: bool = False
    guided_decoding_backend: str | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    kv_connector_config: KvCacheConnectorConfig | None = None
    env_overrides: dict[str, str] | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    model_kwargs: dict[str, Any] | None = None
    sampler_type: str = "auto"
    attn_backend: str = "TRTLLM"

    _rank = 0  # of the process that asks

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(self._rank, self.tensor_parallel_size)

    def on_rank(self, rank: int) -> TorchLlmArgs:
        """A copy as the process of that rank has it."""
        args = replace(self)
        args._rank = rank
        return args


LlmArgs = TorchLlmArgs
