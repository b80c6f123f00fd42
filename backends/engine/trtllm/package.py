"""The package tensorrt_llm, imported when a worker asks for it and not before.

Importing it loads CUDA, starts MPI and takes seconds; on most machines it is not there at all. So
no other file of the worker's side imports it, and `load` says in words what to do without it.

Its processes get an environment without leftovers of MPI and with the right GPUs, and start in
turn. Triton's stub may itself have been started under MPI; an engine that inherits its rank and its
world would wait for peers that are not there. Variables that tune MPI (OMPI_MCA_*) are kept, but
for those that name the inherited job.

`llm_arguments` are the keywords of tensorrt_llm.LLM for a prefill or a decode worker. Prefill
computes one step after the other and has no use for CUDA graphs or for scheduling the next step
early; decode keeps TensorRT-LLM's defaults for both (loads are whole pages before the forward pass,
so no hook has to fire inside a graph). Page reuse inside the engine stays on, since the connector
is only asked with it; partial pages are never reused.

Not here: the connector's own imports, which happen in other processes (connector.py), what may be
set (settings.py), the model's shape (kv_shape.py).
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

from backends.engine.trtllm.settings import GUIDED_BACKEND, OBJECTS, EngineSpec, TrtllmConfig
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

    def guided(self, kind: str, guide: str) -> Any:
        """TensorRT-LLM's GuidedDecodingParams of a grammar. Raises InvalidRequest."""
        try:
            return self._class("GuidedDecodingParams")(**{KEYWORD_OF_KIND[kind]: guide})
        except PackageProblem as problem:
            raise InvalidRequest(f"{guide_name(kind)}: {problem}") from None

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
    "OMPI_COMM_WORLD_",
    "PMIX_",
    "PMI_",
    "OMPI_MCA_orte_",
    "ORTE_",
    "OMPI_MCA_ess_",
)


def remove_mpi_leftovers(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the names that were removed."""
    leftover = sorted(
        name for name in environment if name in LEFTOVER_NAMES or name.startswith(LEFTOVER_PREFIXES)
    )
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
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("Model:"):
                names.add(line.partition(":")[2].strip())
    return ", ".join(sorted(names))


PAGES_OF_ITS_OWN = {"use_kv_cache_manager_v2": False, "host_cache_size": 0, "disk_cache_size": 0}
OBJECT_CLASSES = dict(zip(OBJECTS, ("KvCacheConfig", "SchedulerConfig"), strict=True))
PREFILL_BATCH_MAX = 64  # prompts that may share a step; chunk_tokens bounds their tokens
DECODE_STEP_TOKENS_MIN = 2048  # ends of prompts that join a step; the rest waits for the next one


def is_connected(config: TrtllmConfig, role: str) -> bool:
    """Does KV of this worker's engine come from and go to the store?"""
    return role == "prefill" or config.has_connector_at_decode


def llm_arguments(
    package: Package,
    spec: EngineSpec,
    config: TrtllmConfig,
    folder: Path,
    context_tokens_max: int,
    options: Mapping[str, Any],
    checkpoint_dtype: str,
) -> dict[str, Any]:
    """Raises PackageProblem for what this release does not know."""
    rest, batch = dict(options), _batch(spec)
    unknown = [
        f"{option}.{key}"
        for option, name in OBJECT_CLASSES.items()
        for key in package.unknown(name, options.get(option, {}))
    ]
    arguments: dict[str, Any] = {
        "model": str(folder),
        # Tokens in, tokens out: text is the workers'. Only a grammar wants the vocabulary.
        "skip_tokenizer_init": not options.get(GUIDED_BACKEND),
        "tensor_parallel_size": config.tp_size,
        "dtype": spec.dtype,
        "max_seq_len": context_tokens_max,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        **batch,
        "kv_cache_config": _kv_cache(package, spec, config, batch, rest.pop("kv_cache_config", {})),
        "scheduler_config": package.config(
            "SchedulerConfig",
            **{
                "capacity_scheduler_policy": _guaranteed(package),
                **{
                    name: value
                    for name, value in rest.pop("scheduler_config", {}).items()
                    if name != "capacity_scheduler_policy"
                },
            },
        ),
    }
    if is_connected(config, spec.role):
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


def _kv_cache(
    package: Package,
    spec: EngineSpec,
    config: TrtllmConfig,
    batch: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    return package.config(
        "KvCacheConfig",
        **{
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
            "tokens_per_block": config.page_tokens,
            **({} if spec.kv_dtype == "auto" else {"dtype": spec.kv_dtype}),
            # A page more for each request: the step that is scheduled early needs a place.
            "max_tokens": spec.pages_tokens + batch["max_batch_size"] * config.page_tokens,
            "free_gpu_memory_fraction": config.gpu_memory_fraction,
            # Each is left out where a release does not know it; defaults have changed.
            **(PAGES_OF_ITS_OWN if is_connected(config, spec.role) else {}),
            **options,
        },
    )


def _asked_dtype(
    package: Package, dtype: str, checkpoint_dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """`dtype` is read by the builder of TensorRT engines only: the PyTorch flow computes in what
    the checkpoint's config says, unless it is told otherwise so."""
    if package.llm_fields is not None and "model_kwargs" not in package.llm_fields:
        raise PackageProblem(
            f"dtype is {dtype}, the checkpoint computes in {checkpoint_dtype or '?'}, and "
            f"tensorrt_llm {package.version} cannot be told otherwise (no model_kwargs): set dtype "
            "to the checkpoint's, or use a newer release"
        )
    return {**options.get("model_kwargs", {}), "torch_dtype": dtype}


def _batch(spec: EngineSpec) -> dict[str, Any]:
    """What one step may compute, and how steps follow each other."""
    if spec.role == "prefill":
        return {
            "max_batch_size": min(PREFILL_BATCH_MAX, spec.requests_max),
            "max_num_tokens": spec.chunk_tokens,
            "cuda_graph_config": None,
            "disable_overlap_scheduler": True,
        }
    return {
        "max_batch_size": spec.requests_max,
        "max_num_tokens": max(DECODE_STEP_TOKENS_MIN, spec.requests_max),
    }


def _guaranteed(package: Package) -> Any:
    policies = getattr(package.llm_args, "CapacitySchedulerPolicy", None) or getattr(
        package.llmapi, "CapacitySchedulerPolicy", None
    )
    return "GUARANTEED_NO_EVICT" if policies is None else policies.GUARANTEED_NO_EVICT
