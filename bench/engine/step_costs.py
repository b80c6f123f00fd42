"""The least bytes and products of a step, for any engine of a model.

Not here: measuring (own_engine.py, bench/engine_gpu).
"""

from __future__ import annotations

from backends.engine.model_config import ModelConfig
from mooncake_store.layout import DTYPE_BYTES, KvLayout


def layers_scalars(config: ModelConfig) -> int:
    heads = (config.heads + config.kv_heads) * config.head_dim  # q and o, k and v: twice
    return config.layers * config.hidden * (2 * heads + 3 * config.intermediate)


def step_bytes(
    config: ModelConfig,
    layout: KvLayout,
    batch: int,
    context_tokens: int,
    weight_bytes: int | None = None,  # bytes of one weight; None: as of a KV scalar
) -> int:
    """Bytes that a decode step must read: every matrix once, the KV of every sequence."""
    scalars = layers_scalars(config) + config.vocabulary_tokens * config.hidden
    weight_bytes = weight_bytes or DTYPE_BYTES[layout.dtype]
    return scalars * weight_bytes + batch * context_tokens * layout.token_bytes
