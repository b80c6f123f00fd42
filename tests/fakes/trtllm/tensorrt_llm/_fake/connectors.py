"""The executor's side of the connector API: what is called when, on every rank.

As the real KvCacheConnectorManager it runs the scheduler on rank 0 and broadcasts what it says; see
`OtherRanksWait`.
"""

from __future__ import annotations

import importlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensorrt_llm._fake.api import SchedulerOutput
from tensorrt_llm._fake.kv_model import RankModel
from tensorrt_llm._fake.request import LlmRequest, State, VisibleRequest
from tensorrt_llm._fake.scheduler_output import api_module
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs


class OtherRanksWait(BaseException):
    """Rank 0 raised before the broadcast of its result, for which the other ranks wait for ever."""


class Pages:
    """The part of a KV cache manager that a step's description is made from."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block

    def get_cache_indices(self, request: LlmRequest) -> list[int]:
        return list(request.block_ids)


class PagesV2:
    """The same of manager V2."""

    def get_page_indices_by_layer_group(self, request: LlmRequest) -> list[list[int]]:
        return [list(request.block_ids)]


class Connectors:
    """One scheduler, a worker per rank, and the requests that wait for them."""

    def __init__(self, args: TorchLlmArgs) -> None:
        config = args.kv_connector_config
        assert config is not None
        module = importlib.import_module(config.connector_module)
        scheduler_class = getattr(module, config.connector_scheduler_class)
        worker_class = getattr(module, config.connector_worker_class)
        ranks = [args.on_rank(rank) for rank in range(args.tensor_parallel_size)]
        with ThreadPoolExecutor() as threads:  # built at the same time, as the real ones are
            workers = [threads.submit(worker_class, rank) for rank in ranks]
            scheduler = threads.submit(scheduler_class, args)
            self.workers: list[Any] = [worker.result() for worker in workers]
            self.scheduler: Any = scheduler.result()
        self.is_v2 = args.kv_cache_config.is_v2
        per_block = args.kv_cache_config.tokens_per_block
        self._pages: Any = PagesV2() if self.is_v2 else Pages(per_block)
        self._output = api_module().KvCacheConnectorSchedulerOutputManager()
        self._started_saving: list[LlmRequest] = []
        self._started_loading: list[LlmRequest] = []
        self.saving: dict[int, LlmRequest] = {}
        self.loading: dict[int, LlmRequest] = {}
        self._saved_by: dict[int, set[int]] = defaultdict(set)
        self._loaded_by: dict[int, set[int]] = defaultdict(set)
        self._callables: list[Any] = []

    def register(self, models: Sequence[RankModel]) -> None:
        for worker, model in zip(self.workers, models, strict=True):
            if self.is_v2:
                worker.register_kv_cache_layout(layout_of(model))
            else:
                worker.register_kv_caches(model.kv)
            self._callables.append(worker.register_forward_pass_callable())
        if hasattr(self.scheduler, "wait_for_initialization"):
            self.scheduler.wait_for_initialization()

    def match(self, request: LlmRequest, local_tokens: int) -> int:
        tokens, is_async = self.query(request, local_tokens)
        self.commit(request, tokens, is_async)
        return tokens

    def query(self, request: LlmRequest, local_tokens: int) -> tuple[int, bool]:
        tokens, is_async = self._on_leader(
            lambda: self.scheduler.get_num_new_matched_tokens(self._visible(request), local_tokens)
        )
        if is_async and tokens == 0:
            raise RuntimeError("a connector answered (0, True)")
        assert local_tokens + tokens < len(request.prompt), "one token must be left to compute"
        return tokens, is_async

    def commit(self, request: LlmRequest, tokens: int, is_async: bool) -> None:
        """`tokens`: what is taken of the offer. An asynchronous load of nothing is awaited too."""
        request.py_num_connector_matched_tokens = tokens
        if is_async:
            self._started_loading.append(request)
            self.loading[request.request_id] = request
            request.state = State.DISAGG_GENERATION_TRANS_IN_PROGRESS
        elif tokens:
            self._output.external_loads[request.request_id] = tokens

    def allocated(self, request: LlmRequest) -> None:
        """On rank 0 only, without a broadcast: what it raises is raised there alone."""
        blocks, scheduler = list(request.block_ids), self.scheduler
        if self.is_v2:
            tell = scheduler.update_state_after_alloc_by_layer_group
            self._on_leader(lambda: tell(self._visible(request), [blocks]))
        else:
            tell = scheduler.update_state_after_alloc
            self._on_leader(lambda: tell(self._visible(request), blocks))

    def _visible(self, request: LlmRequest) -> Any:
        """V2 passes its own request, V1 the one of its C++ half."""
        return request if self.is_v2 else VisibleRequest(request)

    def reset(self, request: LlmRequest) -> None:
        """Its pages are gone, and it begins again."""
        self._output.reset_request(request.request_id)

    def _on_leader(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 finds, as the others get it."""
        try:
            return pickle.loads(pickle.dumps(ask()))
        except Exception as error:
            if len(self.workers) > 1:
                raise OtherRanksWait(repr(error)) from error
            raise

    def describe(self, batch: Sequence[tuple[LlmRequest, int, int]]) -> SchedulerOutput:
        """What this iteration computes; tokens as the host knows them by now."""
        for request, _, count in batch:
            request.context_chunk_size = count
        return self._output.build_scheduler_output(
            [request for request, _, _ in batch], self.loading, self._pages
        )

    def start(self, output: SchedulerOutput, stream: Any) -> None:
        metadata = self._on_leader(lambda: self.scheduler.build_connector_meta(output))
        errors = [self._bound(worker, metadata) for worker in self.workers]
        if raised := [error for error in errors if error is not None]:
            if len(raised) < len(errors):
                raise OtherRanksWait(repr(raised[0])) from raised[0]
            raise raised[0]
        for worker in self.workers:
            worker.start_load_kv(stream)

    def _bound(self, worker: Any, metadata: Any) -> Exception | None:
        try:
            worker.bind_connector_meta(pickle.loads(pickle.dumps(metadata)))
        except Exception as error:
            return error
        return None

    def before_layer(self, layer: int, stream: Any) -> None:
        for worker in self.workers:
            worker.wait_for_layer_load(layer, stream)

    def after_layer(self, layer: int, stream: Any) -> None:
        for worker in self.workers:
            worker.save_kv_layer(layer, stream)

    def after_forward(self, stream: Any) -> None:
        for each in self._callables:
            if each is not None:
                each()
        for worker in self.workers:
            worker.wait_for_save(stream)

    def finished(self, request: LlmRequest, are_freed: bool = False) -> bool:
        """Must its pages stay for a while?"""
        blocks = [] if are_freed else list(request.block_ids)
        end: Callable[..., bool] = self.scheduler.request_finished
        if self.is_v2:
            end = self.scheduler.request_finished_by_layer_group
        may_stay = self._on_leader(
            lambda: end(self._visible(request), [blocks] if self.is_v2 else blocks)
        )
        if may_stay:
            self._started_saving.append(request)
            self.saving[request.request_id] = request
        return bool(may_stay)

    def poll(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """(saved, loaded): requests that every rank is done with."""
        new_saving = [request.request_id for request in self._started_saving]
        new_loading = [request.request_id for request in self._started_loading]
        self._started_saving, self._started_loading = [], []
        for rank, worker in enumerate(self.workers):
            saved, loaded = worker.get_finished(list(new_saving), list(new_loading))
            for ids, waiting, by in (
                (saved, self.saving, self._saved_by),
                (loaded, self.loading, self._loaded_by),
            ):
                for request_id in ids:
                    assert request_id in waiting, f"{request_id} was never passed in"
                    assert rank not in by[request_id], f"{request_id} was returned twice"
                    by[request_id].add(rank)
        return (
            self._complete(self.saving, self._saved_by),
            self._complete(self.loading, self._loaded_by),
        )

    def _complete(
        self, waiting: dict[int, LlmRequest], by: dict[int, set[int]]
    ) -> list[LlmRequest]:
        done = [i for i, ranks in by.items() if len(ranks) == len(self.workers)]
        for request_id in done:
            del by[request_id]
        return [waiting.pop(request_id) for request_id in done]


def layout_of(model: RankModel) -> Any:
    """The pages of a rank as V2 describes them: one group, one place, layer by layer."""
    from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_layout as api

    shape, kv = model.shape, model.kv
    roles = ("key", "value")[: shape.kv_factor]
    buffers = tuple(
        api.KvCacheBufferRef(layer, role, 1) for layer in range(shape.layers) for role in roles
    )
    page_bytes = kv[0].numel() * kv.element_size()
    stride = kv.stride(0) * kv.element_size()
    region = api.KvCacheRegion(kv.data_ptr(), page_bytes, stride, len(kv), buffers)
    group = api.KvCacheLayerGroupLayout(0, tuple(range(shape.layers)), None, (region,))
    return api.KvCacheLayout(shape.tokens_per_block, (group,))
