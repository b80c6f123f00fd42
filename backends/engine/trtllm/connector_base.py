"""What stands in for TensorRT-LLM's base classes where it is not installed (connector.py)."""

from __future__ import annotations

from typing import Any


class SchedulerBase:
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class WorkerBase:
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def register_forward_pass_callable(self) -> None:
        return None
