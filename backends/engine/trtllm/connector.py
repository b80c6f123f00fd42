"""The classes that TensorRT-LLM loads into its own processes: `kv_connector_config` names them.

    connector_module            backends.engine.trtllm.connector
    connector_scheduler_class   MooncakeConnectorScheduler     on rank 0
    connector_worker_class      MooncakeConnectorWorker        on every rank

They only translate; what they do is in scheduler.py and rank_copies.py. Both places where
versions of TensorRT-LLM have the base classes are known (1.2.x, and 1.3.0rc14 and later); without
tensorrt_llm this file can be imported too, and serves nobody. Small loads are ordered on the stream
of the forward pass, so they are synchronous to TensorRT-LLM and wait on nothing but the GPU; large
ones and saves are asynchronous, and layer hooks have nothing to do: a page is complete when all
layers are.

TensorRT-LLM asks the scheduler on rank 0 and broadcasts what it says: an exception there would
leave the other ranks waiting for ever. So the scheduler never raises: it answers what is safe, says
`Broken` to its worker, and sends the reason to all ranks in the next orders, where each raises.

A worker says goodbye through the channel, because TensorRT-LLM tells a connector nothing.

Lean output: what TensorRT-LLM builds for connectors in every step, without its copies of every
prompt. Its KvCacheConnectorSchedulerOutputRequest reads all tokens and all pages of every request
in every step, on every rank, to say which are new: for 64 requests of 32k tokens that is two
million Python integers a step. It keeps a copy of them per request, and under tensor parallelism no
request is ever forgotten. This connector needs neither tokens nor, before a page is full, pages,
and only rank 0 reads any of it. So `install` puts these classes in the place of TensorRT-LLM's
before it makes its connector manager, where they look as they are known to; where they do not,
everything stays as it is, correct and slower.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.block_pages import BlockPages, Orders, size_problems
from backends.engine.trtllm.channel import SCHEDULER, ConnectorLink, rank_name
from backends.engine.trtllm.copier import make_copier, map_pool
from backends.engine.trtllm.rank_copies import RankCopies
from backends.engine.trtllm.scheduler import StageScheduler

log = logging.getLogger(__name__)

_api: Any
try:
    from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector as _api
except ImportError:
    try:
        from tensorrt_llm._torch.pyexecutor import kv_cache_connector as _api
    except ImportError:
        _api = None


class SchedulerBase:
    """In the place of TensorRT-LLM's base class where that is not installed."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class WorkerBase:
    """In the place of TensorRT-LLM's base class where that is not installed."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def register_forward_pass_callable(self) -> None:
        return None


if not TYPE_CHECKING and _api is not None:
    SchedulerBase = _api.KvCacheConnectorScheduler
    WorkerBase = _api.KvCacheConnectorWorker


class MooncakeConnectorScheduler(SchedulerBase):
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        site = m.Site.from_environment(dict(os.environ))
        self._scheduler = StageScheduler(
            site.block_tokens,
            llm_args.kv_cache_config.tokens_per_block,
            self._send,
            _salt_id(),
            aside_pages_min(site, llm_args),
        )
        self._error = ""
        self._link = ConnectorLink(site.channel, SCHEDULER, self._on_message)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        with self._never_raising():
            tokens = self._scheduler.match(request, num_computed_tokens)
            return tokens, tokens > 0 and self._scheduler.is_aside(request.request_id)
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        with self._never_raising():
            self._scheduler.allocated(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        if not self._error:
            with self._never_raising():
                if scheduler_output is None:  # some versions ask for a batch that was not prepared
                    return self._scheduler.orders([], [])
                return self._scheduler.orders(
                    scheduler_output.new_requests, scheduler_output.cached_requests
                )
        return Orders([], [], [], self._error)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        with self._never_raising():
            forget(request.request_id)
            return self._scheduler.finished(request)
        return True  # its pages stay until every rank has done what it was told of them

    @contextlib.contextmanager
    def _never_raising(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Catch all: every rank raises it; otherwise ranks would wait
            log.exception("the connector's scheduler failed")
            self._error = f"the connector failed on rank 0: {type(error).__name__}: {error}"
            self._link.send(m.Broken(self._error))

    def wait_for_initialization(self) -> None:
        """Nothing: the worker waits for every rank (ConnectorHost.wait_ready)."""

    def close(self) -> None:
        self._link.close()

    def _send(self, message: m.ToWorker) -> None:
        self._link.send(message)

    def _on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Goodbye):
            self.close()
        else:
            self._scheduler.on_message(message)


class MooncakeConnectorWorker(WorkerBase):
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        if _api is not None:  # before TensorRT-LLM makes the manager of this rank
            install(_api)
        self._site = m.Site.from_environment(dict(os.environ))
        self._tokens_per_block: int = llm_args.kv_cache_config.tokens_per_block
        self._tp_size: int = llm_args.tensor_parallel_size
        self._rank: int = llm_args.parallel_config.to_mapping().rank
        self._copies: RankCopies | None = None
        self._orders: Orders | None = None
        self._link = ConnectorLink(self._site.channel, rank_name(self._rank), self._on_message)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Sizes are compared once, here; a difference ends the start of the worker."""
        try:
            self._register(kv_cache_tensor)
        except Exception as error:  # Catch all: TensorRT-LLM's error would not name the cause
            self._link.send(m.Broken(f"rank {self._rank}: {error}"))
            raise

    def _register(self, kv: Any) -> None:
        site, tokens = self._site, self._tokens_per_block
        page_bytes = kv[0].numel() * kv.element_size() if len(kv.shape) else 0
        problems = size_problems(
            kv.shape,
            page_bytes,
            tokens,
            self._tp_size,
            site.block_tokens,
            site.block_bytes,
            site.is_alike,
        )
        if problems:
            raise ValueError("; ".join(problems))
        pages = BlockPages.of(
            self._rank, self._tp_size, page_bytes, tokens, site.block_tokens, site.is_alike
        )
        pool = map_pool(site.pool_path, site.block_bytes)
        self._copies = RankCopies(pages, tokens, make_copier(kv, pool), self._link.send)
        pool_pages = len(pool) // site.block_bytes
        self._link.send(
            m.Ready(
                self._rank, self._tp_size, pages.rank_bytes, tokens, pool_pages, gpu_pages=len(kv)
            )
        )

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        # Once only: a step without metadata of its own finds that of an earlier one still bound.
        self._orders = metadata if isinstance(metadata, Orders) else None
        if self._orders is not None and self._orders.error:
            raise RuntimeError(self._orders.error)  # on every rank, in the same step

    def start_load_kv(self, stream: Any) -> None:
        orders, self._orders = self._orders, None
        with self._saying_why():
            self._ready_copies.start(orders or Orders([], [], []), stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        self._ready_copies.before_layer(stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: pages are saved whole, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        with self._saying_why():
            self._ready_copies.after_forward(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        with self._saying_why():
            copies = self._ready_copies
            return copies.finished(finished_gen_req_ids), copies.loaded(started_loading_req_ids)

    def close(self) -> None:
        self._link.close()
        if self._copies is not None:
            self._copies.close()

    @contextlib.contextmanager
    def _saying_why(self) -> Iterator[None]:
        """What one rank raises leaves the others in a collective: the worker must end them all."""
        try:
            yield
        except Exception as error:
            self._link.send(m.Broken(f"rank {self._rank}: {error}"))
            raise

    @property
    def _ready_copies(self) -> RankCopies:
        assert self._copies is not None, "register_kv_caches comes first"
        return self._copies

    def _on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Goodbye):
            self.close()
        elif self._copies is not None:
            self._copies.on_message(message)


def aside_pages_min(site: m.Site, llm_args: Any) -> int:
    """From how many pages on a load is asynchronous; 0: never."""
    rank_bytes = site.block_bytes // (1 if site.is_alike else llm_args.tensor_parallel_size)
    page_bytes = rank_bytes * llm_args.kv_cache_config.tokens_per_block // site.block_tokens
    return -(-site.aside_bytes_min // page_bytes)


def _salt_id() -> Callable[[str], int] | None:
    """TensorRT-LLM's number for a cache salt; None where this version has no such function."""
    for name in ("tensorrt_llm.inputs", "tensorrt_llm.inputs.utils"):
        try:
            found = getattr(importlib.import_module(name), "get_cache_salt_id", None)
        except ImportError:
            continue
        if found is not None:
            return cast("Callable[[str], int]", found)
    return None


REQUEST, MANAGER = (
    "KvCacheConnectorSchedulerOutputRequest",
    "KvCacheConnectorSchedulerOutputManager",
)
NEEDED = (REQUEST, MANAGER, "RequestData", "SchedulerOutput", "LlmRequestState", "mpi_rank")
KNOWN = {
    REQUEST: ("update_and_build_data", ["self", "req", "kv_cache_manager"]),
    MANAGER: (
        "build_scheduler_output",
        ["self", "scheduled_batch", "new_async_requests", "kv_cache_manager"],
    ),
}
_managers: weakref.WeakSet[Any] = weakref.WeakSet()


def forget(llm_id: int) -> None:
    """This request has ended; TensorRT-LLM itself would remember it."""
    for manager in _managers:
        manager.requests.pop(llm_id, None)


def install(api: ModuleType) -> bool:
    """Into the module that has TensorRT-LLM's connector API. False: it is one we do not know."""
    if getattr(getattr(api, REQUEST, None), "is_lean", False):
        return True  # several ranks in one process
    if not all(hasattr(api, name) for name in NEEDED):
        return False
    for name, (method, arguments) in KNOWN.items():
        there = getattr(getattr(api, name), method, None)
        if there is None or list(inspect.signature(there).parameters) != arguments:
            log.warning("%s.%s is not as known: steps will cost more", name, method)
            return False
    lean = lean_request(api)
    setattr(api, REQUEST, lean)  # its manager makes them by this name
    setattr(api, MANAGER, lean_manager(api))
    return True


def lean_request(api: Any) -> type:
    prompt_states = (
        api.LlmRequestState.CONTEXT_INIT,
        api.LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS,
    )

    class LeanRequest(getattr(api, REQUEST)):  # type: ignore[misc]
        is_lean = True
        pages_known = 0

        def update_and_build_data(self, req: Any, kv_cache_manager: Any) -> Any:
            if type(kv_cache_manager).__name__.endswith("V2"):  # pages are in groups there
                return super().update_and_build_data(req, kv_cache_manager)
            tokens = req.get_num_tokens(0)
            if req.state in prompt_states:
                position = req.context_current_position
                scheduled = min(req.context_remaining_length, req.context_chunk_size)
            else:
                position, scheduled = tokens - 1, 1
            new_pages: list[int] = []
            # A page is needed by name when it is full: long after there was no room in the last.
            if tokens > self.pages_known * kv_cache_manager.tokens_per_block:
                new_pages = list(kv_cache_manager.get_cache_indices(req)[self.pages_known :])
                self.pages_known += len(new_pages)
            return api.RequestData(req.request_id, [], new_pages, position, scheduled)

    return LeanRequest


def lean_manager(api: Any) -> type:
    class LeanManager(getattr(api, MANAGER)):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            _managers.add(self)

        def build_scheduler_output(
            self, scheduled_batch: Any, new_async_requests: Any, kv_cache_manager: Any
        ) -> Any:
            if api.mpi_rank() != 0:  # nobody asks a scheduler here
                self.external_loads = {}
                return api.SchedulerOutput()
            return super().build_scheduler_output(
                scheduled_batch, new_async_requests, kv_cache_manager
            )

    return LeanManager
