"""Part of the stand-in for tensorrt_llm."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: llm.py needs modules that import this package."""
    if name != "GuidedDecodingParams":
        raise AttributeError(f"module 'tensorrt_llm.llmapi' has no attribute {name!r}")
    return getattr(importlib.import_module("tensorrt_llm.llmapi.llm"), name)
