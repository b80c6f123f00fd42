"""What vLLM makes of a checkpoint and its arguments: the shape of KV, and what decides its bytes.

vLLM is asked instead of reading config.json, so that each of its model families is described as it
runs. Everything that changes the bytes of a page is in `pages_id`, a part of the fingerprint:
vLLM's version, platform, attention backend, instruction set, page size and dtype. It also has
config.json as vLLM uses it, with overrides. On a CPU the order of KV inside a page depends on the
instruction set.

Runs in the process of vLLM only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import vllm
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from backends.engine.connected.kv_identity import canonical, without_harmless_keys
from backends.engine.vllm.messages import DescribedKv

log = logging.getLogger(__name__)
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def described(config: Any) -> DescribedKv:
    """`config`: a VllmConfig."""
    model, cache = config.model_config, config.cache_config
    is_latent = bool(model.use_mla)
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = "fp8" if cache.cache_dtype in FP8 else dtype
    return DescribedKv(
        version=vllm.__version__,
        architecture=str((model.architectures or ["unknown"])[0]),
        layers=model.get_num_layers(config.parallel_config),
        hidden=model.get_hidden_size(),
        kv_heads=1 if is_latent else model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        is_latent=is_latent,
        kv_dtype=kv_dtype,
        page_tokens=cache.block_size,
        vocabulary_tokens=model.get_vocab_size(),
        context_tokens_max=model.max_model_len,
        platform=current_platform.device_type,
        pages_id="-".join(_parts(config, dtype, cache.cache_dtype)),
        windows=bool(model.get_sliding_window()),
    )


def _parts(config: Any, dtype: str, cache_dtype: str) -> list[str]:
    model, block_tokens = config.model_config, config.cache_config.block_size
    tp_size = config.parallel_config.tensor_parallel_size
    parts = ["vllm", vllm.__version__, current_platform.device_type, f"tp{tp_size}"]
    parts += [f"page{block_tokens}", dtype, str(cache_dtype), _backend(config)]
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_dim = model.get_head_size()
        parts.append(_get_attn_isa(model.dtype, block_tokens, head_dim, cache_dtype))
    if model.quantization:
        parts.append(str(model.quantization))
    if model.model_impl != "auto":
        parts.append(str(model.model_impl))
    if config.load_config.load_format == "dummy":  # random weights
        parts.append(f"dummy{model.seed}")
    parts.append(_hashed(model.hf_config))
    return parts


def _hashed(hf_config: Any) -> str:
    """config.json as vLLM uses it, with the overrides of its arguments."""
    text = canonical(without_harmless_keys(json.loads(hf_config.to_json_string(use_diff=False))))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _backend(config: Any) -> str:
    """The name of the attention backend of the model's layers."""
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(
            model.get_head_size(),
            model.dtype,
            config.cache_config.cache_dtype,
            use_mla=model.use_mla,
            has_sliding_window=bool(model.get_sliding_window()),
        )
    return str(backend.get_name())
