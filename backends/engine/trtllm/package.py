"""The package tensorrt_llm, imported when a worker asks for it and not before.

Importing it loads CUDA, starts MPI and takes seconds; on most machines it is not there at all. So
no other file of the worker's side imports it, and `load` says in words what to do without it.

Its processes get an environment without leftovers of MPI and with the right GPUs, and start in
turn. Triton's stub may itself have been started under MPI; an engine that inherits its rank and its
world would wait for peers that are not there. Variables that tune MPI (OMPI_MCA_*) are kept, but
for those that name the inherited job.

Not here: the connector's own imports, which happen in other processes (connector.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
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


LEFTOVER_NAMES = frozenset({"OMPI_UNIVERSE_SIZE"})
LEFTOVER_PREFIXES = (
    "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "OMPI_MCA_orte_", "ORTE_", "OMPI_MCA_ess_",
)  # fmt: skip


def remove_mpi_leftovers(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the names that were removed."""
    leftover = sorted(
        name for name in environment
        if name in LEFTOVER_NAMES or name.startswith(LEFTOVER_PREFIXES)
    )  # fmt: skip
    for name in leftover:
        del environment[name]
    return leftover


def choose_gpus(environment: MutableMapping[str, str], gpus: str) -> None:
    """Let the engine, and the processes that it starts, see these CUDA devices only.

    Numbers are those of the devices that this process sees itself.
    """
    if not gpus:
        return
    wanted = [int(device) for device in gpus.split(",")]
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible:
        if max(wanted) >= len(visible):
            raise ValueError(f"gpus is {gpus}, but this process sees only {','.join(visible)}")
        chosen = ",".join(visible[device] for device in wanted)
    else:
        chosen = ",".join(str(device) for device in wanted)
    environment["CUDA_VISIBLE_DEVICES"] = chosen
    environment["TRTLLM_VISIBLE_DEVICES"] = chosen


@contextlib.contextmanager
def turn_to_start(folder: Path, visible: str) -> Iterator[None]:
    """One engine after the other on each GPU: an engine measures how much memory is free, and one
    that loads its weights meanwhile takes from what it has counted on. `visible` as in
    CUDA_VISIBLE_DEVICES; empty: whatever there is, and then one turn for all."""
    devices = sorted(name for name in visible.split(",") if name) or ["any"]
    with contextlib.ExitStack() as held:  # in one order everywhere, so that nobody waits in a ring
        for device in devices:
            file = held.enter_context((folder / f"gpu-{device}.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)  # gone with this process, whatever happens to it
        yield


def gpu_names() -> str:
    """The models of this machine's NVIDIA GPUs, as the driver says; "" without one."""
    names = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                names.add(line.partition(":")[2].strip())
    return ", ".join(sorted(names))
