"""What connectors hear of a step, built as the real one builds it: from all tokens and pages.

Named and called as there, because a connector may put something else in its place.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tensorrt_llm._fake.api import RequestData, SchedulerOutput
from tensorrt_llm._fake.request import State as LlmRequestState

_rank = 0  # of the process that asks; the stand-in has all ranks in one


def mpi_rank() -> int:
    return _rank


class KvCacheConnectorSchedulerOutputRequest:
    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.tokens: list[int] = []

    def update_and_build_data(self, req: Any, kv_cache_manager: Any) -> RequestData:
        if hasattr(kv_cache_manager, "get_page_indices_by_layer_group"):
            (blocks,) = kv_cache_manager.get_page_indices_by_layer_group(req)
        else:
            blocks = kv_cache_manager.get_cache_indices(req)
        tokens = req.get_tokens(0)
        new_blocks, new_tokens = blocks[len(self.block_ids) :], tokens[len(self.tokens) :]
        self.block_ids += new_blocks
        self.tokens += new_tokens
        if req.state is LlmRequestState.CONTEXT_INIT:
            computed = req.context_current_position
            count = min(req.context_remaining_length, req.context_chunk_size)
        else:
            computed, count = len(tokens) - 1, 1
        return RequestData(req.request_id, new_tokens, new_blocks, computed, count)


class KvCacheConnectorSchedulerOutputManager:
    def __init__(self) -> None:
        # By its name in the connector API's module, as the real one.
        made = api_module().KvCacheConnectorSchedulerOutputRequest
        self.requests: dict[int, Any] = defaultdict(made)
        self.external_loads: dict[int, int] = {}

    def build_scheduler_output(
        self, scheduled_batch: Any, new_async_requests: Any, kv_cache_manager: Any
    ) -> SchedulerOutput:
        output = SchedulerOutput()
        for req in scheduled_batch:
            if req.request_id in new_async_requests:
                continue
            is_new = req.request_id not in self.requests
            data = self.requests[req.request_id].update_and_build_data(req, kv_cache_manager)
            if req.state is LlmRequestState.CONTEXT_INIT:
                data.computed_position -= self.external_loads.get(req.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        self.external_loads = {}
        return output

    def reset_request(self, request_id: int) -> None:
        """Its pages are gone: it is described as a new one again."""
        self.requests.pop(request_id, None)
        self.external_loads.pop(request_id, None)


def api_module() -> Any:
    import importlib

    from tensorrt_llm._fake.api import HAS_NEW_API

    home = "connectors." if HAS_NEW_API else ""
    return importlib.import_module(f"tensorrt_llm._torch.pyexecutor.{home}kv_cache_connector")
