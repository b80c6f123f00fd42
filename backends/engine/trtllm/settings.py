"""Settings of workers of engine tensorrt_llm, and options that are refused.

`TrtllmConfig` has the parameters that only this engine has. `llm_options` passes all further
options to tensorrt_llm.LLM. An option is refused by name, with the reason, if another parameter
sets it, or if it does not work with KV from a store.

Not here: the final arguments of the engine (package.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backends.engine.connected.settings import AllowedValues, device_problems, refused_options

HANDOFFS = ("store", "native")
TRANSCEIVERS = ("DEFAULT", "NIXL", "UCX", "MOONCAKE", "MPI")

GUIDED_BACKEND = "guided_decoding_backend"  # of llm_options; if it is not set, grammars are refused

# Options that another parameter of config.pbtxt sets.
SAID_ELSEWHERE = {
    "model": "checkpoint",
    "tokenizer": "checkpoint",
    "skip_tokenizer_init": GUIDED_BACKEND,
    "dtype": "dtype",
    "tensor_parallel_size": "tp_size",
    "max_batch_size": "slots",
    "max_num_tokens": "chunk_tokens",
    "max_seq_len": "context_tokens_max",
    "kv_connector_config": "nothing: it is ours",
    "cache_transceiver_config": "handoff",
    "kv_cache_config.tokens_per_block": "page_tokens",
    "kv_cache_config.max_tokens": "kv_bytes",
    "kv_cache_config.free_gpu_memory_fraction": "gpu_memory_fraction",
    "model_kwargs.torch_dtype": "dtype",
    "model_kwargs.dtype": "dtype",
    "kv_cache_config.dtype": "kv_dtype",
    "kv_cache_config.use_kv_cache_manager_v2": "nothing: the release decides it",
}

OBJECTS = ("kv_cache_config", "scheduler_config")  # their keys are merged with ours


ONLY: AllowedValues = {
    "backend": (("pytorch",), "connectors exist in the PyTorch backend only"),
    "pipeline_parallel_size": ((1,), "the connector is not implemented for pipeline stages"),
    "context_parallel_size": ((1,), "the connector is not implemented for context parallelism"),
    "enable_attention_dp": (
        (False,),
        "each rank has requests of its own then, and would need a scheduler and stages of its own; "
        "TensorRT-LLM 1.2.x has a connector's scheduler on rank 0 only",
    ),
    "max_beam_width": ((1,), "beams share and copy pages behind the connector's back"),
    "speculative_config": ((None,), "draft tokens fill pages that may be taken back"),
    "orchestrator_type": ((None, "rpc"), "the connector is started by MPI or by this process"),
    "sparse_attention_config": ((None,), "a page would not hold all of its tokens' KV"),
    "kv_cache_config.enable_block_reuse": ((True,), "the connector is asked only with it"),
    "kv_cache_config.enable_partial_reuse": (
        (False,),
        "a prefix that ends inside a page cannot be continued from the store",
    ),
    "kv_cache_config.host_cache_size": (
        (None, 0),
        "its second pool has page numbers of its own; the store is the host cache",
    ),
    "kv_cache_config.disk_cache_size": (
        (None, 0),
        "as of host_cache_size; the store has an SSD tier",
    ),
    "kv_cache_config.max_attention_window": ((None,), "layers would have pages of their own"),
    "scheduler_config.capacity_scheduler_policy": (
        ("GUARANTEED_NO_EVICT",),
        "a request that is evicted is computed again from its first token",
    ),
}


@dataclass(frozen=True, slots=True)
class TrtllmConfig:
    """Further parameters of a worker's config.pbtxt, with engine tensorrt_llm only."""

    gpus: str = ""  # CUDA devices of this worker, "0" or "0,1"; empty: the first tp_size
    tp_size: int = 1  # tensor parallel size: over so many GPUs
    page_tokens: int = 32  # tokens of a page of TensorRT-LLM; block_tokens is a multiple of it
    gpu_memory_fraction: float = 0.9  # of what is free when the engine starts; bounds kv_bytes
    handoff: str = "store"  # store | native: how KV gets from prefill to decode
    # Prefixes of at least so many MiB per GPU are loaded beside the passes of other prompts. Decode
    # loads all KV beside its steps. 0: every load is part of its own pass.
    aside_load_mib: int = 256
    transceiver: str = "DEFAULT"  # of native: DEFAULT | NIXL | UCX | MOONCAKE | MPI
    llm_options: str = ""  # a JSON file, or an object: further keywords of tensorrt_llm.LLM

    def aside_bytes_min(self, role: str) -> int:
        """Loads of at least so many bytes per rank are asynchronous; 0: none.

        At decode all are: a load in a pass delays every stream, an asynchronous one costs the new
        stream at most a step. With native hand-over none is: the cache transceiver also uses the
        state of such a request (DISAGG_GENERATION_TRANS_IN_PROGRESS)."""
        if self.handoff != "store":
            return 0
        return min(self.aside_load_mib, 1) if role == "decode" else self.aside_load_mib * 2**20

    def is_connected(self, role: str) -> bool:
        """True if the engine's KV comes from and goes to the store. TensorRT-LLM refuses the
        generation-only requests of native hand-over if there is a connector."""
        return role == "prefill" or self.handoff == "store"

    def problems(self) -> Iterator[str]:
        yield from device_problems(self.gpus, self.tp_size, self.page_tokens)
        if not 0.0 < self.gpu_memory_fraction < 1.0:
            yield f"gpu_memory_fraction is {self.gpu_memory_fraction}; use 0.9, say"
        if self.aside_load_mib < 0:
            yield f"aside_load_mib is {self.aside_load_mib}; use 256, say, or 0 for never"
        if self.handoff not in HANDOFFS:
            yield f"handoff is {self.handoff!r}; use {' or '.join(HANDOFFS)}"
        if self.transceiver not in TRANSCEIVERS:
            yield f"transceiver is {self.transceiver!r}; use {' or '.join(TRANSCEIVERS)}"


def option_problems(options: Mapping[str, Any], is_connected: bool) -> Iterator[str]:
    """Refused `llm_options`; `is_connected`: KV comes from and goes to the store."""
    only = ONLY if is_connected else {"backend": ONLY["backend"]}
    yield from refused_options("llm_options", options, SAID_ELSEWHERE, only)
    for name in (*OBJECTS, "model_kwargs"):
        if name in options and not isinstance(options[name], Mapping):
            yield f"llm_options sets {name} to {options[name]!r}; it must be a JSON object"
