"""The engine as it runs on a GPU: pages in memory of their own, kv_pool a mirror of them."""

from __future__ import annotations

from pathlib import Path

import torch

from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import read_model_config
from backends.engine.torch.gpu.decode_graph import Recorder
from backends.engine.torch.gpu.page_copies import CopyQueue
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.rope import rope_table
from backends.engine.torch.torch_engine import TorchEngine
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import load_weights

CPU = torch.device("cpu")


def device_engine(
    path: Path,
    pages_max: int,
    block_tokens: int,
    dtype: str = "float32",
    recorder: Recorder | None = None,
    kernels: PagedKernels | None = None,
    queue: CopyQueue | None = None,
    is_mirrored: bool = True,
    kv_dtype: str = "auto",
) -> TorchEngine:
    config, scalar = read_model_config(path), TORCH_DTYPES[dtype]
    layout = config.layout(config.kv_dtype(kv_dtype, dtype), block_tokens)
    memory = KvMemory(layout, pages_max, CPU, is_mirrored, queue)
    weights = load_weights(
        Checkpoint.open(path), config, scalar, CPU, is_kv_fp8=layout.dtype == "fp8"
    )
    tokens_max = min(config.context_tokens_max, pages_max * block_tokens)
    rope = rope_table(config.rope, config.rotary_dim, tokens_max, scalar, CPU)
    transformer = Transformer(config, weights, memory, rope, kernels)
    return TorchEngine(transformer, "same", recorder=recorder)
