"""The connector's scheduler: what TensorRT-LLM need not compute, and what every rank copies.

Lives on rank 0. TensorRT-LLM asks `match` once per request while it allocates pages, from then on
it counts the matched tokens as computed: a promised load is ordered in the same iteration, even
if the worker has changed its mind meanwhile. Saves are ordered with the iteration that fills the
pages. Two threads: the executor's, and the channel's with stages; `_lock` guards the table.

Not every version calls `finished` for a cancelled or failed request: its pages may then be
another's in the very next pass, while they are still being saved. So the saves of a request that
is missing in a step, and has not been called finished, are waited for before that pass (a fence).

A large load is asynchronous: it runs beside the passes of the others, and TensorRT-LLM takes the
request up when every rank has called it loaded. Until then its pages are not given back.

Not here: TensorRT-LLM's classes (connector.py), copying (rank_copies.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.block_pages import Move, Orders
from backends.engine.trtllm.stages import Entry, Salt, StageTable, stage_problem


class RequestData(Protocol):
    """What this iteration computes of one request, as TensorRT-LLM says it."""

    request_id: int
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class StageScheduler:
    def __init__(
        self, block_tokens: int, tokens_per_block: int, send: Callable[[m.ToWorker], None],
        salt_id: Callable[[str], int] | None = None, aside_pages_min: int = 0,
    ) -> None:  # fmt: skip
        """`salt_id` is TensorRT-LLM's own: some versions show connectors only its result.

        Loads of `aside_pages_min` pages or more are asynchronous; 0: none are.
        """
        self._block_tokens = block_tokens
        self._tokens_per_block = tokens_per_block
        self._send = send
        self._salt_id = salt_id
        self._aside_pages_min = aside_pages_min
        self._aside: set[int] = set()  # TensorRT-LLM's ids, whose load was asynchronous
        self._table = StageTable(block_tokens, tokens_per_block)
        self._due: list[Entry] = []  # loads that were promised and not ordered
        self._saving: set[int] = set()  # TensorRT-LLM's ids, of whom saves were ordered
        self._lock = threading.Lock()

    # -- the channel's thread

    def on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Stage):
            problem = stage_problem(message, self._block_tokens) or self.add_checked(message)
            request_id = message.request_id
            self._send(m.Refused(request_id, problem) if problem else m.Staged(request_id))
        elif isinstance(message, m.Unstage):
            with self._lock:
                reply = self._unstage(message.request_id)
            if reply is not None:
                self._send(reply)

    def add_checked(self, stage: m.Stage) -> str:
        """Of a stage whose keys are right; why it cannot be kept, or nothing."""
        salt_id = None
        if stage.cache_salt and self._salt_id is not None:
            salt_id = self._salt_id(stage.cache_salt)
        with self._lock:
            return self._table.add(stage, salt_id)

    def _unstage(self, request_id: str) -> m.Unstaged | None:
        """None: when the load that was promised is ordered."""
        entry = self._table.get(request_id)
        if entry is None:
            return m.Unstaged(request_id, 0)
        entry.is_unstaged = True
        return None if entry.is_load_due else self._remove(entry)

    def _remove(self, entry: Entry) -> m.Unstaged:
        request_id = entry.stage.request_id
        self._table.remove(request_id)
        return m.Unstaged(request_id, entry.moves)

    # -- the executor's thread

    def match(self, request: Any, local_tokens: int) -> int:
        """Tokens beyond the local ones that need not be computed; at least one is left."""
        salt = _salt(request)
        if salt is None:
            return 0
        token_ids = request.get_tokens(0)
        size, tokens_per_block = len(token_ids), self._tokens_per_block
        with self._lock:
            entry = self._table.taken_by(request.request_id)
            if entry is not None:
                return 0  # asked again: what was promised first counts
            entry = self._table.take(request.request_id, token_ids, salt)
            if entry is None:
                return 0
            entry.local_tokens = local_tokens
            if local_tokens % tokens_per_block:
                return 0  # it would write into a page that has tokens already
            entry.first_page = local_tokens // tokens_per_block
            stop = min(entry.loaded_pages, (size - 1) // tokens_per_block)
            entry.load_pages = max(0, stop - entry.first_page)
            if entry.load_pages:
                entry.is_load_due = True
                self._due.append(entry)
                if 0 < self._aside_pages_min <= entry.load_pages:
                    entry.is_aside = True
                    self._aside.add(request.request_id)
            return entry.load_pages * tokens_per_block

    def is_aside(self, llm_id: int) -> bool:
        """Is what was promised to this request loaded beside the passes?"""
        with self._lock:
            return llm_id in self._aside

    def allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        with self._lock:
            entry = self._table.taken_by(request.request_id)
            if entry is None:
                return
            entry.given(block_ids, self._tokens_per_block)
            local, pages = entry.local_tokens, entry.load_pages
        loaded_tokens = pages * self._tokens_per_block
        self._send(m.Claimed(entry.stage.request_id, local, loaded_tokens))

    def orders(self, new: Sequence[RequestData], cached: Sequence[RequestData]) -> Orders:
        """Copies of this iteration: loads before it, saves of what it computes."""
        saves: list[Move] = []
        with self._lock:
            due, self._due = self._due, []
            loads = [entry.load() for entry in due]
            fences = self._fences(new, cached)
            for data in new:
                entry = self._table.taken_by(data.request_id)
                if entry is not None:
                    entry.given(data.new_block_ids, self._tokens_per_block)
                    loaded = entry.load_pages * self._tokens_per_block
                    # Versions differ in whether the position has the loaded tokens in it.
                    start = min(entry.local_tokens, data.computed_position) + loaded
                    self._computes(entry, start, data, saves)
            for data in cached:
                entry = self._table.taken_by(data.request_id)
                if entry is not None:
                    entry.block_ids += data.new_block_ids
                    self._computes(entry, data.computed_position, data, saves)
            self._saving.update(move.llm_id for move in saves)
            replies = [self._remove(entry) for entry in due if entry.is_unstaged]
        for reply in replies:
            self._send(reply)
        return Orders(loads, saves, fences)

    def _fences(self, new: Sequence[RequestData], cached: Sequence[RequestData]) -> list[int]:
        if not self._saving:
            return []
        missing = self._saving.difference([data.request_id for data in cached])
        missing.difference_update([data.request_id for data in new])
        self._saving -= missing
        return sorted(missing)

    def _computes(self, entry: Entry, start: int, data: RequestData, saves: list[Move]) -> None:
        prompt_tokens = entry.stage.token_count
        if entry.position >= prompt_tokens:
            # It generates: one token that is certain, whatever was drafted. The overlap scheduler
            # names the place before, which only means that a page is saved one iteration later.
            entry.position = max(entry.position, start + 1)
        elif start < entry.position:
            raise RuntimeError(
                f"TensorRT-LLM is at token {start} of a prompt that it should have computed up to "
                f"{entry.position}: pages may have been saved before they were computed"
            )
        elif not hasattr(data, "num_scheduled_tokens"):
            raise RuntimeError(
                "this TensorRT-LLM does not say how many tokens it computes: 1.2.0rc2 or later is "
                "needed"
            )
        else:
            entry.position = min(start + data.num_scheduled_tokens, prompt_tokens)
        move = entry.save(entry.position, self._tokens_per_block)
        if move is not None:
            saves.append(move)

    def finished(self, request: Any) -> bool:
        """Were copies ordered, so that its pages must stay until every rank has done them?"""
        llm_id = request.request_id
        with self._lock:
            self._saving.discard(llm_id)
            entry = self._table.finish(llm_id)
            may_load = llm_id in self._aside  # a request may be cancelled while it is loaded
            self._aside.discard(llm_id)
            return may_load or (entry is not None and entry.done_pages > entry.loaded_pages)

    def check(self) -> None:
        with self._lock:
            self._table.check()


def _salt(request: Any) -> Salt | None:
    """The request's cache salt, or None when its KV depends on more than tokens and a salt.

    What TensorRT-LLM hands in while it allocates is its C++ request, which may have less to read
    than later calls' and, depending on the version, the salt or only its number.
    """
    if getattr(request, "lora_task_id", None) is not None:
        return None
    if getattr(request, "multimodal_hashes", None) or getattr(
        request, "multimodal_positions", None
    ):
        return None
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is not None:
        return salt
    number: int | None = getattr(request, "cache_salt_id", None)
    return "" if number is None else number


assert sys.byteorder == "little", "token ids are compared as little-endian bytes"
