"""Which worker serves a role with an engine, and which parameters its config.pbtxt may have.

Not here: the parameters themselves (backends/workers/config.py, engine/trtllm/settings.py), Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.trtllm import settings as trtllm_settings
from backends.workers.config import DecodeConfig, PrefillConfig, read_configs


def read_worker_configs(role: str, model: str, raw: Mapping[str, str], count: int) -> list[Any]:
    """The worker's config, and that of its engine where it has one of its own."""
    config_class: Any = PrefillConfig if role == "prefill" else DecodeConfig
    if raw.get("engine") != "tensorrt_llm":
        return read_configs((config_class,), model, raw, count)
    classes = (config_class, trtllm_settings.TrtllmConfig)
    return read_configs(classes, model, raw, count, trtllm_settings.problems_together)


def worker_class(role: str, engine: str) -> Any:
    """Imported here: a worker loads what its own engine needs and nothing else."""
    if engine == "tensorrt_llm":
        from backends.workers.trtllm.decode_worker import TrtllmDecodeWorker
        from backends.workers.trtllm.prefill_worker import TrtllmPrefillWorker

        return TrtllmPrefillWorker if role == "prefill" else TrtllmDecodeWorker
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.prefill_worker import PrefillWorker

    return PrefillWorker if role == "prefill" else DecodeWorker
