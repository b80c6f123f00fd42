"""The package tensorrt_llm, imported when a worker asks for it and not before.

Importing it loads CUDA, starts MPI and takes seconds; on most machines it is not there at all. So
no other file of the worker's side imports it, and `load` says in words what to do without it.

Not here: the connector's own imports, which happen in other processes (connector.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MISSING = (
    "engine is 'tensorrt_llm', but the package tensorrt_llm is not installed. Its wheels are on "
    "NVIDIA's own package index and in its containers, not on PyPI: build deploy/Dockerfile.trtllm "
    "(NGC tritonserver:<yy.mm>-trtllm-python-py3), or use engine 'torch'"
)
CONNECTOR_MODULE = "backends.engine.trtllm.connector"
SCHEDULER_CLASS, WORKER_CLASS = "MooncakeConnectorScheduler", "MooncakeConnectorWorker"


class PackageProblem(Exception):
    """tensorrt_llm is not there, or is not one that this project can use."""


def honour_python_path() -> None:
    """Triton's stub starts Python isolated from PYTHONPATH; processes that it starts are not."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.append(folder)


def is_installed() -> bool:
    honour_python_path()
    try:
        return importlib.util.find_spec("tensorrt_llm") is not None
    except (ImportError, ValueError):
        return False


def accepted(call: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that `call` takes; None: any. Signatures changed between releases."""
    fields = getattr(call, "model_fields", None)
    if isinstance(fields, Mapping):  # a pydantic model: its signature says nothing of aliases
        return frozenset(fields)
    parameters = inspect.signature(call).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def only_accepted(call: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `keywords` that `call` knows. For keywords that are welcome, not needed."""
    known = accepted(call)
    return {name: value for name, value in keywords.items() if known is None or name in known}


@dataclass(frozen=True, slots=True)
class Package:
    """The names of tensorrt_llm that the worker's side uses."""

    version: str
    llm: Any
    llm_fields: frozenset[str] | None  # keywords of LLM; None: not known
    sampling_params: Any
    disaggregated_params: Any
    llmapi: ModuleType
    llm_args: ModuleType

    def config(self, name: str, **keywords: Any) -> Any:
        """An object of this configuration class, with the keywords that this release knows."""
        cls = self._class(name)
        return cls(**only_accepted(cls, keywords))

    def unknown(self, name: str, keywords: Iterable[str]) -> list[str]:
        """Those of `keywords` that this configuration class does not have."""
        known = accepted(self._class(name))
        return [] if known is None else sorted(set(keywords) - known)

    def _class(self, name: str) -> Any:
        cls = getattr(self.llm_args, name, None) or getattr(self.llmapi, name, None)
        if cls is None:
            raise PackageProblem(f"tensorrt_llm {self.version} has no {name}; 1.2 or newer does")
        return cls


def load() -> Package:
    """Import it; PackageProblem, in words, when it cannot be used."""
    if not is_installed():
        raise PackageProblem(MISSING)
    try:
        top = importlib.import_module("tensorrt_llm")
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        llm_args = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    except (ImportError, OSError, RuntimeError) as error:  # a missing library, no GPU
        raise PackageProblem(f"tensorrt_llm cannot be imported: {error}") from error
    version = str(getattr(top, "__version__", "of unknown version"))
    arguments = getattr(llm_args, "TorchLlmArgs", None)
    fields = accepted(arguments) if arguments is not None else None
    if fields is not None and "kv_connector_config" not in fields:
        raise PackageProblem(
            f"tensorrt_llm {version} has no kv_connector_config; 1.2 or newer is needed"
        )
    return Package(
        version=version,
        llm=top.LLM,
        llm_fields=fields,
        sampling_params=top.SamplingParams,
        disaggregated_params=getattr(top, "DisaggregatedParams", None)
        or getattr(llmapi, "DisaggregatedParams", None),
        llmapi=llmapi,
        llm_args=llm_args,
    )
