"""TensorRT-LLM's own connector manager, driven on the CPU: which calls does a connector get?

    python -m backends.doctor.contract.driving FILE 2

FILE is the module that has KvCacheConnectorManager. It is run with stand-ins for everything that it
imports, so it needs neither a GPU nor MPI nor torch. Its text is executed: name no folder that you
do not trust. The last line of the output is JSON: the calls, and the error that ended them.

The executor's part is played here, in the order of `steps` in api.json. The first request has a
prompt of two chunks with a loaded page, generates a token, and ends with a save. The prompt of the
second is loaded beside the passes. With manager V2 a third one loses its pages and begins again.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from backends.engine.trtllm.releases import V2

PAGE = 4  # tokens
HOME = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


class DrivenState(enum.Enum):
    CONTEXT_INIT = enum.auto()
    GENERATION_IN_PROGRESS = enum.auto()
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = enum.auto()
    DISAGG_GENERATION_TRANS_IN_PROGRESS = enum.auto()
    GENERATION_COMPLETE = enum.auto()


class DrivenPages:
    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}  # by request


class KVCacheManagerV2(DrivenPages):
    def get_page_indices_by_layer_group(self, req: Any) -> list[list[int]]:
        return [list(self.pages[req.request_id])]


class KVCacheManager(DrivenPages):
    def get_cache_indices(self, req: Any) -> list[int]:
        return list(self.pages[req.request_id])

    def commit_and_get_block_hashes(self, req: Any) -> list[int]:
        return []


class AnyName:
    """Takes the place of every name that is not known here."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


KNOWN: dict[str, Any] = {
    "LlmRequestState": DrivenState,
    "KVCacheManagerV2": KVCacheManagerV2,
    "mpi_rank": lambda: 0,
    "mpi_broadcast": lambda value, root=0: value,
    "mpi_allgather": lambda value: [value],
    "get_draft_token_length": lambda req: 0,
    "logger": AnyName(),
    "cuda": SimpleNamespace(current_stream=lambda: None, Stream=object),
}


class StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name) or type(name, (AnyName,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of tensorrt_llm and torch."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] not in ("tensorrt_llm", "torch"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are made when they are asked for."""


def load(path: Path) -> ModuleType:
    sys.meta_path.insert(0, StandIns())
    home = HOME if path.parent.name == "connectors" else HOME.replace("connectors.", "")
    spec = importlib.util.spec_from_file_location(home, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[home] = module
    spec.loader.exec_module(module)
    return module


class DrivenRequest:
    """As a connector and its manager see it."""

    is_generation_only_request = is_dummy_request = False
    cache_salt = lora_task_id = kv_cache_retention_config = None
    context_chunk_size = context_current_position = 0
    py_num_connector_matched_tokens = 0

    def __init__(self, number: int, prompt_tokens: int) -> None:
        self.request_id = self.py_request_id = number
        self.tokens = list(range(prompt_tokens))
        self.prompt_tokens = prompt_tokens
        self.state = DrivenState.CONTEXT_INIT

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_tokens - self.context_current_position

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)


class CallRecorder:
    """Both halves of a connector; notes each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer: tuple[int, bool] = (0, False)  # to the next request
        self.is_saving = False
        self.saved: list[int] = []
        self.loaded: list[int] = []

    def note(self, name: str, *what: Any) -> None:
        self.calls.append(f"{name}({', '.join(map(str, what))})")

    def classes(self, api: ModuleType) -> tuple[type, type]:
        recorder = self

        class Scheduler(api.KvCacheConnectorScheduler):  # type: ignore[misc,name-defined]
            def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
                recorder.note("match", request.request_id, num_computed_tokens)
                return recorder.answer

            def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
                honoured = getattr(request, "py_num_connector_matched_tokens", None)
                recorder.note("allocated", request.request_id, block_ids, honoured)

            def build_connector_meta(self, scheduler_output: Any) -> object:
                new, cached = scheduler_output.new_requests, scheduler_output.cached_requests
                recorder.note("orders", *described("new", new), *described("cached", cached))
                return "orders"

            def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
                recorder.note("finished", request.request_id, cache_block_ids)
                return recorder.is_saving

        class Worker(api.KvCacheConnectorWorker):  # type: ignore[misc,name-defined]
            def register_kv_caches(self, kv_cache_tensor: Any) -> None:
                recorder.note("register")

            def bind_connector_meta(self, metadata: object) -> None:
                recorder.note("bind", metadata)

            def start_load_kv(self, stream: Any) -> None: ...
            def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
            def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
            def wait_for_save(self, stream: Any) -> None: ...

            def get_finished(
                self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
            ) -> Any:
                recorder.note("ended", finished_gen_req_ids, started_loading_req_ids)
                return recorder.saved, recorder.loaded

        return Scheduler, Worker


def described(kind: str, requests: Sequence[Any]) -> Iterator[str]:
    for each in requests:
        yield (
            f"{kind} {each.request_id} pages {each.new_block_ids} at {each.computed_position} "
            f"computes {each.num_scheduled_tokens}"
        )


class DrivenExecutor:
    """The executor, and the KV cache manager of one generation."""

    def __init__(self, api: ModuleType, manager: int) -> None:
        self.recorder, self.is_v2 = CallRecorder(), manager == V2
        scheduler, worker = self.recorder.classes(api)
        self.manager = api.KvCacheConnectorManager(worker(None), scheduler(None))
        self.cache: Any = KVCacheManagerV2() if self.is_v2 else KVCacheManager()

    def prepare(
        self, request: DrivenRequest, local: int, answer: tuple[int, bool], honoured: int
    ) -> int:
        """Match and allocate. Returns the tokens that need not be computed."""
        self.recorder.answer, manager = answer, self.manager
        if self.is_v2:
            offered, is_aside = manager.query_num_new_matched_tokens(request, local)
            honoured = min(offered, honoured)
            manager.commit_new_matched_tokens(request, honoured, is_aside)
        else:
            honoured = manager.get_num_new_matched_tokens(request, local)
        request.context_current_position = local + honoured
        return honoured

    def give(self, request: DrivenRequest, pages: list[int]) -> None:
        self.cache.pages[request.request_id] = pages
        groups = ([list(pages)],) if self.is_v2 else ()
        self.manager.update_state_after_alloc(request, [] if self.is_v2 else pages, *groups)

    def step(self, *parts: tuple[DrivenRequest, int]) -> None:
        """One iteration that computes so many tokens of each request."""
        prompts = [r for r, _ in parts if r.state is not DrivenState.GENERATION_IN_PROGRESS]
        batch = SimpleNamespace(
            context_requests=prompts,
            context_requests_chunking=list(prompts),
            context_requests_last_chunk=[],
            generation_requests=[r for r, _ in parts if r not in prompts],
        )
        for request, count in parts:
            request.context_chunk_size = count
        self.manager.build_scheduler_output(batch, self.cache)
        self.manager.take_scheduled_requests_pending_load(batch)
        self.manager.handle_metadata()
        for request, count in parts:
            if request.state is DrivenState.CONTEXT_INIT:
                request.context_current_position += count
                if not request.context_remaining_length:
                    request.state = DrivenState.GENERATION_IN_PROGRESS
                    request.tokens.append(0)
            elif request.state is DrivenState.GENERATION_IN_PROGRESS:
                request.tokens.append(0)

    def end(self, request: DrivenRequest, is_saving: bool) -> None:
        self.recorder.is_saving = is_saving
        pages = self.cache.pages.pop(request.request_id)
        request.state = DrivenState.GENERATION_COMPLETE
        groups = ([list(pages)],) if self.is_v2 else ()
        self.manager.request_finished(request, [] if self.is_v2 else pages, *groups)

    def poll(self, saved: Sequence[int] = (), loaded: Sequence[int] = ()) -> None:
        self.recorder.saved, self.recorder.loaded = list(saved), list(loaded)
        done = [request.request_id for request in self.manager.get_finished()]
        self.recorder.note("over", done)


def drive(it: DrivenExecutor) -> None:
    first = DrivenRequest(1, 14)
    it.prepare(first, PAGE, (PAGE, False), PAGE)
    it.give(first, [7, 3, 9] if it.is_v2 else [7, 3, 9, 5])
    it.step((first, PAGE))
    it.poll()
    it.cache.pages[1] = [7, 3, 9, 5]
    it.step((first, 2))
    it.poll()
    it.step((first, 1))
    it.end(first, is_saving=True)
    it.poll()
    it.poll(saved=[1])
    aside = DrivenRequest(2, 9)
    it.prepare(aside, 0, (2 * PAGE, True), 2 * PAGE)
    it.give(aside, [2, 8, 6])
    it.step((aside, 1))
    it.poll()
    it.poll(loaded=[2])
    it.recorder.note("state", aside.state.name, it.manager.should_add_sequence(aside))
    it.step((aside, 1))
    it.end(aside, is_saving=False)
    it.poll()
    if it.is_v2:
        lost = DrivenRequest(3, 14)
        it.prepare(lost, 0, (3 * PAGE, False), 2 * PAGE)  # the runtime takes less than was offered
        it.give(lost, [1, 4, 2])
        it.step((lost, PAGE))
        it.poll()
        it.manager.reset_request_state(lost)
        lost.context_current_position = 0
        it.prepare(lost, 2 * PAGE, (PAGE, False), PAGE)
        it.give(lost, [1, 4, 6, 8])
        it.step((lost, 2))
        it.end(lost, is_saving=False)
        it.poll()


def main() -> None:
    path, manager = Path(sys.argv[1]), int(sys.argv[2])
    it, error = DrivenExecutor(load(path), manager), ""
    try:
        drive(it)
    except Exception as problem:  # Catch all: it is the finding
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"calls": it.recorder.calls, "error": error}))


if __name__ == "__main__":
    main()
