"""Makes the driver of a worker on TensorRT-LLM or on vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.config_pbtxt import DecodeConfig, PrefillConfig, checkpoint_folder
from backends.engine.connected.channel import Listener
from backends.engine.connected.generation import ConnectedEngine
from backends.engine.connected.settings import PREFILL_BATCH_MAX, EngineSpec
from backends.engine.model_config import CheckpointError
from backends.engine.trtllm.engine import TrtllmEngine
from backends.engine.trtllm.kv_shape import read_kv_dtype, read_kv_shape
from backends.engine.trtllm.settings import TrtllmConfig
from backends.engine.vllm.engine import VllmEngine
from backends.engine.vllm.settings import VllmConfig
from backends.errors import ConfigError
from backends.workers.connected.decode import ConnectedDecode
from backends.workers.connected.driver import EngineUse
from backends.workers.connected.prefill import ConnectedPrefill


def make_driver(
    worker_id: str,
    worker: PrefillConfig | DecodeConfig,
    repository: str,
    config: TrtllmConfig | VllmConfig,
) -> ConnectedPrefill | ConnectedDecode:
    """Load the engine of `config`, return its driver. Raises ConfigError. Real weights take
    minutes."""
    return driver_of(worker, load_engine(worker_id, [worker], repository, config))


def driver_of(
    worker: PrefillConfig | DecodeConfig, use: EngineUse
) -> ConnectedPrefill | ConnectedDecode:
    if isinstance(worker, PrefillConfig):
        return ConnectedPrefill(worker, use)
    return ConnectedDecode(worker, use)


def load_engine(
    worker_id: str,
    roles: Sequence[PrefillConfig | DecodeConfig],
    repository: str,
    config: TrtllmConfig | VllmConfig,
) -> EngineUse:
    """`roles`: the worker's parameters in each role that it may take; what both roles have is equal
    in them. Raises ConfigError."""
    worker = roles[0]
    folder = checkpoint_folder(worker.checkpoint, repository)
    spec = _spec_of(roles)

    def make_engine(listener: Listener, on_step: Callable[[float], None]) -> ConnectedEngine:
        if isinstance(config, VllmConfig):  # it describes its KV by itself
            return VllmEngine(
                worker_id, spec, config, folder, repository, worker.threads, worker.device,
                worker.pages_max, listener, on_step,
            )  # fmt: skip
        of_pages = replace(spec, kv_pages=_kv_pages(worker, config, folder))
        return TrtllmEngine(worker_id, of_pages, config, folder, repository, listener, on_step)

    return EngineUse(make_engine)


def _spec_of(roles: Sequence[PrefillConfig | DecodeConfig]) -> EngineSpec:
    worker, limits, chunk_tokens = roles[0], [], 0
    for each in roles:
        if isinstance(each, PrefillConfig):
            queue, chunk_tokens = each.queue_requests_max, each.chunk_tokens
            limits.append(queue if len(roles) == 1 else min(queue, PREFILL_BATCH_MAX))
        else:
            limits.append(each.slots)
    role = "prefill" if isinstance(worker, PrefillConfig) else "decode"
    return EngineSpec(
        role=role if len(roles) == 1 else "both",
        dtype=worker.dtype,
        kv_dtype=worker.kv_dtype,
        block_tokens=worker.block_tokens,
        kv_pages=worker.kv_pages,
        context_tokens_max=worker.context_tokens_max,
        requests_max=max(limits),
        chunk_tokens=chunk_tokens,
    )


def _kv_pages(worker: PrefillConfig | DecodeConfig, config: TrtllmConfig, folder: Path) -> int:
    """Pages of the worker's KV memory. Raises ConfigError: a wrong checkpoint, too few bytes."""
    if worker.kv_pages:
        return worker.kv_pages
    try:
        shape = read_kv_shape(folder, config.tp_size, worker.context_tokens_max)
        found: list[str] = []
        dtype = read_kv_dtype(folder, worker.kv_dtype, worker.dtype, found)
        if found:
            raise CheckpointError(folder, found)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    layout = shape.layout(dtype, worker.block_tokens, config.tp_size)
    return worker.pages_max(layout.block_bytes)
