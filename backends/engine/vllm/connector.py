"""The class that vLLM loads into its processes: `kv_transfer_config` names it.

One instance schedules, in the process of vLLM's EngineCore, and one copies, in the process of each
rank. All loads are asynchronous: vLLM leaves the request out of passes until every rank has loaded
it. A load that fails costs time only: the rank reports it, and vLLM computes the tokens
(kv_load_failure_policy is `recompute`).

vLLM ends its EngineCore at a completion that it does not expect (upstream issues 43226, 46240). So
each load is reported once, no save is reported as a sending, and no pages are kept back: those that
are being saved are pinned (scheduler.py).

Without vLLM this file cannot be imported.

Not here: orders (scheduler.py), copies (../connected/rank_copies.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import LlmId, Orders
from backends.engine.connected.channel import SCHEDULER, ConnectorLink, rank_name
from backends.engine.connected.rank_copies import RankCopies, register
from backends.engine.vllm.answer_grammar import follow_answer
from backends.engine.vllm.pages import block_pages, bytes_of, layers_of
from backends.engine.vllm.scheduler import NAME, PinnedPages, StepData, VllmScheduler

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1


@dataclass
class StepOrders(KVConnectorMetadata):
    """The copies of all ranks in one step."""

    orders: Orders


@dataclass
class EndedSaves(KVConnectorWorkerMetadata):
    """Saves that ended since the last step, by rank and request."""

    by_rank: dict[int, dict[LlmId, int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, EndedSaves)
        return EndedSaves(self.by_rank | other.by_rank)


def die_with_parent() -> None:
    """End the EngineCore with the process that started it, and the ranks with the EngineCore."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os._exit(1)


class VllmPages:
    """Pins pages in vLLM's pool by its own count of users."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        # From the last to the first, so that the first pages of a prompt are evicted last.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])


class MooncakeConnector(KVConnectorBase_V1):
    has_worker = True  # the process that started vLLM is our worker's; vLLM ends with it

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._page_tokens: int = vllm_config.cache_config.block_size
        self._blocks: int = kv_cache_config.num_blocks
        self._site = self._find_site()
        self._pinned: PinnedPages | None = None
        self._copies: RankCopies | None = None
        self._started: list[LlmId] = []  # loads that were ordered in this step
        self._rank = 0
        name = SCHEDULER
        if self.has_worker:
            die_with_parent()
        if role == KVConnectorRole.SCHEDULER:
            groups = len(kv_cache_config.kv_cache_groups)
            assert groups == 1, f"vLLM has {groups} KV cache groups; the connector has one"
            self._scheduler = VllmScheduler(
                self._site.block_tokens,
                self._page_tokens,
                lambda message: self._link.send(message),
                # vLLM turns its own cache off where prefill cannot go on after a prefix.
                can_continue=bool(vllm_config.cache_config.enable_prefix_caching),
            )
        else:
            self._rank = get_tensor_model_parallel_rank()
            name = rank_name(self._rank)
        self._link = ConnectorLink(self._site.channel, name, self._on_message)

    def _find_site(self) -> m.Site:
        return m.Site.from_environment(dict(os.environ))

    # -- the scheduler's process

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pinned = PinnedPages(VllmPages(gpu_block_pool), self._tp_size)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._saying_why():
            follow_answer(request)
            if request.mm_features:
                return 0, False
            name = (request.kv_transfer_params or {}).get(NAME)
            tokens = self._scheduler.match(request, num_computed_tokens, name)
            return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        with self._saying_why():
            (block_ids,) = blocks.get_block_ids()
            self._scheduler.promised(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        with self._saying_why():
            orders = self._scheduler.orders(*self._described(scheduler_output))
            if orders.saves:
                assert self._pinned is not None, "vLLM has bound no pool"
                self._pinned.add(orders)
            return StepOrders(orders)

    def _described(self, step: Any) -> tuple[list[StepData], list[StepData]]:
        """(requests with all of their pages, requests with new pages only)"""
        scheduled, cached = step.num_scheduled_tokens, step.scheduled_cached_reqs
        known = set(self._scheduler.knows(scheduled))
        if not known:
            return [], []
        whole = [
            StepData(
                each.req_id, each.block_ids[0], each.num_computed_tokens + scheduled[each.req_id]
            )
            for each in step.scheduled_new_reqs
            if each.req_id in known
        ]
        further = []
        for llm_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if llm_id in known:
                new = block_ids[0] if block_ids else ()
                data = StepData(llm_id, new, computed + scheduled[llm_id])
                (whole if llm_id in cached.resumed_req_ids else further).append(data)
        return whole, further

    def update_connector_output(self, connector_output: Any) -> None:
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, EndedSaves):
            assert self._pinned is not None, "vLLM has bound no pool"
            self._pinned.ended(ended.by_rank)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._saying_why():
            return self._scheduler.finished(request), None

    def has_pending_block_frees(self) -> bool:
        """True: vLLM waits for pages that are being saved, and preempts no request for them."""
        return bool(self._pinned)

    def has_pending_push_work(self) -> bool:
        """True: vLLM makes steps without requests, in which saved pages are unpinned."""
        return bool(self._pinned)

    # -- the process of a rank

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU all layers of a block in one run, so that a page is one copy. A preference."""
        return None if vllm_config.device_config.device_type == "cpu" else "BLHNC"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """A difference of sizes ends the start of the engine."""
        with self._saying_why():
            site, layers = self._site, layers_of(kv_caches, self._blocks)
            pages = block_pages(
                layers,
                self._rank,
                self._tp_size,
                self._page_tokens,
                site.block_tokens,
                site.is_alike,
            )
            # Page 0 is never given to a request.
            self._copies, ready = register(
                site, pages, bytes_of(kv_caches), self._blocks - 1, self._link.send, recomputes=True
            )
            self._link.send(ready)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called after the forward pass, or in a step without one: all loads are asynchronous."""
        orders = self._orders
        self._started = [move.llm_id for move in orders.loads]
        with self._saying_why():
            self._ready_copies.start(orders, self._stream())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request whose KV is loaded is in no pass."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: pages are saved whole. A hook here would force piecewise CUDA graphs."""

    def wait_for_save(self) -> None:
        """Called also when the pass has raised: then nothing is saved."""
        if sys.exc_info()[1] is None:
            with self._saying_why():
                self._ready_copies.after_forward(self._stream())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        with self._saying_why():
            started, self._started = self._started, []
            loaded = set(self._ready_copies.loaded(started))
            failed = {llm_id for llm_id in loaded if self._ready_copies.has_failed(llm_id)}
            return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended = self._ready_copies.ended_saves()
        return EndedSaves({self._rank: ended}) if ended else None

    @property
    def _orders(self) -> Orders:
        bound = self._get_connector_metadata()
        assert isinstance(bound, StepOrders)
        return bound.orders

    @property
    def _ready_copies(self) -> RankCopies:
        assert self._copies is not None, "register_kv_caches comes first"
        return self._copies

    def _stream(self) -> Any:
        if self._vllm_config.device_config.device_type == "cpu":
            return None  # a pass has ended when its call returns
        import torch

        return torch.cuda.current_stream()

    # -- both

    def shutdown(self) -> None:
        self._link.close()
        if self._copies is not None:
            self._copies.close()

    @contextlib.contextmanager
    def _saying_why(self) -> Iterator[None]:
        """After an exception here the EngineCore ends: the worker gets the reason before."""
        try:
            yield
        except Exception as error:
            log.exception("the connector failed")
            self._link.send(m.Broken(f"the connector failed: {type(error).__name__}: {error}"))
            raise

    def _on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Goodbye):
            return  # vLLM calls `shutdown`
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.on_message(message)
        elif self._copies is not None:
            self._copies.on_message(message)
