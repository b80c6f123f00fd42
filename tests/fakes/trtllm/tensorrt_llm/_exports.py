"""Names of the top package, imported when they are asked for, as in the newest versions."""

from __future__ import annotations

import importlib
from typing import Any

HOME_OF = {
    "LLM": "tensorrt_llm.llmapi.llm",
    "SamplingParams": "tensorrt_llm.llmapi.llm",
    "DisaggregatedParams": "tensorrt_llm.llmapi.llm",
    "GuidedDecodingParams": "tensorrt_llm.llmapi.llm",
}


def __getattr__(name: str) -> Any:
    if name not in HOME_OF:
        raise AttributeError(f"module 'tensorrt_llm' has no attribute {name!r}")
    return getattr(importlib.import_module(HOME_OF[name]), name)
