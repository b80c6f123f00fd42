"""What workers of either role ask of an engine of TensorRT-LLM, with a worker's usual defaults."""

from __future__ import annotations

from typing import Any

from backends.config_pbtxt import DecodeConfig, PrefillConfig
from backends.engine.connected.settings import EngineSpec

COMMON = ("dtype", "kv_dtype", "block_tokens", "kv_pages", "context_tokens_max")


def prefill_spec(**changes: Any) -> EngineSpec:
    config = PrefillConfig(**{"kv_pages": 256, **changes})
    common = {name: getattr(config, name) for name in COMMON}
    return EngineSpec(
        role="prefill",
        requests_max=config.queue_requests_max,
        chunk_tokens=config.chunk_tokens,
        **common,
    )


def decode_spec(**changes: Any) -> EngineSpec:
    config = DecodeConfig(**{"kv_pages": 256, **changes})
    common = {name: getattr(config, name) for name in COMMON}
    return EngineSpec(role="decode", requests_max=config.slots, **common)
