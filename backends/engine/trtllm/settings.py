"""What an operator may set for workers of engine tensorrt_llm, and what is refused when it is set.

`EngineSpec` is what a worker of either role asks of it, `TrtllmConfig` holds the further parameters
of their config.pbtxt. `llm_options` passes anything else to tensorrt_llm.LLM, but for what another
parameter says and what cannot work together with KV that comes from and goes to a store: then a
wrong prefix or a crash deep inside the engine would be the answer, so it is refused by name, with
the reason, when the model loads.

Not here: the keywords that the engine gets in the end (package.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HANDOFFS = ("store", "native")
TRANSCEIVERS = ("DEFAULT", "NIXL", "UCX", "MOONCAKE", "MPI")

GUIDED_BACKEND = "guided_decoding_backend"  # of llm_options; where it is not set nothing is guided

# What another parameter of config.pbtxt says.
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
}

OBJECTS = ("kv_cache_config", "scheduler_config")  # whose keys are put together with ours


@dataclass(frozen=True, slots=True)
class Only:
    """The only values that an option of tensorrt_llm.LLM may have here, and why."""

    values: tuple[Any, ...]
    why: str


ONLY = {
    "backend": Only(("pytorch",), "connectors exist in the PyTorch backend only"),
    "pipeline_parallel_size": Only((1,), "the connector is not implemented for pipeline stages"),
    "context_parallel_size": Only((1,), "the connector is not implemented for context parallelism"),
    "enable_attention_dp": Only(
        (False,),
        "each rank has requests of its own then, and would need a scheduler and stages of its own; "
        "TensorRT-LLM 1.2.x has a connector's scheduler on rank 0 only",
    ),
    "max_beam_width": Only((1,), "beams share and copy pages behind the connector's back"),
    "speculative_config": Only((None,), "draft tokens fill pages that may be taken back"),
    "orchestrator_type": Only((None, "rpc"), "the connector is started by MPI or by this process"),
    "sparse_attention_config": Only((None,), "a page would not hold all of its tokens' KV"),
    "kv_cache_config.enable_block_reuse": Only((True,), "the connector is asked only with it"),
    "kv_cache_config.enable_partial_reuse": Only(
        (False,), "a prefix that ends inside a page cannot be continued from the store"
    ),
    "kv_cache_config.host_cache_size": Only(
        (None, 0), "its second pool has page numbers of its own; the store is the host cache"
    ),
    "kv_cache_config.disk_cache_size": Only(
        (None, 0), "as of host_cache_size; the store has an SSD tier"
    ),
    "kv_cache_config.max_attention_window": Only((None,), "layers would have pages of their own"),
    "kv_cache_config.use_kv_cache_manager_v2": Only((False,), "a prototype, its pages differ"),
    "scheduler_config.capacity_scheduler_policy": Only(
        ("GUARANTEED_NO_EVICT",), "a request that is evicted would be staged no more"
    ),
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a worker's parameters of either engine ask of this one."""

    role: str  # prefill | decode
    dtype: str
    block_tokens: int
    kv_pages: int  # of block_tokens tokens
    context_tokens_max: int  # 0: what the checkpoint allows
    requests_max: int  # that one step may have
    chunk_tokens: int = 0  # that one step of prefill may compute
    kv_dtype: str = "auto"  # auto: as the checkpoint asks, else as dtype | fp8

    @property
    def pages_tokens(self) -> int:
        return self.kv_pages * self.block_tokens


@dataclass(frozen=True, slots=True)
class TrtllmConfig:
    """Further parameters of a worker's config.pbtxt, with engine tensorrt_llm only."""

    gpus: str = ""  # CUDA devices of this worker, "0" or "0,1"; empty: the first tp_size
    tp_size: int = 1  # tensor parallel size: over so many GPUs
    page_tokens: int = 32  # tokens of a page of TensorRT-LLM; block_tokens is a multiple of it
    gpu_memory_fraction: float = 0.9  # of what is free when the engine starts; bounds kv_bytes
    handoff: str = "store"  # store | native: how KV gets from prefill to decode
    # Prefixes of so many MiB over one GPU's bus are loaded beside the passes of other prompts, all
    # that is handed over to decode beside the steps of its streams; 0: all hold up their own pass.
    aside_load_mib: int = 256
    transceiver: str = "DEFAULT"  # of native: DEFAULT | NIXL | UCX | MOONCAKE | MPI
    llm_options: str = ""  # a JSON file, or an object: further keywords of tensorrt_llm.LLM

    def aside_bytes_min(self, role: str) -> int:
        """From how many bytes of one rank on a load is asynchronous; 0: never.

        At decode all are: a load in a pass holds up every stream, and one beside the passes costs
        the new one a step at most. 0 for native hand-over: there the state of a request that is
        loaded has another meaning
        (DISAGG_GENERATION_TRANS_IN_PROGRESS), to which the cache transceiver looks."""
        if self.handoff != "store":
            return 0
        return min(self.aside_load_mib, 1) if role == "decode" else self.aside_load_mib * 2**20

    @property
    def has_connector_at_decode(self) -> bool:
        """TensorRT-LLM refuses generation-only requests where a connector is attached."""
        return self.handoff == "store"

    def problems(self) -> list[str]:
        found = []
        devices = self.gpus.split(",") if self.gpus else []
        if not all(device.strip().isdecimal() for device in devices):
            found.append(f"gpus is {self.gpus!r}; use CUDA device numbers, 0 or 0,1 say")
        if self.tp_size < 1:
            found.append(f"tp_size is {self.tp_size}; use 1, or the number of GPUs")
        elif devices and len(devices) != self.tp_size:
            found.append(f"gpus names {len(devices)} devices, tp_size is {self.tp_size}")
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            found.append(f"page_tokens is {self.page_tokens}; use a power of two, 32 is usual")
        if not 0.0 < self.gpu_memory_fraction < 1.0:
            found.append(f"gpu_memory_fraction is {self.gpu_memory_fraction}; use 0.9, say")
        if self.aside_load_mib < 0:
            found.append(f"aside_load_mib is {self.aside_load_mib}; use 256, say, or 0 for never")
        if self.handoff not in HANDOFFS:
            found.append(f"handoff is {self.handoff!r}; use {' or '.join(HANDOFFS)}")
        if self.transceiver not in TRANSCEIVERS:
            found.append(f"transceiver is {self.transceiver!r}; use {' or '.join(TRANSCEIVERS)}")
        return found


class _InBlocks(Protocol):
    @property
    def block_tokens(self) -> int: ...


def problems_together(worker: _InBlocks, config: TrtllmConfig) -> Iterator[str]:
    """Parameters that do not fit together, or not this engine."""
    if config.page_tokens > 0 and worker.block_tokens % config.page_tokens:
        yield (
            f"block_tokens ({worker.block_tokens}) must be a multiple of page_tokens "
            f"({config.page_tokens}): a block is moved in whole pages"
        )


def option_problems(options: Mapping[str, Any], is_connected: bool) -> Iterator[str]:
    """What `llm_options` may not say; `is_connected`: KV comes from and goes to the store."""
    for name, value in _flat(options):
        if name in SAID_ELSEWHERE:
            yield f"llm_options sets {name}; that is said by {SAID_ELSEWHERE[name]}"
        elif name in (*OBJECTS, "model_kwargs") and not isinstance(value, Mapping):
            yield f"llm_options sets {name} to {value!r}; it must be a JSON object"
        elif name in ONLY and (is_connected or name == "backend"):
            rule = ONLY[name]
            if value not in rule.values:
                allowed = " or ".join(repr(each) for each in rule.values)
                yield f"llm_options sets {name} to {value!r}; only {allowed}: {rule.why}"


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each option, and each key of those that are objects."""
    for name, value in options.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())


def read_options(text: str, repository: str, found: list[str]) -> dict[str, Any]:
    """The object that `llm_options` is or names; relative paths start beside the repository."""
    if not text:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            path = Path(text).expanduser()
            path = path if path.is_absolute() else Path(repository).parent / path
            text = path.read_text("utf-8")
        options = json.loads(text)
    except OSError as error:
        found.append(f"llm_options cannot be read: {error}")
        return {}
    except ValueError as error:
        found.append(f"llm_options is no JSON: {error}")
        return {}
    if not isinstance(options, dict):
        found.append(f"llm_options is {options!r:.40}; it must be a JSON object")
        return {}
    return options
