"""Parameters of each model's config.pbtxt: types, defaults and checks.

`read_config` builds a frozen dataclass from Triton's `parameters`. If parameters are wrong,
`read_config` raises one error that lists every mistake with its remedy. Not here: tensors
(tensors.py), parameters of routing and admission (conductor/config.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from backends.errors import ConfigError
from conductor.config import AUTO
from mooncake_store.sizes import size_bytes

ENGINES = ("torch", "tensorrt_llm", "vllm")
DTYPES = ("float32", "bfloat16")
CONNECTED_DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
ROLES = ("one", "both")
FLIPPING_ENGINES = ("torch", "vllm")  # a worker with one of them may change its role
TRANSPORTS = ("auto", "mapped", "nixl", "tcp")
# Old -> new name of a parameter. Old names are accepted for one release, with a logged warning.
OLD_NAMES = {"overtaker_share": "expected_arrivals_share"}
KV_PAGES_MIN = 2  # least number of pages of an engine
Size = int  # kind of a parameter in bytes that is written as a size, such as 256M
RECORDING_BYTES_MIN = 2**20  # least value of recording_bytes_max
KIND_NAMES = {"Size": "a size such as 256M", "SecondsOrAuto": "float or auto"}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


KV_PAGES_IS_OLD = (
    "kv_pages is deprecated and overrides kv_bytes; set kv_bytes to a size such as 256M and remove "
    "kv_pages"
)

log = logging.getLogger(__name__)


class Config(Protocol):
    def problems(self) -> list[str]: ...  # every mistake with its remedy; [] if there is none


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Parameters that prefill and decode workers have in common."""

    checkpoint: str = "demo"  # "demo", or a Hugging Face folder (see checkpoint_folder)
    engine: str = "torch"  # torch | tensorrt_llm | vllm
    dtype: str = "float32"  # dtype of weights: float32 | bfloat16; not with torch also float16
    kv_dtype: str = "auto"  # dtype of KV: fp8 | auto (the checkpoint's, or `dtype` without one)
    device: str = "cpu"  # cpu | cuda | cuda:N
    threads: int = 1  # CPU threads of the engine, 1 to 256; all workers of a host share its cores
    store_node: str = "s0"  # name of the storage node whose memory this worker maps
    block_tokens: int = 64  # tokens per block: a power of two, equal in all workers of a store
    context_tokens_max: int = 0  # longest prompt + output in tokens; 0: the checkpoint's limit
    kv_bytes: Size = 256 * 2**20  # KV memory of the engine; at least KV_PAGES_MIN pages
    kv_pages: int = 0  # deprecated: KV memory in pages of block_tokens tokens; 0: by kv_bytes
    # mapped | nixl | tcp | auto (KV of the own node: mapped; of others: nixl if it works, else tcp)
    transport: str = "auto"
    lease_s: float = 30.0  # seconds after which an unrenewed lease on KV blocks ends; >= 1
    transfer_s_max: float = 5.0  # seconds after which a transfer's blocks are missing; < lease_s
    # A pipeline group consists of prefill workers, each with a part of the model's layers.
    pipeline_group: str = ""  # name of the group, equal in its workers; empty: no group
    pipeline_stage: int = 0  # this worker's stage; 0 <= pipeline_stage < pipeline_stages
    pipeline_stages: int = 1  # number of workers in the group
    # one: the worker keeps the role of its backend, prefill or decode. both: the conductor may
    # change the worker's role (parameter role_flips); parameters of both roles may be set.
    roles: str = "one"

    def problems(self) -> list[str]:
        found = []
        dtypes = DTYPES if self.engine == "torch" else CONNECTED_DTYPES
        for name, allowed in (
            ("engine", ENGINES),
            ("dtype", dtypes),
            ("kv_dtype", KV_DTYPES),
            ("transport", TRANSPORTS),
            ("roles", ROLES),
        ):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; use {' or '.join(allowed)}")
        if self.roles == "both" and self.engine not in FLIPPING_ENGINES:
            found.append(
                "roles is 'both'; a change of the role needs the engine "
                f"{' or '.join(FLIPPING_ENGINES)}"
            )
        if self.roles == "both" and self.pipeline_group:
            found.append("roles is 'both'; a stage of a pipeline_group can only be prefill")
        if self.device != "cpu" and not self.device.startswith("cuda"):
            found.append(f"device is {self.device!r}; use cpu, cuda or cuda:0")
        if not 1 <= self.threads <= 256:
            found.append(f"threads is {self.threads}; use 1 to 256")
        if self.block_tokens < 1 or self.block_tokens & (self.block_tokens - 1):
            found.append(f"block_tokens is {self.block_tokens}; use a power of two, such as 64")
        if self.context_tokens_max < 0:
            found.append("context_tokens_max must be 0 (the checkpoint's limit) or positive")
        if self.kv_pages and self.kv_pages < KV_PAGES_MIN:
            found.append(f"kv_pages is {self.kv_pages}; use kv_bytes, or at least {KV_PAGES_MIN}")
        if self.lease_s < 1.0:
            found.append(f"lease_s is {self.lease_s}; use 1 or more, 30 is usual")
        if not 0.0 < self.transfer_s_max < self.lease_s:
            found.append(
                f"transfer_s_max ({self.transfer_s_max}) must be positive and below lease_s "
                f"({self.lease_s}), or a block's memory could be reused while it is read"
            )
        if not self.store_node:
            found.append("store_node must name a storage node, such as s0")
        found += self._pipeline_problems()
        return found

    def pages_max(self, page_bytes: int) -> int:
        """Number of KV pages of `page_bytes` each. Raises ConfigError if they are too few."""
        pages = self.kv_pages or self.kv_bytes // page_bytes
        if pages < KV_PAGES_MIN:
            raise ConfigError(
                f"kv_bytes is {shown_mib(self.kv_bytes)}, but a page of {self.block_tokens} tokens "
                f"has {shown_mib(page_bytes)} and {KV_PAGES_MIN} pages are needed; set kv_bytes to "
                f"{KV_PAGES_MIN * page_bytes} or more, or lower block_tokens"
            )
        return pages

    def _pipeline_problems(self) -> Iterator[str]:
        if self.pipeline_stages < 1:
            yield f"pipeline_stages is {self.pipeline_stages}; use the group's number of stages"
        elif not 0 <= self.pipeline_stage < self.pipeline_stages:
            yield (
                f"pipeline_stage is {self.pipeline_stage}; use 0 to pipeline_stages - 1 "
                f"({self.pipeline_stages - 1})"
            )
        if self.pipeline_stages > 1 and not self.pipeline_group:
            yield "pipeline_group is empty; use the same name in all stages of the group"
        if self.pipeline_group and self.engine != "torch":
            yield f"pipeline_group needs the torch engine; {self.engine} has its own pipelines"


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """Parameters in model_repository/prefill_*/config.pbtxt."""

    chunk_tokens: int = 512  # longest prefill step in tokens; bounds the wait of the next prompt
    # Whether long prompts are computed layer by layer (engine/batching/batching.py).
    layerwise: bool = True
    queue_requests_max: int = 512  # largest number of waiting prompts; new ones are then rejected

    def problems(self) -> list[str]:
        found = WorkerConfig.problems(self)
        if self.chunk_tokens < 1 or (
            self.block_tokens > 0 and self.chunk_tokens % self.block_tokens
        ):
            found.append(
                f"chunk_tokens ({self.chunk_tokens}) must be a positive multiple of block_tokens "
                f"({self.block_tokens}), or a chunk would end inside a block"
            )
        if self.queue_requests_max < 1:
            found.append("queue_requests_max must be at least 1")
        return found


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """Parameters in model_repository/decode_*/config.pbtxt."""

    slots: int = 32  # largest number of sequences in the decode batch, 1 to 4096
    queue_requests_max: int = 512  # largest number of waiting requests; new ones are then rejected

    def problems(self) -> list[str]:
        found = WorkerConfig.problems(self)
        if self.pipeline_group:
            found.append("pipeline_group is for prefill workers; a decode worker has all layers")
        if not 1 <= self.slots <= 4096:
            found.append(f"slots is {self.slots}; use 1 to 4096")
        if self.queue_requests_max < 1:
            found.append("queue_requests_max must be at least 1")
        return found


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Parameters in model_repository/{preprocessing,postprocessing}/config.pbtxt."""

    checkpoint: str = "demo"

    def problems(self) -> list[str]:
        return [] if self.checkpoint else ["checkpoint must be 'demo' or a Hugging Face folder"]


MORE_WORKERS = (
    "To add a worker, copy its folder. A second instance would be a second engine that is not "
    "registered in the directory"
)
MORE_FRONTENDS = (
    "To add a frontend, start another Triton with this model and the same directory, on this host "
    "or another one. Frontends exchange their routing decisions. With two instances in one Triton, "
    "half of the requests would fail after the death of one instance's process"
)


def read_config(cls: type[C], model: str, raw: Mapping[str, str], count: int = 1) -> C:
    """Build `cls` from the parameters of config.pbtxt; raises ConfigError with every mistake."""
    (config,) = read_configs((cls,), model, raw, count)
    return config  # type: ignore[return-value]


def read_configs(
    classes: Sequence[type[Config]],
    model: str,
    raw: Mapping[str, str],
    count: int = 1,
    together: Callable[..., Iterable[str]] = lambda *configs: (),
) -> list[Any]:
    """One object for each class, all from the same parameters. `count`: number of the model's
    instances. `together` yields the mistakes that depend on several objects. Raises ConfigError."""
    configs, found = check_configs(classes, _by_new_names(model, raw), together)
    if count != 1:
        more = MORE_FRONTENDS if FrontendConfig in classes else MORE_WORKERS
        found.append(f"instance_group count is {count}; use 1. {more}")
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise ConfigError(f"{model}/config.pbtxt has {len(found)} mistake(s):\n{lines}")
    return configs


def check_configs(
    classes: Sequence[type[Config]],
    raw: Mapping[str, str],
    together: Callable[..., Iterable[str]] = lambda *configs: (),
) -> tuple[list[Any], list[str]]:
    """([one object for each class], [every mistake]). A default replaces each unreadable value."""
    known = {f.name: f for cls in classes for f in fields(cls)}  # type: ignore[arg-type]
    found = [
        f"unknown parameter {name!r}; known: {', '.join(sorted(known))}"
        for name in sorted(raw.keys() - known.keys())
    ]
    values: dict[str, object] = {}
    for name in sorted(raw.keys() & known.keys()):
        kind = str(known[name].type)
        try:
            values[name] = convert(kind, raw[name])
        except ValueError:
            found.append(f"{name} is {raw[name]!r}; expected {KIND_NAMES.get(kind, kind)}")
    # Readable values are checked even if others are unreadable, to report every mistake at once.
    configs: list[Config] = []
    for cls in classes:
        own = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        configs.append(cls(**{name: value for name, value in values.items() if name in own}))
        found += [problem for problem in configs[-1].problems() if problem not in found]
    found += together(*configs)
    return configs, found


def _by_new_names(model: str, raw: Mapping[str, str]) -> dict[str, str]:
    """The parameters by their new names. If both names are set, the new name's value is used."""
    named = dict(raw)
    for old, new in OLD_NAMES.items():
        if old in named:
            log.warning("%s/config.pbtxt: %s is now called %s; rename it", model, old, new)
            value = named.pop(old)
            named.setdefault(new, value)
    if "kv_pages" in named:
        log.warning("%s/config.pbtxt: %s", model, KV_PAGES_IS_OLD)
    return named


def convert(kind: str, text: str) -> object:
    """Parse a parameter of this kind: bool, int, float, str, Size or SecondsOrAuto. Raises
    ValueError on failure."""
    if kind == "bool":
        lowered = text.strip().lower()
        if lowered not in TRUE + FALSE:
            raise ValueError(text)
        return lowered in TRUE
    if kind == "Size":
        return int(size_bytes(text))
    if kind == "SecondsOrAuto":
        return AUTO if text.strip() == AUTO else float(text)
    return {"int": int, "float": float, "str": str}[kind](text)


def shown_mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.4g} MiB"


# `auto`, or the name of a format in text/tool_calls/formats.py.
TOOL_CALL_PARSERS = (
    "auto", "deepseek_v3", "hermes", "kimi_k2", "llama3_json", "mistral", "pythonic",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "kimi", "kimi_k2", "qwen3")


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Parameters in model_repository/conductor/config.pbtxt that are not in conductor/config.py."""

    checkpoint: str = "demo"  # source of tokenizer and chat template; the workers' checkpoint
    requests_max: int = 256  # limit of requests in flight, 1 to 4096; each may hold a thread
    attempts_max: int = 3  # a request fails after so many attempts in which a worker died or failed
    # While several tenants have requests: largest part of requests_max that one of them may use.
    tenant_requests_share: float = 0.5
    cancel_poll_s: float = 0.1  # seconds between checks for disconnected clients, 0.01 to 1
    output_tokens_default: int = 256  # max_tokens of a request that has none
    tool_call_parser: str = "auto"  # one of TOOL_CALL_PARSERS; auto: by the chat template
    reasoning_parser: str = "auto"  # one of REASONING_PARSERS; auto: by the chat template
    messages_per_s_max: int = 0  # limit for all streaming clients together; 0: by number of cores
    recording_folder: str = ""  # folder for recorded traffic (see path_beside); "": do not record
    recording_bytes_max: int = 2**30  # limit for all recordings together; the oldest are deleted

    def problems(self) -> list[str]:
        found = [] if self.checkpoint else ["checkpoint must be 'demo' or a Hugging Face folder"]
        if self.recording_bytes_max < RECORDING_BYTES_MIN:
            found.append(
                f"recording_bytes_max is {self.recording_bytes_max}; use {RECORDING_BYTES_MIN} or "
                "more, 1073741824 is usual"
            )
        for name in ("requests_max", "attempts_max", "output_tokens_default"):
            if getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            known = ", ".join(TOOL_CALL_PARSERS)
            found.append(f"tool_call_parser is {self.tool_call_parser!r}; use one of {known}")
        if self.reasoning_parser not in REASONING_PARSERS:
            known = ", ".join(REASONING_PARSERS)
            found.append(f"reasoning_parser is {self.reasoning_parser!r}; use one of {known}")
        if not 0.0 < self.tenant_requests_share <= 1.0:
            found.append(
                f"tenant_requests_share is {self.tenant_requests_share}; use a share of "
                "requests_max, more than 0 and at most 1"
            )
        if self.requests_max > 4096:
            found.append(f"requests_max is {self.requests_max}; use at most 4096 (a thread each)")
        if self.messages_per_s_max < 0:
            found.append(f"messages_per_s_max is {self.messages_per_s_max}; use 0 (auto) or more")
        if not 0.01 <= self.cancel_poll_s <= 1.0:
            found.append(f"cancel_poll_s is {self.cancel_poll_s}; use 0.01 to 1.0")
        return found


def checkpoint_folder(checkpoint: str, repository: str) -> Path:
    """The shipped demo checkpoint for "demo", otherwise path_beside(checkpoint, repository).
    Raises ConfigError if that folder has no config.json."""
    if checkpoint == "demo":
        return Path(__file__).parent / "demo_checkpoint"
    path = path_beside(checkpoint, repository)
    if not (path / "config.json").exists():
        raise ConfigError(f"checkpoint {path} has no config.json: it must be a Hugging Face folder")
    return path


def path_beside(path: str, repository: str) -> Path:
    """Resolve a path of config.pbtxt. A relative path starts at the parent folder of `repository`.
    Triton passes UTF-8. The result has the same bytes, even if the locale has another encoding."""
    of_this_process = os.fsdecode(path.encode("utf-8", "surrogateescape"))
    return Path(repository).resolve().parent / Path(of_this_process).expanduser()
