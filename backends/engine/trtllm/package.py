"""The package tensorrt_llm, the environment of its processes, and the arguments of its LLM.

On the worker's side only this file imports tensorrt_llm, which loads CUDA, starts MPI and takes
seconds.

Triton's stub may have been started under MPI. An engine that inherits its rank and world would wait
for other processes for ever, so these variables are removed. Variables that tune MPI stay.

Not here: the imports of the connector (connector.py), the settings (settings.py), the shape of the
model (kv_shape.py).
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

from backends.engine.connected.settings import EngineSpec, visible_devices
from backends.engine.trtllm.releases import V2, kv_manager_of
from backends.engine.trtllm.settings import GUIDED_BACKEND, OBJECTS, TrtllmConfig
from backends.errors import InvalidRequest
from backends.tensors import GRAMMAR, JSON_SCHEMA, REGEX, guide_name

MISSING = (
    "engine is 'tensorrt_llm', but the package tensorrt_llm is not installed. Its wheels are on "
    "NVIDIA's own package index and in its containers, not on PyPI: build deploy/Dockerfile.trtllm "
    "(NGC tritonserver:<yy.mm>-trtllm-python-py3), or use engine 'torch'"
)
CONNECTOR_MODULE = "backends.engine.trtllm.connector"
# Kind of a grammar -> keyword of GuidedDecodingParams.
KEYWORD_OF_KIND = {JSON_SCHEMA: "json", REGEX: "regex", GRAMMAR: "grammar"}
SCHEDULER_CLASS, WORKER_CLASS = "MooncakeConnectorScheduler", "MooncakeConnectorWorker"


class PackageProblem(Exception):
    """tensorrt_llm is missing, or this project cannot use it."""


def honour_python_path() -> None:
    """Triton's stub ignores PYTHONPATH; the processes that it starts do not."""
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
    """The keywords that `call` of this release takes; None: any."""
    fields = getattr(call, "model_fields", None)
    if isinstance(fields, Mapping):  # a pydantic model; its signature lacks aliases
        return frozenset(fields)
    parameters = inspect.signature(call).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def only_accepted(call: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The optional keywords that `call` takes."""
    known = accepted(call)
    return {name: value for name, value in keywords.items() if known is None or name in known}


@dataclass(frozen=True, slots=True)
class Package:
    """The modules of tensorrt_llm that the worker's side uses."""

    version: str
    llm_fields: frozenset[str] | None  # keywords of LLM; None: not known
    top: ModuleType  # has LLM and SamplingParams
    llmapi: ModuleType
    llm_args: ModuleType

    def named(self, name: str) -> Any:
        """The class of this name, whose module differs between releases; None: there is none."""
        modules = (self.llm_args, self.llmapi, self.top)
        return next(filter(None, (getattr(each, name, None) for each in modules)), None)

    def config(self, name: str, **keywords: Any) -> Any:
        """An object of this configuration class, with the keywords that this release has."""
        cls = self._class(name)
        return cls(**only_accepted(cls, keywords))

    def guided(self, kind: str, guide: str) -> Any:
        """TensorRT-LLM's GuidedDecodingParams of a grammar. Raises InvalidRequest."""
        try:
            return self._class("GuidedDecodingParams")(**{KEYWORD_OF_KIND[kind]: guide})
        except PackageProblem as problem:
            raise InvalidRequest(f"{guide_name(kind)}: {problem}") from None

    def unknown(self, name: str, keywords: Iterable[str]) -> list[str]:
        """Keywords that this configuration class does not have."""
        known = accepted(self._class(name))
        return [] if known is None else sorted(set(keywords) - known)

    def _class(self, name: str) -> Any:
        cls = self.named(name)
        if cls is None:
            raise PackageProblem(f"tensorrt_llm {self.version} has no {name}; 1.2 or newer does")
        return cls


def load() -> Package:
    """Raises PackageProblem or UnknownRelease."""
    if not is_installed():
        raise PackageProblem(MISSING)
    try:
        top = importlib.import_module("tensorrt_llm")
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        llm_args = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    except (ImportError, OSError, RuntimeError) as error:  # a missing library, no GPU
        raise PackageProblem(f"tensorrt_llm cannot be imported: {error}") from error
    version = str(getattr(top, "__version__", "of unknown version"))
    kv_manager_of(version)
    arguments = getattr(llm_args, "TorchLlmArgs", None)
    fields = accepted(arguments) if arguments is not None else None
    if fields is not None and "kv_connector_config" not in fields:
        raise PackageProblem(
            f"tensorrt_llm {version} has no kv_connector_config; 1.2 or newer is needed"
        )
    return Package(version, fields, top, llmapi, llm_args)


LEFTOVER_PREFIXES = (
    "OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "OMPI_MCA_orte_", "ORTE_",
    "OMPI_MCA_ess_",
)  # fmt: skip


def remove_mpi_leftovers(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the names that were removed."""
    leftover = sorted(name for name in environment if name.startswith(LEFTOVER_PREFIXES))
    for name in leftover:
        del environment[name]
    return leftover


def choose_gpus(environment: MutableMapping[str, str], gpus: str) -> None:
    """Restrict the engine's processes to these CUDA devices, numbered as this process sees them."""
    if chosen := visible_devices(environment, gpus):
        environment["CUDA_VISIBLE_DEVICES"] = chosen
        environment["TRTLLM_VISIBLE_DEVICES"] = chosen


@contextlib.contextmanager
def turn_to_start(folder: Path, visible: str) -> Iterator[None]:
    """Start engines on a GPU one after the other, because an engine measures the free memory before
    it allocates. `visible` as in CUDA_VISIBLE_DEVICES; empty: one lock for all devices."""
    devices = sorted(name for name in visible.split(",") if name) or ["any"]
    with contextlib.ExitStack() as held:  # locked in one order, so without deadlock
        for device in devices:
            file = held.enter_context((folder / f"gpu-{device}.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with this process
        yield


def gpu_names() -> str:
    """The models of this machine's NVIDIA GPUs, by the driver; "" if there are none."""
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(models))


NO_OTHER_TIER = {"host_cache_size": 0, "disk_cache_size": 0}
OBJECT_CLASSES = dict(zip(OBJECTS, ("KvCacheConfig", "SchedulerConfig"), strict=True))
NO_EVICT = "GUARANTEED_NO_EVICT"


def llm_arguments(
    package: Package,
    spec: EngineSpec,
    config: TrtllmConfig,
    folder: Path,
    context_tokens_max: int,
    options: Mapping[str, Any],
    checkpoint_dtype: str,
) -> dict[str, Any]:
    """Raises PackageProblem for an option that this release does not have."""
    rest = dict(options)
    policy = getattr(package.named("CapacitySchedulerPolicy"), NO_EVICT, NO_EVICT)
    unknown = [
        f"{option}.{key}"
        for option, name in OBJECT_CLASSES.items()
        for key in package.unknown(name, options.get(option, {}))
    ]
    arguments: dict[str, Any] = {
        "model": str(folder),
        # Workers convert text. The engine needs the vocabulary for grammars only.
        "skip_tokenizer_init": not options.get(GUIDED_BACKEND),
        "tensor_parallel_size": config.tp_size,
        "dtype": spec.dtype,
        "max_seq_len": context_tokens_max,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        **_batch(spec),
        "kv_cache_config": package.config(
            "KvCacheConfig", **_kv_cache(package, spec, config) | rest.pop("kv_cache_config", {})
        ),
        "scheduler_config": package.config(
            "SchedulerConfig",
            **rest.pop("scheduler_config", {}) | {"capacity_scheduler_policy": policy},
        ),
    }
    if config.is_connected(spec.role):
        arguments["kv_connector_config"] = package.config(
            "KvCacheConnectorConfig",
            connector_module=CONNECTOR_MODULE,
            connector_scheduler_class=SCHEDULER_CLASS,
            connector_worker_class=WORKER_CLASS,
        )
    if config.handoff == "native":
        arguments["cache_transceiver_config"] = package.config(
            "CacheTransceiverConfig",
            backend=config.transceiver,
            max_tokens_in_buffer=context_tokens_max,
        )
    if spec.dtype != checkpoint_dtype:
        rest["model_kwargs"] = _asked_dtype(package, spec.dtype, checkpoint_dtype, rest)
    arguments |= rest
    if package.llm_fields is not None:
        unknown += set(arguments) - package.llm_fields
    if unknown:
        raise PackageProblem(
            f"tensorrt_llm {package.version} does not know {', '.join(sorted(unknown))}"
        )
    return arguments


def _kv_cache(package: Package, spec: EngineSpec, config: TrtllmConfig) -> dict[str, Any]:
    # TensorRT-LLM's own hand-over has most of its transceivers for V1 only.
    is_v2 = kv_manager_of(package.version) == V2 and config.handoff == "store"
    return {
        "enable_block_reuse": True,  # TensorRT-LLM asks connectors only with it
        "enable_partial_reuse": False,
        "tokens_per_block": config.page_tokens,
        **({} if spec.kv_dtype == "auto" else {"dtype": spec.kv_dtype}),
        # One page more for each request, for the step that is scheduled early.
        "max_tokens": spec.pages_tokens + spec.step_requests_max * config.page_tokens,
        "free_gpu_memory_fraction": config.gpu_memory_fraction,
        # Explicit, because defaults have changed between releases.
        "use_kv_cache_manager_v2": is_v2,
        **(NO_OTHER_TIER if config.is_connected(spec.role) else {}),
    }


def _asked_dtype(
    package: Package, dtype: str, checkpoint_dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Only the builder of TensorRT engines reads `dtype`. The PyTorch flow takes the dtype of the
    checkpoint's config, unless model_kwargs override it."""
    if package.llm_fields is not None and "model_kwargs" not in package.llm_fields:
        raise PackageProblem(
            f"dtype is {dtype}, the checkpoint computes in {checkpoint_dtype or '?'}, and "
            f"tensorrt_llm {package.version} cannot be told otherwise (no model_kwargs): set dtype "
            "to the checkpoint's, or use a newer release"
        )
    # Newer releases read the config's `dtype` first, and `torch_dtype` where it has none.
    return {**options.get("model_kwargs", {}), "torch_dtype": dtype, "dtype": dtype}


def _batch(spec: EngineSpec) -> dict[str, Any]:
    """The limits of a step. Prefill computes one step after the other, without CUDA graphs."""
    limits = {"max_batch_size": spec.step_requests_max, "max_num_tokens": spec.step_tokens_max}
    if spec.role == "prefill":
        return {**limits, "cuda_graph_config": None, "disable_overlap_scheduler": True}
    return limits
