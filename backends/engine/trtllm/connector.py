"""The classes that TensorRT-LLM loads into its own processes: `kv_connector_config` names them.

    connector_module            backends.engine.trtllm.connector
    connector_scheduler_class   MooncakeConnectorScheduler     on rank 0
    connector_worker_class      MooncakeConnectorWorker        on every rank

The classes translate between TensorRT-LLM and scheduler.py and ../connected/rank_copies.py. The
base classes are in one module in 1.2.x and in another from 1.3.0rc14 on. Without tensorrt_llm this
file can be imported, and the classes have empty bases.

The scheduler never raises, because the other ranks wait for its result. It answers with what is
safe and sends `Broken`. The next orders have the reason, and every rank raises it.

Lean output: TensorRT-LLM describes each step to connectors by copying all tokens and pages of every
request on every rank: two million integers for 64 requests of 32k tokens. With tensor parallelism
and manager V1 it never drops a request. This connector needs no tokens, and a page only when the
page is full. So `install` replaces TensorRT-LLM's classes. If they do not look as expected, they
stay: slower, but correct.
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

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import BlockPages, Orders
from backends.engine.connected.channel import SCHEDULER, ConnectorLink, rank_name
from backends.engine.connected.rank_copies import RankCopies, register
from backends.engine.trtllm.releases import V1, V2
from backends.engine.trtllm.scheduler import TrtllmScheduler

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
    """Replaces TensorRT-LLM's base class where tensorrt_llm is not installed."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class WorkerBase:
    """Replaces TensorRT-LLM's base class where tensorrt_llm is not installed."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    def bind_connector_meta(self, metadata: object) -> None:
        return None

    def register_forward_pass_callable(self) -> None:
        return None


if not TYPE_CHECKING and _api is not None:
    SchedulerBase = _api.KvCacheConnectorScheduler
    WorkerBase = _api.KvCacheConnectorWorker


class MooncakeConnectorScheduler(SchedulerBase):
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        site = m.Site.from_environment(dict(os.environ))
        self._scheduler = TrtllmScheduler(
            site.block_tokens,
            llm_args.kv_cache_config.tokens_per_block,
            lambda message: self._link.send(message),
            _salt_id(),
            aside_pages_min(site, llm_args),
            manager_of(llm_args),
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
                if scheduler_output is None:  # in some releases for a batch that was not prepared
                    return self._scheduler.orders([], [])
                new, cached = scheduler_output.new_requests, scheduler_output.cached_requests
                return self._scheduler.orders(new, cached)
        return Orders([], [], [], self._error)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        with self._never_raising():
            forget(request.request_id)
            return self._scheduler.finished(request, cache_block_ids)
        return True  # its pages stay until every rank has finished its copies

    @contextlib.contextmanager
    def _never_raising(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Catch all: every rank raises it with the next orders
            log.exception("the connector's scheduler failed")
            self._error = f"the connector failed on rank 0: {type(error).__name__}: {error}"
            self._link.send(m.Broken(self._error))

    def wait_for_initialization(self) -> None:
        """Nothing: the worker waits for every rank (ConnectorHost.wait_ready)."""

    def close(self) -> None:
        self._link.close()

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
        self._orders: list[Orders] = []  # bound and not yet started
        self._link = ConnectorLink(self._site.channel, rank_name(self._rank), self._on_message)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Compare the sizes. A difference ends the start of the worker."""
        kv, site = kv_cache_tensor, self._site
        with self._saying_why():
            self._expect(V1)
            pages = pages_of(kv, self._rank, self._tp_size, self._tokens_per_block, site)
            self._begin_copies(pages, kv, len(kv))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """As `register_kv_caches`, with KV cache manager V2."""
        site = self._site
        with self._saying_why():
            self._expect(V2)
            region = only_region(layout, self._tokens_per_block, site.is_alike)
            tokens = (self._tokens_per_block, site.block_tokens)
            pages = BlockPages(
                self._rank, self._tp_size, region.size, *tokens, site.is_alike,
                layers=len(layout.groups[0].layer_ids), block_stride_bytes=region.stride,
            )  # fmt: skip
            self._begin_copies(pages, bytes_of(region), region.num_slots)

    def _begin_copies(self, pages: BlockPages, kv: Any, gpu_pages: int) -> None:
        self._copies, ready = register(self._site, pages, kv, gpu_pages, self._link.send)
        self._link.send(ready)

    def _expect(self, manager: int) -> None:
        """Raises ValueError if TensorRT-LLM runs another KV cache manager than it was asked for."""
        asked = manager_of(self._llm_args)
        if asked != manager:
            raise ValueError(
                f"TensorRT-LLM runs its KV cache manager V{manager}, but V{asked} was asked for: "
                "this model has no other one, so take another checkpoint or release"
            )

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        if isinstance(metadata, Orders):
            if metadata.error:
                raise RuntimeError(metadata.error)  # on every rank, in the same step
            self._orders.append(metadata)

    def start_load_kv(self, stream: Any) -> None:
        # Several, if a step had no pass; none, in a step without metadata.
        bound, self._orders = self._orders, []
        loads, saves, fences = ([each for one in bound for each in one[i]] for i in range(3))
        with self._saying_why():
            self._ready_copies.start(Orders(loads, saves, fences), stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        self._ready_copies.before_layer(stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: pages are saved whole, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        with self._saying_why():
            self._ready_copies.after_forward(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[Any], list[Any]]:
        with self._saying_why():
            copies = self._ready_copies
            return copies.finished(finished_gen_req_ids), copies.loaded(started_loading_req_ids)

    def close(self) -> None:
        self._link.close()
        if self._copies is not None:
            self._copies.close()

    @contextlib.contextmanager
    def _saying_why(self) -> Iterator[None]:
        """After an exception here the other ranks wait in a collective: the worker must end all."""
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


def pages_of(kv: Any, rank: int, tp_size: int, tokens_per_block: int, site: m.Site) -> BlockPages:
    """Raises ValueError if this tensor has not the shape that config.json implies."""
    shape, is_alike = kv.shape, site.is_alike
    if len(shape) != 4:
        raise ValueError(f"KV has the shape {list(shape)}, not [blocks, layers, K and V, scalars]")
    if (shape[2] == 1) != is_alike:
        kind = "latent attention (kv_factor 1)" if is_alike else "K and V of heads (kv_factor 2)"
        raise ValueError(f"KV has the shape {list(shape)}, but config.json says {kind}")
    page_bytes = kv[0].numel() * kv.element_size()
    tokens = (tokens_per_block, site.block_tokens)
    return BlockPages(rank, tp_size, page_bytes, *tokens, is_alike, layers=shape[1])


def only_region(layout: Any, tokens_per_block: int, is_alike: bool) -> Any:
    """The KvCacheRegion with all KV of a page, layer by layer. Raises ValueError for other layouts.
    `layout`: TensorRT-LLM's KvCacheLayout."""
    groups, per_page = layout.groups, layout.tokens_per_block
    if per_page != tokens_per_block:
        raise ValueError(f"pages have {per_page} tokens, not {tokens_per_block}")
    windows = [group.window_size for group in groups]
    if len(groups) != 1 or windows[0] is not None:
        raise ValueError(
            f"KV is in {len(groups)} groups of layers, with windows of {windows} tokens (None: "
            "full attention), and the connector needs one group with full attention: set "
            "context_tokens_max to the smallest window or less, or take another checkpoint"
        )
    regions = [*groups[0].regions, *getattr(groups[0], "replicated_regions", ())]
    if len(regions) != 1:
        held = [sorted({each.role for each in region.buffers}) for region in regions]
        raise ValueError(
            f"a page has its KV in {len(regions)} places ({held}), as with scales or keys of "
            "sparse attention beside it; the connector needs one place"
        )
    roles = ("key",) if is_alike else ("key", "value")
    wanted = [(layer, role) for layer in groups[0].layer_ids for role in roles]
    there = [(each.layer_id, str(each.role).lower()) for each in regions[0].buffers]
    if there != wanted or any(each.expansion != 1 for each in regions[0].buffers):
        raise ValueError(f"a page has {there} in this order, not {wanted}")
    return regions[0]


def bytes_of(region: Any) -> Any:
    """The memory of all pages as a contiguous tensor of bytes; between pages there may be gaps."""
    import torch

    size_bytes = (region.num_slots - 1) * region.stride + region.size
    return region.as_tensor(torch.uint8).as_strided((size_bytes,), (1,))


def manager_of(llm_args: Any) -> int:
    """The generation of the KV cache manager, which package.py has set."""
    asked = getattr(llm_args.kv_cache_config, "use_kv_cache_manager_v2", None)
    if not isinstance(asked, bool):
        raise RuntimeError(
            f"use_kv_cache_manager_v2 is {asked!r} in this TensorRT-LLM, not what the worker has "
            "set: see `mooncake doctor --engine tensorrt_llm`"
        )
    return V2 if asked else V1


def aside_pages_min(site: m.Site, llm_args: Any) -> int:
    """Loads of at least so many pages are asynchronous; 0: none."""
    rank_bytes = site.block_bytes // (1 if site.is_alike else llm_args.tensor_parallel_size)
    page_bytes = rank_bytes * llm_args.kv_cache_config.tokens_per_block // site.block_tokens
    return -(-site.aside_bytes_min // page_bytes)


def _salt_id() -> Callable[[str], int] | None:
    """TensorRT-LLM's function from a salt to a number; None: this release has none."""
    for name in ("inputs", "inputs.utils", "runtime.kv_cache_hash"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"tensorrt_llm.{name}")
            if found := getattr(module, "get_cache_salt_id", None):
                return cast("Callable[[str], int]", found)
    return None


REQUEST = "KvCacheConnectorSchedulerOutputRequest"
MANAGER = "KvCacheConnectorSchedulerOutputManager"
NEEDED = (REQUEST, MANAGER, "RequestData", "SchedulerOutput", "LlmRequestState", "mpi_rank")
KNOWN = {
    REQUEST: ("update_and_build_data", ["self", "req", "kv_cache_manager"]),
    MANAGER: ("build_scheduler_output",
              ["self", "scheduled_batch", "new_async_requests", "kv_cache_manager"]),
}  # fmt: skip
_managers: weakref.WeakSet[Any] = weakref.WeakSet()


def forget(llm_id: int) -> None:
    """Drop an ended request, which TensorRT-LLM itself keeps."""
    for manager in _managers:
        manager.requests.pop(llm_id, None)


def install(api: ModuleType) -> bool:
    """Replace the classes of this API module. False: it does not look as expected."""
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


def is_v2(kv_cache_manager: Any) -> bool:
    """Managers of hybrid models have other names, and the method."""
    has_groups = hasattr(kv_cache_manager, "get_page_indices_by_layer_group")
    return has_groups or type(kv_cache_manager).__name__.endswith("V2")


def lean_request(api: Any) -> type:
    prompt_states = (
        api.LlmRequestState.CONTEXT_INIT,
        api.LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS,
    )

    class LeanRequest(getattr(api, REQUEST)):  # type: ignore[misc]
        is_lean = True

        def __init__(self) -> None:
            super().__init__()
            self.pages: list[int] = []

        def update_and_build_data(self, req: Any, kv_cache_manager: Any) -> Any:
            tokens = req.get_num_tokens(0)
            if req.state in prompt_states:
                position = req.context_current_position
                scheduled = min(req.context_remaining_length, req.context_chunk_size)
            else:
                position, scheduled = tokens - 1, 1
            if is_v2(kv_cache_manager):
                (now,) = kv_cache_manager.get_page_indices_by_layer_group(req)
                kept = len(self.pages)
                is_same, self.pages = now[:kept] == self.pages, list(now)
                described = api.RequestData(req.request_id, [], now[kept:], position, scheduled)
                described.pages = None if is_same else self.pages
                return described
            new_pages: list[int] = []
            # A page's number is needed when the page is full, which is much later than this.
            if tokens > len(self.pages) * kv_cache_manager.tokens_per_block:
                new_pages = list(kv_cache_manager.get_cache_indices(req)[len(self.pages) :])
                self.pages += new_pages
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
            if api.mpi_rank() != 0:  # no scheduler needs it
                self.external_loads = {}
                return api.SchedulerOutput()
            return super().build_scheduler_output(
                scheduled_batch, new_async_requests, kv_cache_manager
            )

    return LeanManager
