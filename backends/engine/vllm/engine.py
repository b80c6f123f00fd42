"""vLLM as a worker's engine: its process, the staging pool, and the channel to its connector.

vLLM batches by itself, so a worker passes it prompts instead of steps. Its process describes the KV
of the checkpoint before anything is allocated. All mistakes in the settings are reported at once,
before the weights are loaded.

Not here: the process (process.py), the connector in vLLM's processes (connector.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.connected.channel import ConnectorHost, Listener
from backends.engine.connected.engine_memory import EngineMemory, ipc_address
from backends.engine.connected.generation import EngineRun, Order, Sink
from backends.engine.connected.settings import (
    EngineSpec,
    context_problems,
    read_options,
    refuse,
    visible_devices,
)
from backends.engine.interpreter import VLLM_SUPPORTED, engine_interpreter, interpreter_problem
from backends.engine.model_config import CheckpointError, read_config
from backends.engine.sampling_params import SamplingParams
from backends.engine.vllm import messages as m
from backends.engine.vllm.guided import special_ids
from backends.engine.vllm.kv_form import kv_form
from backends.engine.vllm.llm_thread import VllmThread
from backends.engine.vllm.sampling import vllm_sampling
from backends.engine.vllm.settings import VllmConfig, environment, first_arguments, option_problems
from backends.errors import ConfigError
from mooncake_store.layout import KvLayout, LayerRange

log = logging.getLogger(__name__)
ASIDE_BYTES_MIN = 1  # all loads run beside the passes
OWN_PAGES = 1  # vLLM gives its page 0 to no request


class VllmEngine:
    is_connected = True
    is_native = False
    handover_tokens = 1  # part of a page too, so decode computes only the newest token

    def __init__(
        self,
        worker_id: str,
        spec: EngineSpec,
        config: VllmConfig,
        folder: Path,
        repository: str,
        threads: int,
        device: str,
        pages_max: Callable[[int], int],
        listener: Listener,
        on_step: Callable[[float], None],
    ) -> None:
        """`pages_max`: bytes of a block -> blocks of the KV memory. `on_step` gets the seconds of
        each step. Raises ConfigError with all mistakes; takes minutes with real weights."""
        self.config, self.role, self.slots = config, spec.role, spec.requests_max
        options, ends = _checked(config, folder, repository)
        try:
            devices = visible_devices(os.environ, config.gpus)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._special_ids = special_ids(folder, ends)
        self.eos_token_ids = ends
        self._memory: EngineMemory | None = None
        self._llm: VllmThread | None = VllmThread(
            engine_interpreter(config.engine_python, repository),
            m.Setup(ipc_address("llm", worker_id), first_arguments(spec, config, folder, options)),
            environment(threads, devices),
            lambda stats: on_step(stats.step_s) if stats.step_s else None,
        )
        try:
            kv = self._llm.described()
            _check_platform(kv, device)
            self._describe(kv, spec.block_tokens, folder, options)
            spec = replace(spec, kv_pages=pages_max(self.layout.block_bytes))
            refuse(list(context_problems(spec, kv.context_tokens_max, folder.name)))
            self.context_tokens_max = min(kv.context_tokens_max, spec.pages_tokens)
            self.max_seq_len = spec.context_tokens_max or self.context_tokens_max
            self.pages = PagePool(spec.kv_pages)
            self._memory = EngineMemory(worker_id, self.layout, spec.kv_pages)
            self.kv_pool = self._memory.bytes
            site = self._memory.listen(listener, ASIDE_BYTES_MIN)
            sizes = _sizes(spec, self.layout, kv.page_tokens, self.max_seq_len)
            self._llm.begin(m.Begin(sizes, site.to_environment()))
            self._memory.check_ranks("vLLM", config.tp_size, self.max_seq_len)
        except BaseException as error:
            reason = str(error)
            if self._memory is not None and not isinstance(error, ConfigError):
                reason = self._memory.reason_of(error, "vllm")
            self.close()
            if isinstance(error, Exception):
                raise ConfigError(reason) from error
            raise

    def _describe(
        self, kv: m.DescribedKv, block_tokens: int, folder: Path, options: Mapping[str, Any]
    ) -> None:
        form = kv_form(kv, self.config.tp_size, block_tokens, folder, options)
        self.layout, self.model_id, self.weights_id, self.tp_shape = form
        self.layers = LayerRange(0, kv.layers)
        self.vocabulary_tokens = kv.vocabulary_tokens
        self.hardware = f"vllm {kv.version}, tp {self.config.tp_size}, {kv.platform}"
        if kv.windows:
            log.warning(
                "layers with a sliding window keep the KV of all tokens, beside layers with full "
                "attention; if all layers have a window, vLLM drops KV before it, and long prompts "
                "are computed again by decode"
            )

    @property
    def host(self) -> ConnectorHost:
        assert self._memory is not None, "the engine has no memory yet"
        return self._memory.host

    @property
    def llm(self) -> VllmThread:
        assert self._llm is not None, "the engine has been closed"
        return self._llm

    @property
    def stats(self) -> VllmStats:
        return VllmStats(self.llm.stats)

    def sampling(
        self, params: SamplingParams, position: int, tokens: int, prompt_tokens: int = 0
    ) -> dict[str, Any]:
        return vllm_sampling(params, position, tokens, self._special_ids)

    def native_params(self, request_id: str, state: bytes) -> Any:
        raise AssertionError("vLLM hands KV over through the store")

    def import_pages(self, pages: Sequence[int]) -> None:
        """Nothing: the connector loads pages after they are staged."""

    def export_pages(self, pages: Sequence[int]) -> None:
        """Nothing: the connector has copied the pages that it reported as saved."""

    def generate(self, order: Order, sink: Sink) -> EngineRun:
        return self.llm.generate(order, sink)

    def close(self) -> None:
        """End vLLM first: its processes use the pool and the channel."""
        if self._llm is not None:
            self._llm.close()
        if self._memory is not None:
            self._memory.close()


class VllmStats:
    """Numbers of vLLM's newest step; `raw` is None before the first."""

    def __init__(self, raw: m.StepNumbers | None) -> None:
        self.raw = raw

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(metric, labels, value). The names are those of vLLM's own metrics."""
        if self.raw is None:
            return
        yield "vllm:num_requests_running", {}, self.raw.running
        yield "vllm:num_requests_waiting", {}, self.raw.waiting
        yield "vllm:kv_cache_usage_perc", {}, self.raw.kv_usage
        yield "vllm:prefix_cache_hits", {}, self.raw.cached_tokens
        yield "vllm:prefix_cache_queries", {}, self.raw.prompt_tokens
        yield "vllm:num_preemptions", {}, self.raw.preempted


def _checked(
    config: VllmConfig, folder: Path, repository: str
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """(vllm_options, end tokens of the checkpoint). Checks that need no vLLM."""
    found: list[str] = []
    options = read_options("vllm_options", config.vllm_options, repository, found)
    found += option_problems(options)
    _, eos_values = read_config(folder, found)
    try:
        Checkpoint.open(folder)
    except CheckpointError as error:
        found += error.problems
    python = engine_interpreter(config.engine_python, repository)
    if problem := interpreter_problem(python):
        found.append(problem)
    refuse(found)
    return options, tuple(each for each in eos_values if isinstance(each, int))


def _check_platform(kv: m.DescribedKv, device: str) -> None:
    """Raises ConfigError: another version of vLLM, or vLLM for another device."""
    found = []
    if not SpecifierSet(VLLM_SUPPORTED).contains(Version(kv.version).base_version):
        found.append(f"vLLM {kv.version} is not supported; use {VLLM_SUPPORTED}")
    if device != kv.platform:
        found.append(
            f"device is {device}, but this vLLM computes on {kv.platform}: set device to that; "
            "gpus chooses devices"
        )
    refuse(found)


def _sizes(spec: EngineSpec, layout: KvLayout, page_tokens: int, tokens_max: int) -> dict[str, Any]:
    """Arguments that depend on the size of a page."""
    pages = spec.pages_tokens // page_tokens + OWN_PAGES
    page_bytes = layout.block_bytes * page_tokens // spec.block_tokens
    return {"max_model_len": tokens_max, "kv_cache_memory_bytes": pages * page_bytes}
