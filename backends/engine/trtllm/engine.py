"""TensorRT-LLM as a worker's engine: the LLM, the staging pool, and the channel to its connector.

TensorRT-LLM batches by itself, so a worker passes it prompts instead of steps. All mistakes in the
settings are reported at once, before the weights are loaded. The ranks report the size of their
pages after that.

Not here: the LLM's thread (llm_thread.py), the connector in its processes (connector.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.connected.channel import ChannelError, ConnectorHost, Listener
from backends.engine.connected.generation import EngineRun, Order, Sink
from backends.engine.connected.host_memory import PoolProblem, StagingPool
from backends.engine.connected.messages import Site
from backends.engine.model_config import CheckpointError
from backends.engine.sampling_params import SamplingParams
from backends.engine.trtllm import kv_shape, llm_thread, package
from backends.engine.trtllm.llm_thread import LlmThread
from backends.engine.trtllm.sampling import Sampler, guided_refusal, llm_sampling
from backends.engine.trtllm.settings import EngineSpec, TrtllmConfig, option_problems, read_options
from backends.engine.trtllm.stats import IterationStats
from backends.errors import ConfigError, InvalidRequest
from backends.tensors import STRUCTURAL_TAG, guide_name
from mooncake_store.layout import LayerRange

log = logging.getLogger(__name__)
NAME_CHARACTERS_MAX = 16  # of a worker, in the path of its channel
READY_S_MAX = 60.0  # after the LLM was built; usually its connectors have reported by then
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
        self.page_tokens = config.page_tokens
        self.is_connected = config.is_connected(self.role)
        shape, options, kv_dtype = self._checked(spec, config, folder, repository)
        self.layout = shape.layout(kv_dtype, spec.block_tokens, config.tp_size)
        self.layers = LayerRange(0, self.layout.layers)
        self.context_tokens_max = min(shape.context_tokens_max, spec.pages_tokens)
        self.max_seq_len = spec.context_tokens_max or self.context_tokens_max
        self.vocabulary_tokens = shape.vocabulary_tokens
        self.eos_token_ids = shape.eos_token_ids
        self.model_id = shape.model_id
        self.weights_id = Checkpoint.open(folder).weights_id(kv_shape.KvIdentity.of_folder(folder))
        self.pages = PagePool(spec.kv_pages)
        self.slots = spec.requests_max
        package.remove_mpi_leftovers(os.environ)
        self._host: ConnectorHost | None = None
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
            sockets = Path(os.environ["MOONCAKE_SOCKETS"])
            pages = spec.kv_pages if self.is_connected else 1
            self._pool = StagingPool(sockets.name, worker_id, pages, self.layout.block_bytes)
            self.kv_pool = self._pool.bytes
        except (ValueError, package.PackageProblem, PoolProblem) as error:
            raise ConfigError(str(error)) from error
        try:
            if self.is_connected:
                self._host = self._listen(worker_id, listener)
            arguments = package.llm_arguments(
                self._package, spec, config, folder, self.max_seq_len, options, shape.dtype
            )
            log.info("tensorrt_llm %s: LLM(%s)", version, arguments)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            with package.turn_to_start(sockets, visible):
                self._llm = LlmThread(
                    lambda: self._package.top.LLM(**arguments), lambda stats: on_step(stats.step_s)
                )
                self._check_ranks()
        except BaseException as error:
            reason = self._reason_of(error)
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
        options = read_options(config.llm_options, repository, found)
        found += option_problems(options, self.is_connected)
        try:
            limit = min(spec.context_tokens_max or spec.pages_tokens, spec.pages_tokens)
            shape = kv_shape.read_kv_shape(folder, config.tp_size, limit)
            kv_dtype = kv_shape.read_kv_dtype(folder, spec.kv_dtype, spec.dtype, found)
            found += _context_problems(spec, shape, folder)
            Checkpoint.open(folder)
        except CheckpointError as error:
            found += error.problems
        if found:
            raise ConfigError("\n".join(f"  - {line}" for line in found))
        return shape, options, kv_dtype

    def _listen(self, worker_id: str, listener: Listener) -> ConnectorHost:
        """Called before the LLM is built, because its connectors report during that time."""
        # A name that is too long for a socket's path is replaced by its hash.
        hashed = hashlib.blake2b(worker_id.encode(), digest_size=6).hexdigest()
        name = worker_id if len(worker_id) <= NAME_CHARACTERS_MAX else hashed
        address = f"ipc://{os.environ['MOONCAKE_SOCKETS']}/kv-{name}-{os.getpid()}"
        layout = self.layout
        site = Site(
            address,
            str(self._pool.path),
            layout.block_tokens,
            layout.block_bytes,
            self.config.aside_bytes_min(self.role),
            is_alike=layout.kv_factor == 1,
        )
        os.environ.update(site.to_environment())
        return ConnectorHost(address, listener)

    def _check_ranks(self) -> None:
        if self._host is None:
            return
        ranks = self._host.wait_ready(READY_S_MAX)
        by_rank = [rank.rank_bytes for rank in ranks]
        block_bytes = max(by_rank) if self.layout.kv_factor == 1 else sum(by_rank)
        if len(ranks) != self.config.tp_size or block_bytes != self.layout.block_bytes:
            raise ConfigError(
                f"a block has {block_bytes} bytes over {len(ranks)} rank(s) in TensorRT-LLM, but "
                f"{self.layout.block_bytes} over {self.config.tp_size} by config.json and dtype: "
                "is KV kept in another dtype than that (kv_dtype)?"
            )
        found = {rank.tokens_per_block for rank in ranks}
        if found != {self.config.page_tokens}:
            raise ConfigError(f"page_tokens is {self.config.page_tokens}, TensorRT-LLM has {found}")
        self._check_room(min(rank.gpu_pages for rank in ranks))

    def _check_room(self, pages: int) -> None:
        """TensorRT-LLM allocates fewer pages than asked if the GPU has no room for them."""
        promised = len(self.kv_pool) // self.layout.block_bytes * self.layout.block_tokens
        there = pages * self.config.page_tokens
        said = f"TensorRT-LLM has pages for {there} tokens on the GPU, kv_bytes promises {promised}"
        if there < self.max_seq_len:
            raise ConfigError(f"{said}, and a request may have {self.max_seq_len}: lower both")
        if there < promised:
            log.warning("%s: requests will wait inside the engine; lower kv_bytes", said)

    def _reason_of(self, error: BaseException) -> str:
        """The reason that the connector reported, rather than its consequence."""
        if self._host is not None:
            try:
                self._host.wait_ready(0.0)
            except ChannelError as said:
                if "did not report" not in str(said):
                    return str(said)
        return f"tensorrt_llm did not start: {type(error).__name__}: {error}"

    @property
    def host(self) -> ConnectorHost:
        assert self._host is not None, "this engine has no connector"
        return self._host

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
            steps.callback(self._pool.close)
            if self._host is not None:
                steps.callback(self._host.close)
            if self._llm is not None:
                steps.callback(self._llm.close, CLOSE_S_MAX)


def _context_problems(spec: EngineSpec, shape: kv_shape.KvShape, folder: Path) -> Iterator[str]:
    asked, of_pages = spec.context_tokens_max, spec.pages_tokens
    if asked > shape.context_tokens_max:
        yield (
            f"context_tokens_max is {asked}, but {folder.name} allows {shape.context_tokens_max}; "
            "lower it or leave it 0"
        )
    if asked > of_pages:
        yield (
            f"context_tokens_max is {asked}, but the pages of kv_bytes hold {of_pages}; lower it, "
            "leave it 0, or raise kv_bytes"
        )
