"""The connector's scheduler for vLLM: which tokens are not computed, and which pages are pinned.

vLLM asks for a request again and again until it finds pages for it, also after a preemption. So
`match` only plans, and `promised` decides. vLLM calls it a second time when the loaded request is
scheduled. After the first time nothing more is loaded for the request, because the worker may give
its places away. What a preempted request lacks is then computed.

vLLM frees the pages of a request when it ends or is preempted. A page that is being saved must not
be written meanwhile, so it is *pinned*: counted as used once more until every rank has saved it.

A worker's request carries the name of its stage (`NAME` in its kv_transfer_params). Pure.

Not here: vLLM's classes (connector.py), staged prompts (../connected/scheduler.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import LlmId, Orders
from backends.engine.connected.scheduler import Entry, StageScheduler

NAME = "mooncake_request"
ALL_ASIDE = 1  # every load runs beside the passes, so it delays no stream
# vLLM's number in place of a page that it has dropped or never had, because no later token attends
# to it. That happens if all layers have a sliding window.
NULL_PAGE = 0


class StepData(NamedTuple):
    """One request in one pass."""

    request_id: str
    new_block_ids: Sequence[int]  # of a new or resumed request: all
    position: int  # tokens that have KV after the pass


class Pages(Protocol):
    """vLLM's pool of pages."""

    def pin(self, block_ids: Sequence[int]) -> None: ...
    def unpin(self, block_ids: Sequence[int]) -> None: ...


class PinnedPages:
    """Pages that are being saved, by request, until every rank has saved them."""

    def __init__(self, pages: Pages, ranks: int) -> None:
        self._pages = pages
        self._ranks = ranks
        self._saves: dict[LlmId, deque[Sequence[int]]] = {}  # oldest first
        # Saves that a rank has ended and others have not, by request and rank.
        self._ended: dict[LlmId, dict[int, int]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return bool(self._saves)

    def add(self, orders: Orders) -> None:
        for move in orders.saves:
            self._pages.pin(move.block_ids)
            self._saves.setdefault(move.llm_id, deque()).append(move.block_ids)

    def ended(self, by_rank: Mapping[int, Mapping[LlmId, int]]) -> None:
        """rank -> request -> number of its saves that have ended since the last report.

        A rank ends the saves of a request in the order in which they were ordered.
        """
        for rank, ended in by_rank.items():
            for llm_id, saves in ended.items():
                counts = self._ended[llm_id]
                counts[rank] = counts.get(rank, 0) + saves
        for llm_id in {llm_id for ended in by_rank.values() for llm_id in ended}:
            self._release(llm_id)

    def _release(self, llm_id: LlmId) -> None:
        counts = self._ended[llm_id]
        if len(counts) < self._ranks:
            return
        over = min(counts.values())
        for _ in range(over):
            self._pages.unpin(self._saves[llm_id].popleft())
        self._ended[llm_id] = {rank: count - over for rank, count in counts.items() if count > over}
        if not self._saves[llm_id]:
            del self._saves[llm_id], self._ended[llm_id]


class VllmScheduler(StageScheduler):
    saves_tail = True

    def __init__(
        self, block_tokens: int, tokens_per_block: int, send: Any, can_continue: bool = True
    ) -> None:
        """`can_continue`: prefill may go on after tokens that have KV. False: only decode may, for
        which vLLM has another kernel."""
        super().__init__(block_tokens, tokens_per_block, send, ALL_ASIDE)
        self._can_continue = can_continue
        self._asked: list[Entry] = []  # planned in this step

    def match(self, request: Any, local_tokens: int, name: str | None) -> int:
        """Tokens after the local ones that can be loaded. Asked again, it plans again. `name`: of
        the stage."""
        if name is None:
            return 0
        llm_id, table = request.request_id, self._table
        with self._lock:
            entry = table.taken.get(llm_id)
            if entry is None:
                entry = table.take_named(llm_id, name, request.num_prompt_tokens)
            if entry is None or entry.is_claimed or entry.is_unstaged:
                return 0
            self._asked.append(entry)
            return self._load_tokens(entry, local_tokens, request.num_prompt_tokens)

    def _load_tokens(self, entry: Entry, local_tokens: int, tokens: int) -> int:
        """Plan a load of all tokens but the last; vLLM allows one that ends inside a page."""
        page, stop = self._tokens_per_block, min(entry.stage.loaded_tokens, tokens - 1)
        assert local_tokens % page == 0, f"vLLM has found {local_tokens} tokens, no whole pages"
        entry.local_tokens, entry.first_page = local_tokens, local_tokens // page
        is_step_of_decode = entry.stage.is_decode and stop == tokens - 1
        if stop <= local_tokens or not (self._can_continue or is_step_of_decode):
            entry.load_pages, entry.is_load_due = 0, False
            return 0
        entry.load_pages, entry.is_load_due = -(-stop // page) - entry.first_page, True
        return stop - local_tokens

    def promised(self, llm_id: LlmId, block_ids: Sequence[int], loaded_tokens: int) -> None:
        """vLLM has allocated these pages, and counts `loaded_tokens` tokens as loaded."""
        with self._lock:
            entry = self._table.taken.get(llm_id)
            if entry is None or entry.is_claimed:
                return
            entry.is_claimed = True
            if not loaded_tokens:  # its own cache has as much, in part of a page
                entry.load_pages, entry.is_load_due = 0, False
                if NULL_PAGE in block_ids[entry.done_pages :]:
                    # Pages that the worker lacks were dropped. Unclaimed, it hands over nothing.
                    del self._table.taken[llm_id]
                    return
            else:
                pages = -(-loaded_tokens // self._tokens_per_block)
                assert pages == entry.load_pages, f"{loaded_tokens} tokens, planned {pages} pages"
                assert len(block_ids) >= entry.first_page + entry.load_pages, "pages are missing"
                entry.block_ids, entry.is_aside = list(block_ids), True
                while entry.load_pages and block_ids[entry.first_page] == NULL_PAGE:
                    entry.first_page, entry.load_pages = entry.first_page + 1, entry.load_pages - 1
                self._due.append(entry)
            local, name = entry.local_tokens, entry.stage.request_id
        self._send(m.Claimed(name, local, loaded_tokens))

    def orders(self, new: Sequence[Any], cached: Sequence[Any]) -> Orders:
        asked, self._asked = self._asked, []
        orders = super().orders(new, cached)
        with self._lock:
            # For these vLLM had no pages. It asks again, and the worker may unstage meanwhile.
            for entry in asked:
                if not entry.is_claimed:
                    entry.is_load_due = False
            over = {id(entry): entry for entry in asked if entry.is_unstaged}
            entries = self._table.entries
            replies = [
                self._remove(entry)
                for entry in over.values()
                if entries.get(entry.stage.request_id) is entry
            ]
        for reply in replies:
            self._send(reply)
        return orders

    def knows(self, llm_ids: Iterable[LlmId]) -> list[LlmId]:
        """Of these requests the staged ones: only they are described in a step."""
        with self._lock:
            return [llm_id for llm_id in llm_ids if llm_id in self._table.taken]

    def _given(self, entry: Entry, block_ids: Sequence[int]) -> None:
        """All pages of a new or resumed request; a resumed one may have fewer than before."""
        entry.block_ids = list(block_ids)
        if NULL_PAGE in (unsaved := entry.block_ids[entry.done_pages :]):
            # Saved includes all leading pages, so it stops here.
            hole = entry.done_pages + unsaved.index(NULL_PAGE)
            entry.pages_max = min(entry.pages_max, hole)

    def _position(self, entry: Entry, data: StepData, is_new: bool) -> int:
        return data.position

    def finished(self, request: Any) -> bool:
        """False: vLLM may free the pages at once, since those being saved are pinned."""
        with self._lock:
            self._table.taken.pop(request.request_id, None)
        return False
