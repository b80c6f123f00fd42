"""The connector manager of one rank, as `mooncake doctor` drives TensorRT-LLM's own.

The stand-in's executor has all ranks in one process and does not use it (connectors.py). It is what
the tests compare with the recorded calls where there is no TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm._fake.scheduler_output import KvCacheConnectorSchedulerOutputManager
from tensorrt_llm.bindings import LlmRequestState


class KvCacheConnectorManager:
    def __init__(self, worker: Any, scheduler: Any) -> None:
        self.worker, self.scheduler = worker, scheduler
        self.scheduler_output_manager = KvCacheConnectorSchedulerOutputManager()
        self._output: Any = None
        self._started_loading: dict[int, Any] = {}
        self._loading: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._started_saving: dict[int, Any] = {}
        self._saving: dict[int, Any] = {}

    def query_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def commit_new_matched_tokens(self, request: Any, num_tokens: int, load_kv_async: bool) -> None:
        if load_kv_async:
            self._started_loading[request.request_id] = request
        self.scheduler_output_manager.external_loads[request.request_id] = num_tokens
        request.py_num_connector_matched_tokens = num_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Of manager V1, whose releases do not note the number in the request."""
        tokens, is_async = self.query_num_new_matched_tokens(request, num_computed_tokens)
        self.commit_new_matched_tokens(request, tokens, is_async)
        request.py_num_connector_matched_tokens = 0
        return int(tokens)

    def update_state_after_alloc(self, request: Any, block_ids: Any, groups: Any = None) -> None:
        if groups:
            self.scheduler.update_state_after_alloc_by_layer_group(request, groups)
        else:
            self.scheduler.update_state_after_alloc(request, block_ids)

    def should_add_sequence(self, request: Any) -> bool:
        return request.request_id not in self._loaded

    def build_scheduler_output(self, scheduled_batch: Any, kv_cache_manager: Any) -> None:
        batch = [*scheduled_batch.context_requests, *scheduled_batch.generation_requests]
        self._output = self.scheduler_output_manager.build_scheduler_output(
            batch, self._started_loading, kv_cache_manager
        )

    def take_scheduled_requests_pending_load(self, scheduled_requests: Any) -> None:
        for request in self._started_loading.values():
            request.state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS

    def handle_metadata(self) -> None:
        output, self._output = self._output, None
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))

    def request_finished(self, request: Any, block_ids: Any, groups: Any = None) -> bool:
        self._loaded.pop(request.request_id, None)
        if groups:
            may_save = self.scheduler.request_finished_by_layer_group(request, groups)
        else:
            may_save = self.scheduler.request_finished(request, block_ids)
        if may_save:
            self._started_saving[request.request_id] = request
        return bool(may_save)

    def get_finished(self) -> list[Any]:
        saving, loading = list(self._started_saving), list(self._started_loading)
        self._saving |= self._started_saving
        self._loading |= self._started_loading
        self._started_saving, self._started_loading = {}, {}
        saved, loaded = self.worker.get_finished(saving, loading)
        for number in loaded:
            self._loaded[number] = self._loading.pop(number)
            self._loaded[number].state = LlmRequestState.CONTEXT_INIT
        return [self._saving.pop(number) for number in saved]

    def reset_request_state(self, request: Any) -> None:
        self.scheduler_output_manager.reset_request(request.request_id)
