"""TensorRT-LLM as a worker's engine: the LLM, the staging pool, and the channel to its connector.

TensorRT-LLM batches by itself, so a worker passes it prompts instead of steps. All mistakes in the
settings are reported at once, before the weights are loaded. The ranks report the size of their
pages after that.

Not here: the LLM's thread (llm_thread.py), the connector in its processes (connector.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.connected.channel import ConnectorHost, Listener
from backends.engine.connected.engine_memory import EngineMemory
from backends.engine.connected.generation import EngineRun, Order, Sink
from backends.engine.connected.kv_identity import KvIdentity
from backends.engine.connected.settings import EngineSpec, context_problems, read_options, refuse
from backends.engine.model_config import CheckpointError
from backends.engine.sampling_params import SamplingParams
from backends.engine.trtllm import kv_shape, llm_thread, package
from backends.engine.trtllm.llm_thread import LlmThread
from backends.engine.trtllm.sampling import Sampler, guided_refusal, llm_sampling
from backends.engine.trtllm.settings import TrtllmConfig, option_problems
from backends.engine.trtllm.stats import IterationStats
from backends.errors import ConfigError, InvalidRequest
from backends.tensors import AFTER_THINKING, STRUCTURAL_TAG, guide_name
from mooncake_store.layout import LayerRange

log = logging.getLogger(__name__)
CLOSE_S_MAX = 5.0


class TrtllmEngine:
    def __init__(
        self,
        worker_id: str,
        spec: EngineSpec,
        config: TrtllmConfig,
        folder: Path,
        repository: str,
        listener: Listener,
        on_step: Callable[[float], None],
    ) -> None:
        """`on_step` gets the seconds of each step. Raises ConfigError with all mistakes; takes
        minutes with real weights."""
        self.config = config
        self.role = spec.role
        self.is_native = config.handoff == "native"
        self.handover_tokens = config.page_tokens
        self.is_connected = config.is_connected(self.role)
        shape, options, kv_dtype = self._checked(spec, config, folder, repository)
        self.layout = shape.layout(kv_dtype, spec.block_tokens, config.tp_size)
        self.layers = LayerRange(0, self.layout.layers)
        self.context_tokens_max = min(shape.context_tokens_max, spec.pages_tokens)
        self.max_seq_len = spec.context_tokens_max or self.context_tokens_max
        self.vocabulary_tokens = shape.vocabulary_tokens
        self.eos_token_ids = shape.eos_token_ids
        self.model_id = shape.model_id
        self.weights_id = Checkpoint.open(folder).weights_id(KvIdentity.of_folder(folder))
        self.pages = PagePool(spec.kv_pages)
        self.slots = spec.requests_max
        package.remove_mpi_leftovers(os.environ)
        self._memory: EngineMemory | None = None
        self._llm: LlmThread | None = None
        try:
            package.choose_gpus(os.environ, config.gpus)
            self._package = package.load()
            version = self._package.version
            self.hardware = f"tensorrt_llm {version}, tp {config.tp_size}, {package.gpu_names()}"
            self._sampler, self._options = Sampler.of(version, options), options
            # The fingerprint's field for all that distinguishes the pages of engines.
            reaching = kv_shape.options_that_reach_kv(options)
            self.tp_shape = kv_shape.pages_description(version, config, spec.dtype, reaching)
        except (ValueError, package.PackageProblem) as error:
            raise ConfigError(str(error)) from error
        pages = spec.kv_pages if self.is_connected else 1
        memory = self._memory = EngineMemory(worker_id, self.layout, pages)
        self.kv_pool = memory.bytes
        sockets = Path(os.environ["MOONCAKE_SOCKETS"])
        try:
            if self.is_connected:
                site = memory.listen(listener, config.aside_bytes_min(self.role))
                os.environ.update(site.to_environment())
            arguments = package.llm_arguments(
                self._package, spec, config, folder, self.max_seq_len, options, shape.dtype
            )
            log.info("tensorrt_llm %s: LLM(%s)", version, arguments)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            with package.turn_to_start(sockets, visible):
                self._llm = LlmThread(
                    lambda: self._package.top.LLM(**arguments), lambda stats: on_step(stats.step_s)
                )
                if self.is_connected:
                    self._check_pages(
                        memory.check_ranks("TensorRT-LLM", config.tp_size, self.max_seq_len)
                    )
        except BaseException as error:
            reason = memory.reason_of(error, "tensorrt_llm")
            self.close()
            if isinstance(error, Exception):
                raise ConfigError(reason) from error
            raise

    def _checked(
        self, spec: EngineSpec, config: TrtllmConfig, folder: Path, repository: str
    ) -> tuple[kv_shape.KvShape, dict[str, Any], str]:
        """Checks that need no running engine."""
        found: list[str] = []
        if not package.is_installed():
            found.append(package.MISSING)
        options = read_options("llm_options", config.llm_options, repository, found)
        found += option_problems(options, self.is_connected)
        try:
            limit = min(spec.context_tokens_max or spec.pages_tokens, spec.pages_tokens)
            shape = kv_shape.read_kv_shape(folder, config.tp_size, limit)
            kv_dtype = kv_shape.read_kv_dtype(folder, spec.kv_dtype, spec.dtype, found)
            found += context_problems(spec, shape.context_tokens_max, folder.name)
            Checkpoint.open(folder)
        except CheckpointError as error:
            found += error.problems
        refuse(found)
        return shape, options, kv_dtype

    def _check_pages(self, page_tokens: int) -> None:
        if page_tokens != self.config.page_tokens:
            asked = self.config.page_tokens
            raise ConfigError(f"page_tokens is {asked}, TensorRT-LLM has {page_tokens}")

    @property
    def host(self) -> ConnectorHost:
        assert self._memory is not None, "the engine has no memory yet"
        return self._memory.host

    @property
    def llm(self) -> LlmThread:
        assert self._llm is not None, "the engine has been closed"
        return self._llm

    def sampling(
        self, params: SamplingParams, position: int, tokens: int, prompt_tokens: int = 0
    ) -> Any:
        """Raises InvalidRequest for what this release, or its sampler, does not support."""
        cls = self._package.top.SamplingParams
        guided = self._guided(params, position) if params.guide else None
        return llm_sampling(cls, self._sampler, params, position, tokens, prompt_tokens, guided)

    def _guided(self, params: SamplingParams, position: int) -> Any:
        if params.guide_kind == STRUCTURAL_TAG:
            return None  # the answer is free text, in which TensorRT-LLM does not force calls
        if params.guide_kind == AFTER_THINKING:
            what = "after the thinking is not supported by workers with TensorRT-LLM"
            raise InvalidRequest(f"{guide_name(params.guide_kind)} {what}; turn the thinking off")
        if refusal := guided_refusal(self._options, self.config.handoff, position):
            raise InvalidRequest(f"{guide_name(params.guide_kind)} {refusal}")
        return self._package.guided(params.guide_kind, params.guide)

    def native_params(self, request_id: str, state: bytes) -> Any:
        cls = self._package.named("DisaggregatedParams")
        if self.role == "prefill":
            return llm_thread.for_prefill(cls, request_id)
        return llm_thread.for_decode(cls, state)

    def import_pages(self, pages: Sequence[int]) -> None:
        """Nothing: the connector loads pages after they are staged."""

    def export_pages(self, pages: Sequence[int]) -> None:
        """Nothing: the connector has copied the pages that it reported as saved."""

    @property
    def stats(self) -> IterationStats:
        return self.llm.stats

    def generate(self, order: Order, sink: Sink) -> EngineRun:
        return self.llm.generate(order, sink)

    def close(self) -> None:
        """Close the LLM first: its processes use the pool and the channel."""
        with contextlib.ExitStack() as steps:  # closes each, also after an exception
            if self._memory is not None:
                steps.callback(self._memory.close)
            if self._llm is not None:
                steps.callback(self._llm.close, CLOSE_S_MAX)
