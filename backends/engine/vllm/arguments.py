"""The arguments of vLLM: what ours sets, what `vllm_options` adds, and a checked VllmConfig.

Runs in the process of vLLM only.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from backends.engine.vllm.logits_processors import processor_of


def engine_config(arguments: Mapping[str, Any]) -> Any:
    """A VllmConfig. Raises ValueError with every unknown option, or vLLM's reason."""
    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(f"vllm_options: vLLM does not know {', '.join(unknown)}")
    values = dict(arguments)
    if connector := values.get("kv_transfer_config"):
        values["kv_transfer_config"] = KVTransferConfig(**connector)
    if guided := values.get("structured_outputs_config"):
        values["structured_outputs_config"] = StructuredOutputsConfig(**guided)
    if current_platform.is_cpu():
        preload_openmp()
    if current_platform.is_cpu() and values.get("tensor_parallel_size", 1) == 1:
        # One rank computes in the EngineCore. By default vLLM gives it a process on CPUs, to set
        # its threads, which ours sets by itself. Such a process spins for a second after a step.
        values["distributed_executor_backend"] = UniProcExecutor
    config = AsyncEngineArgs(**values).create_engine_config()
    config.model_config.logits_processors = [processor_of(config)]
    return config


def preload_openmp() -> None:
    """Let vLLM's next processes load Intel's OpenMP, as its log advises. Otherwise vLLM takes that
    of torch, whose threads may share one core."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    if library.exists() and "omp" not in loaded:
        os.environ["LD_PRELOAD"] = f"{loaded}:{library}" if loaded else str(library)
