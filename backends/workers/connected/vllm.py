"""Workers on vLLM: makes the drivers of workers/connected/ with its engine."""

from __future__ import annotations

from collections.abc import Callable

from backends.config_pbtxt import DecodeConfig, PrefillConfig, checkpoint_folder
from backends.engine.connected.channel import Listener
from backends.engine.connected.settings import EngineSpec
from backends.engine.vllm.engine import VllmEngine
from backends.engine.vllm.settings import VllmConfig
from backends.workers.connected.decode import ConnectedDecode
from backends.workers.connected.prefill import ConnectedPrefill


def make_driver(
    worker_id: str, worker: PrefillConfig | DecodeConfig, repository: str, config: VllmConfig
) -> ConnectedPrefill | ConnectedDecode:
    """Start vLLM and return its driver. Raises ConfigError. Real weights take minutes."""
    is_prefill = isinstance(worker, PrefillConfig)
    folder = checkpoint_folder(worker.checkpoint, repository)
    spec = EngineSpec(
        role="prefill" if is_prefill else "decode",
        dtype=worker.dtype,
        kv_dtype=worker.kv_dtype,
        block_tokens=worker.block_tokens,
        kv_pages=worker.kv_pages,
        context_tokens_max=worker.context_tokens_max,
        requests_max=worker.queue_requests_max if is_prefill else worker.slots,
        chunk_tokens=worker.chunk_tokens if is_prefill else 0,
    )

    def make_engine(listener: Listener, on_step: Callable[[float], None]) -> VllmEngine:
        return VllmEngine(
            worker_id, spec, config, folder, repository, worker.threads, worker.device,
            worker.pages_max, listener, on_step,
        )  # fmt: skip

    if isinstance(worker, PrefillConfig):
        return ConnectedPrefill(worker, make_engine)
    return ConnectedDecode(worker, make_engine)
