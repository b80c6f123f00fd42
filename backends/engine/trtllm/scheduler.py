"""The connector's scheduler for TensorRT-LLM, with the differences between its releases.

TensorRT-LLM calls `match` once for each request, while it holds the lock of its own prefix tree. A
release shows the cache salt of a request, or only a number made of it. The position of a new
request includes the loaded tokens, or does not.

Some releases do not call `finished` for a cancelled or failed request. The next pass may then write
the request's pages while they are still being saved. So a request that is missing in a step, and
was not finished, is a *fence*: its saves must end before that pass.

KV cache manager V2 gives a prompt its pages chunk by chunk, and may take less than was promised. It
may also take all pages of a running request, which begins again as a new one. And it may replace a
full page by another request's equal page, so that the first one is free while it is being saved.
The last two are fences, too.

Not here: the staged prompts, loads and saves (../connected/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import LlmId, Orders
from backends.engine.connected.scheduler import Entry, Salt, StageScheduler
from backends.engine.trtllm.releases import V1, V2

UNKNOWN = object()  # TensorRT-LLM's own description has no `pages`


class RequestData(Protocol):
    """TensorRT-LLM's description of one request in a step. With manager V2, ours has `pages`: all
    pages of the request if earlier ones were replaced, else None."""

    request_id: int
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class TrtllmScheduler(StageScheduler):
    def __init__(
        self,
        block_tokens: int,
        tokens_per_block: int,
        send: Callable[[m.ToWorker], None],
        salt_id: Callable[[str], int] | None = None,
        aside_pages_min: int = 0,
        manager: int = V1,
    ) -> None:
        """`salt_id`: TensorRT-LLM's function that makes a number of a salt; None: it has none.
        `manager`: generation of its KV cache manager."""
        super().__init__(block_tokens, tokens_per_block, send, aside_pages_min)
        self._salt_id = salt_id
        self._is_v2 = manager == V2
        self._saving: set[LlmId] = set()  # requests with ordered saves that may need a fence

    def _salts(self, cache_salt: str) -> tuple[Salt, ...]:
        if not cache_salt or self._salt_id is None:
            return (cache_salt,)
        return cache_salt, self._salt_id(cache_salt)

    def match(self, request: Any, local_tokens: int) -> int:
        """Tokens after the local ones that need not be computed."""
        salt = _salt(request)
        if salt is None:
            return 0
        return self.promise(request.request_id, request.get_tokens(0), salt, local_tokens)

    def _asked_again(self, entry: Entry, local_tokens: int) -> int:
        if self._is_v2:
            self._begin_again(entry, local_tokens)
        return 0

    def _take_due(self, new: Sequence[RequestData]) -> list[Entry]:
        """V2 may leave a request out of the step in which it was asked, and take its pages back. So
        a load in the pass is ordered only with the request's first pass."""
        due = super()._take_due(new)
        if self._is_v2:
            begin = {data.request_id for data in new}
            self._due = [each for each in due if not each.is_aside and each.llm_id not in begin]
        return [entry for entry in due if entry not in self._due]

    def _remove(self, entry: Entry) -> m.Unstaged:
        if self._is_v2 and entry.llm_id is not None:  # it ends no request during its load
            self._aside.discard(entry.llm_id)
        return super()._remove(entry)

    def _begin_again(self, entry: Entry, local_tokens: int) -> None:
        """TensorRT-LLM has taken the pages of this request and computes its prompt again. What has
        been saved stays saved. A load that is due becomes one of no pages."""
        entry.local_tokens, entry.position = local_tokens, 0
        entry.first_page = entry.load_pages = 0

    def allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        if self._is_v2:
            self._take_less(request)
        super().allocated(request, block_ids)

    def _take_less(self, request: Any) -> None:
        """Of the promised load TensorRT-LLM takes what it has pages for: all, some or none."""
        taken_tokens = getattr(request, "py_num_connector_matched_tokens", None)
        with self._lock:
            entry = self._table.taken.get(request.request_id)
            if entry is None or not entry.load_pages:
                return
            if taken_tokens is None or taken_tokens % self._tokens_per_block:
                raise RuntimeError(
                    f"TensorRT-LLM takes {taken_tokens} tokens of a promised load, in pages of "
                    f"{self._tokens_per_block}: use a known release, and see `mooncake doctor "
                    "--engine tensorrt_llm`"
                )
            entry.load_pages = min(entry.load_pages, taken_tokens // self._tokens_per_block)

    def orders(self, new: Sequence[RequestData], cached: Sequence[RequestData]) -> Orders:
        fences: set[LlmId] = set()
        if self._saving:
            fences = self._saving.difference([data.request_id for data in cached])
            if not self._is_v2:  # with V2, a request that is new once more has lost its pages
                fences.difference_update([data.request_id for data in new])
        if self._is_v2:
            with self._lock:
                self._see_new(new)
                fences.update(self._see_replaced(cached))
        self._saving -= fences
        orders = super().orders(new, cached)
        self._saving.update([move.llm_id for move in orders.saves])
        return orders._replace(fences=sorted(fences)) if fences else orders

    def _see_new(self, new: Sequence[RequestData]) -> None:
        """Begin again with requests that had a pass before, or do not begin behind their load."""
        for data in new:
            if (entry := self._table.taken.get(data.request_id)) is not None:
                behind = entry.local_tokens + entry.load_pages * self._tokens_per_block
                if entry.position or (entry.is_aside and data.computed_position < behind):
                    self._begin_again(entry, data.computed_position)

    def _see_replaced(self, cached: Sequence[RequestData]) -> Iterator[LlmId]:
        """Take over replaced pages. Yield the requests whose saves may read pages that are gone."""
        for data in cached:
            pages = getattr(data, "pages", UNKNOWN)
            if pages is None:
                continue
            if data.request_id in self._saving:
                yield data.request_id
            entry = self._table.taken.get(data.request_id)
            if entry is not None and pages is not UNKNOWN:
                entry.block_ids = list(pages[: len(pages) - len(data.new_block_ids)])

    def _given(self, entry: Entry, block_ids: Sequence[int]) -> None:
        needed = entry.stage.token_count
        if len(block_ids) * self._tokens_per_block < needed and not self._is_v2:
            raise RuntimeError(
                f"TensorRT-LLM gave {len(block_ids)} pages of {self._tokens_per_block} tokens for "
                f"a prompt of {needed}: it runs its KV cache manager V2, but V1 was asked for. Use "
                "a model, or a release, that heeds use_kv_cache_manager_v2"
            )
        super()._given(entry, block_ids)

    def _position(self, entry: Entry, data: RequestData, is_new: bool) -> int:
        start, prompt_tokens = data.computed_position, entry.stage.token_count
        if is_new:
            start = min(entry.local_tokens, start) + entry.load_pages * self._tokens_per_block
        if entry.position >= prompt_tokens:
            # It generates: one token is certain, drafts are not. The overlap scheduler reports the
            # position before this pass, so a page may be saved one step later.
            return max(entry.position, start + 1)
        if start < entry.position:
            raise RuntimeError(
                f"TensorRT-LLM is at token {start} of a prompt that it should have computed up to "
                f"{entry.position}: pages may have been saved before they were computed"
            )
        if not hasattr(data, "num_scheduled_tokens"):
            raise RuntimeError(
                "this TensorRT-LLM does not report how many tokens it computes: 1.2.0rc2 or later "
                "is needed"
            )
        return min(start + data.num_scheduled_tokens, prompt_tokens)

    def finished(self, request: Any, block_ids: Sequence[int] = ()) -> bool:
        """`block_ids`: the pages that TensorRT-LLM keeps back if the result is True."""
        with self._lock:
            entry = self._table.taken.get(request.request_id)
        known = [] if entry is None else entry.block_ids
        are_kept = super().finished(request) and (bool(block_ids) or not self._is_v2)
        if are_kept and (not self._is_v2 or known == list(block_ids[: len(known)])):
            self._saving.discard(request.request_id)  # otherwise it is a fence
        return are_kept


def _salt(request: Any) -> Salt | None:
    """The request's cache salt; None if its KV depends on more than tokens and a salt.

    The request that `match` gets is the C++ one. It may lack attributes that later calls have.
    """
    # Written out, because TensorRT-LLM waits for it.
    if getattr(request, "lora_task_id", None) is not None:
        return None
    if getattr(request, "multimodal_hashes", None):
        return None
    if getattr(request, "multimodal_positions", None):
        return None
    salt = getattr(request, "cache_salt", None)
    if salt is None:
        salt = getattr(request, "cache_salt_id", None)
    return "" if salt is None else salt
