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

`StageTable` has the prompts that were staged, and which of TensorRT-LLM's requests took which. A
request is recognised by all of its tokens and its cache salt, compared with the staged ones.
That is what the keys say too (they are checked against the tokens when a stage arrives), and
comparing takes about half of the time of hashing: this happens while TensorRT-LLM holds the lock of
its own prefix tree. Equal prompts each have a stage of their own and are handed out in order.

Not here: TensorRT-LLM's classes (connector.py), copying (rank_copies.py).
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.block_pages import Move, Orders, SlotUse
from backends.engine.trtllm.messages import Stage
from mooncake_store.block_keys import TOKEN_BYTES, block_keys, unpacked_tokens


class RequestData(Protocol):
    """What this iteration computes of one request, as TensorRT-LLM says it."""

    request_id: int
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class StageScheduler:
    def __init__(
        self,
        block_tokens: int,
        tokens_per_block: int,
        send: Callable[[m.ToWorker], None],
        salt_id: Callable[[str], int] | None = None,
        aside_pages_min: int = 0,
    ) -> None:
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


TAIL_BYTES = 16 * TOKEN_BYTES  # prompts differ at the end more often than at the start
Place = tuple[int, bytes]  # a prompt's length and last tokens
Salt = str | int  # the request's, or the number that TensorRT-LLM makes of it


@dataclass(slots=True, eq=False)
class Entry:
    """One stage, and the request of TensorRT-LLM that took it."""

    stage: Stage
    loaded_pages: int  # on the host from the start; whole pages of TensorRT-LLM
    pages_max: int  # that there is room for on the host
    pages_per_block: int
    salt_id: int | None  # the number that TensorRT-LLM makes of its salt; None: unknown
    llm_id: int | None = None
    block_ids: list[int] = field(default_factory=list)
    local_tokens: int = 0
    first_page: int = 0  # of those to load
    load_pages: int = 0
    is_load_due: bool = False  # promised, not ordered yet: must happen whatever comes
    is_aside: bool = False  # its load runs beside the passes, which do not have it meanwhile
    is_unstaged: bool = False
    done_pages: int = 0  # on the host, or ordered to be saved there
    position: int = 0  # tokens that the newest iteration has computed
    moves: int = 0  # ordered so far

    def is_for(self, packed: bytes, salt: Salt) -> bool:
        own = self.stage.cache_salt if isinstance(salt, str) else self.salt_id
        return own == salt and self.stage.token_ids == packed

    def given(self, block_ids: Sequence[int], tokens_per_block: int) -> None:
        """Pages for all of the prompt, at once: what was promised is based on it."""
        if len(block_ids) * tokens_per_block < self.stage.token_count:
            raise RuntimeError(
                f"TensorRT-LLM gave {len(block_ids)} pages of {tokens_per_block} tokens for a "
                f"prompt of {self.stage.token_count} at first: its KV cache manager V2 is not "
                "supported"
            )
        self.block_ids = list(block_ids)

    def load(self) -> Move:
        """The order for what was promised."""
        self.is_load_due = False
        self.moves += 1
        return self._move(self.first_page, self.first_page + self.load_pages, self.is_aside)

    def save(self, computed_tokens: int, tokens_per_block: int) -> Move | None:
        """The order for pages that are full after this iteration, if there are new ones."""
        full = min(computed_tokens // tokens_per_block, self.pages_max, len(self.block_ids))
        if full <= self.done_pages or self.is_unstaged:
            return None
        move = self._move(self.done_pages, full)
        self.done_pages = full
        self.moves += 1
        return move

    def _move(self, first: int, stop: int, is_aside: bool = False) -> Move:
        assert self.llm_id is not None, f"{self.stage.request_id} belongs to no request"
        stage, pages = self.stage, self.block_ids[first:stop]
        uses: tuple[SlotUse, ...] = ()
        if stage.uses:
            low, high = first // self.pages_per_block, -(-stop // self.pages_per_block)
            uses = tuple([use for use in stage.uses if low <= use.block < high])
        return Move(stage.request_id, self.llm_id, first, pages, stage.places, is_aside, uses)


def stage_problem(stage: Stage, block_tokens: int) -> str:
    """Why this stage cannot be used; slow (it hashes), and needs no lock."""
    tokens = stage.token_count
    if len(stage.token_ids) % TOKEN_BYTES or not tokens:
        return f"{len(stage.token_ids)} bytes of token ids are no prompt"
    keys = block_keys(unpacked_tokens(stage.token_ids), block_tokens, stage.chain_seed)
    if keys != stage.keys:
        return "its keys are not those of its tokens"
    if not 0 <= stage.loaded_tokens <= min(tokens, len(stage.places) * block_tokens):
        return f"{stage.loaded_tokens} tokens cannot be loaded from {len(stage.places)} places"
    return ""


class StageTable:
    def __init__(self, block_tokens: int, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._pages_per_block = block_tokens // tokens_per_block
        self._entries: dict[str, Entry] = {}
        self._free: dict[Place, deque[Entry]] = {}  # not taken yet
        self._lengths: dict[int, int] = {}  # of those prompts, with how many there are
        self._taken: dict[int, Entry] = {}  # by TensorRT-LLM's id

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, stage: Stage, salt_id: int | None = None) -> str:
        """Why not, or nothing."""
        if stage.request_id in self._entries:
            return f"{stage.request_id} is staged already"
        loaded = stage.loaded_tokens // self._tokens_per_block
        pages_max = len(stage.places) * self._pages_per_block
        if stage.saved_tokens_max:
            pages_max = min(pages_max, stage.saved_tokens_max // self._tokens_per_block)
        entry = Entry(stage, loaded, pages_max, self._pages_per_block, salt_id, done_pages=loaded)
        self._entries[stage.request_id] = entry
        self._free.setdefault(_place(stage), deque()).append(entry)
        self._lengths[stage.token_count] = self._lengths.get(stage.token_count, 0) + 1
        return ""

    def take(self, llm_id: int, token_ids: Sequence[int], salt: Salt) -> Entry | None:
        """The oldest stage of exactly these tokens that nobody has taken."""
        count = len(token_ids)
        if count not in self._lengths:
            return None
        try:
            packed = array("I", token_ids).tobytes()
        except (OverflowError, TypeError):  # multimodal placeholders: nothing that we staged
            return None
        for entry in self._free.get((count, packed[-TAIL_BYTES:]), ()):
            if entry.is_for(packed, salt):
                self._leave(entry)
                entry.llm_id = llm_id
                self._taken[llm_id] = entry
                return entry
        return None

    def taken_by(self, llm_id: int) -> Entry | None:
        return self._taken.get(llm_id)

    def finish(self, llm_id: int) -> Entry | None:
        """TensorRT-LLM is done with its request; the stage stays until it is removed."""
        return self._taken.pop(llm_id, None)

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        if entry.llm_id is None:
            self._leave(entry)
        elif self._taken.get(entry.llm_id) is entry:
            del self._taken[entry.llm_id]

    def check(self) -> None:
        free = [entry for waiting in self._free.values() for entry in waiting]
        assert all(self._free.values()), "an empty queue of stages is kept"
        assert all(entry.llm_id is None for entry in free), "a taken stage is handed out again"
        assert len(free) == sum(self._lengths.values()), "lengths and stages disagree"
        assert len(free) + len(self._taken) <= len(self._entries), "a removed stage is remembered"

    def _leave(self, entry: Entry) -> None:
        place, count = _place(entry.stage), entry.stage.token_count
        self._free[place].remove(entry)
        if not self._free[place]:
            del self._free[place]
        self._lengths[count] -= 1
        if not self._lengths[count]:
            del self._lengths[count]


def _place(stage: Stage) -> Place:
    return stage.token_count, stage.token_ids[-TAIL_BYTES:]
