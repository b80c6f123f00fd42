"""What TensorRT-LLM builds for connectors in every step, without its copies of every prompt.

Its KvCacheConnectorSchedulerOutputRequest reads all tokens and all pages of every request in every
step, on every rank, to say which are new: for 64 requests of 32k tokens that is two million
Python integers a step. It keeps a copy of them per request, and under tensor parallelism no
request is ever forgotten. This connector needs neither tokens nor, before a page is full, pages,
and only rank 0 reads any of it. So `install` puts these classes in the place of TensorRT-LLM's
before it makes its connector manager, where they look as they are known to; where they do not,
everything stays as it is, correct and slower.

Not here: what is made of it (scheduler.py).
"""

from __future__ import annotations

import inspect
import logging
import weakref
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)
REQUEST, MANAGER = (
    "KvCacheConnectorSchedulerOutputRequest", "KvCacheConnectorSchedulerOutputManager",
)  # fmt: skip
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
