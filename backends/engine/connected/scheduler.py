"""The connector's scheduler: which tokens the engine need not compute, and what every rank copies.

It runs in the process that schedules the engine's steps. The engine asks for each request which
tokens it need not compute, and counts these tokens as computed from then on. So a promised load is
ordered in any case, even if the worker unstages the request first. A save is ordered together with
the pass that fills its pages.

A request takes the oldest stage with all of its tokens and its cache salt. Comparing tokens takes
half the time of hashing them, and the engine may hold a lock meanwhile. So a stage's keys are
checked against its tokens once, when the stage arrives.

Two threads: the engine's calls and the channel's stages. `_lock` guards the table.

Not here: the classes of an engine (the folder of that engine), the copies (rank_copies.py).
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import LlmId, Move, Orders, SlotUse
from backends.engine.connected.messages import Stage
from mooncake_store.block_keys import TOKEN_BYTES, block_keys, unpacked_tokens

assert sys.byteorder == "little", "token ids are compared as little-endian bytes"
TAIL_BYTES = 16 * TOKEN_BYTES  # prompts differ at the end more often than at the start
Salt = str | int  # of a request: its cache salt, or the engine's number for the salt


class StageScheduler(ABC):
    saves_tail = False  # True: a prompt's last page is saved although it is partly filled

    def __init__(
        self,
        block_tokens: int,
        tokens_per_block: int,
        send: Callable[[m.ToWorker], None],
        aside_pages_min: int = 0,
    ) -> None:
        """Loads of at least `aside_pages_min` pages run beside the passes; 0: none."""
        self._block_tokens = block_tokens
        self._tokens_per_block = tokens_per_block
        self._send = send
        self._aside_pages_min = aside_pages_min
        self._aside: set[LlmId] = set()  # requests that are loaded beside the passes
        self._table = StageTable(block_tokens, tokens_per_block)
        self._due: list[Entry] = []  # loads that were promised and not yet ordered
        self._lock = threading.Lock()

    @abstractmethod
    def _position(self, entry: Entry, data: Any, is_new: bool) -> int:
        """The tokens of this request that are computed after the pass. Called with the lock."""

    def _salts(self, cache_salt: str) -> tuple[Salt, ...]:
        """All forms in which the engine may show this salt."""
        return (cache_salt,)

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
        """Add a stage with correct keys. Returns the problem, or an empty string."""
        salts = self._salts(stage.cache_salt)
        with self._lock:
            return self._table.add(stage, salts, self.saves_tail)

    def _unstage(self, request_id: str) -> m.Unstaged | None:
        """None: the reply follows when the promised load is ordered."""
        entry = self._table.entries.get(request_id)
        if entry is None:
            return m.Unstaged(request_id, 0)
        entry.is_unstaged = True
        return None if entry.is_load_due else self._remove(entry)

    def _remove(self, entry: Entry) -> m.Unstaged:
        request_id = entry.stage.request_id
        self._table.remove(request_id)
        return m.Unstaged(request_id, entry.moves)

    # -- the engine's thread

    def promise(
        self, llm_id: LlmId, token_ids: Sequence[int], salt: Salt, local_tokens: int
    ) -> int:
        """Tokens after the local ones that are loaded, in whole pages. One token is left over."""
        tokens_per_block = self._tokens_per_block
        with self._lock:
            if (known := self._table.taken.get(llm_id)) is not None:
                return self._asked_again(known, local_tokens)
            entry = self._table.take(llm_id, token_ids, salt)
            if entry is None:
                return 0
            entry.local_tokens = local_tokens
            if local_tokens % tokens_per_block:
                return 0  # a load would write into a page that has tokens
            entry.first_page = local_tokens // tokens_per_block
            stop = min(entry.loaded_pages, (len(token_ids) - 1) // tokens_per_block)
            entry.load_pages = max(0, stop - entry.first_page)
            if entry.load_pages:
                entry.is_load_due = True
                self._due.append(entry)
                if 0 < self._aside_pages_min <= entry.load_pages:
                    entry.is_aside = True
                    self._aside.add(llm_id)
            return entry.load_pages * tokens_per_block

    def _asked_again(self, entry: Entry, local_tokens: int) -> int:
        """As `promise`. The first promise counts. Called with the lock."""
        return 0

    def is_aside(self, llm_id: LlmId) -> bool:
        """True if the promised load of this request runs beside the passes."""
        with self._lock:
            return llm_id in self._aside

    def allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        """The engine has allocated these pages for the prompt."""
        with self._lock:
            entry = self._table.taken.get(request.request_id)
            if entry is None:
                return
            self._given(entry, block_ids)
            if entry.is_claimed:
                return
            entry.is_claimed = True
            local, pages = entry.local_tokens, entry.load_pages
        loaded_tokens = pages * self._tokens_per_block
        self._send(m.Claimed(entry.stage.request_id, local, loaded_tokens))

    def orders(self, new: Sequence[Any], cached: Sequence[Any]) -> Orders:
        """The copies of the next pass: loads before it, saves of the pages that it fills.

        `new` describes requests that are in a pass for the first time, `cached` the others. Both
        have a request_id and new_block_ids, the pages since the last description.
        """
        saves: list[Move] = []
        with self._lock:
            due = self._take_due(new)
            loads = [entry.load() for entry in due]
            for is_new, requests in ((True, new), (False, cached)):
                for data in requests:
                    entry = self._table.taken.get(data.request_id)
                    if entry is None:
                        continue
                    if is_new:
                        self._given(entry, data.new_block_ids)
                    else:
                        entry.block_ids += data.new_block_ids
                    entry.position = self._position(entry, data, is_new)
                    move = entry.save(entry.position, self._tokens_per_block)
                    if move is not None:
                        saves.append(move)
            replies = [self._remove(entry) for entry in due if entry.is_unstaged]
        for reply in replies:
            self._send(reply)
        return Orders(loads, saves, [])

    def _take_due(self, new: Sequence[Any]) -> list[Entry]:
        """The promised loads that are ordered with this step. Called with the lock."""
        due, self._due = self._due, []
        return due

    def _given(self, entry: Entry, block_ids: Sequence[int]) -> None:
        """The first pages of a request, among them all that are loaded."""
        assert len(block_ids) >= entry.first_page + entry.load_pages, "pages to load are missing"
        entry.block_ids = list(block_ids)

    def finished(self, request: Any) -> bool:
        """True if the request's pages must stay until every rank has finished its copies."""
        llm_id = request.request_id
        with self._lock:
            entry = self._table.taken.pop(llm_id, None)
            may_load = llm_id in self._aside  # a request may be cancelled during its load
            self._aside.discard(llm_id)
            return may_load or (entry is not None and entry.done_pages > entry.loaded_pages)

    def check(self) -> None:
        with self._lock:
            self._table.check()


@dataclass(slots=True, eq=False)
class Entry:
    """One stage, and the engine's request that has taken it."""

    stage: Stage
    loaded_pages: int  # pages of the engine that were on the host when the prompt was staged
    pages_max: int  # pages of the engine that have room on the host
    pages_per_block: int
    salts: tuple[Salt, ...]  # all forms in which the engine may show the salt
    llm_id: LlmId | None = None  # None: not yet taken
    block_ids: list[int] = field(default_factory=list)  # the engine's pages
    local_tokens: int = 0  # found in the engine's own prefix cache
    first_page: int = 0  # of the pages to load
    load_pages: int = 0
    is_load_due: bool = False  # promised and not yet ordered
    is_aside: bool = False  # the load runs beside the passes
    saves_tail: bool = False  # the last page of the prompt is saved although it is partly filled
    is_claimed: bool = False  # the worker knows what is loaded
    is_unstaged: bool = False
    done_pages: int = 0  # pages on the host, or ordered to be saved there
    position: int = 0  # tokens computed after the newest pass
    moves: int = 0  # ordered so far

    def load(self) -> Move:
        """The order for the promised load."""
        self.is_load_due = False
        return self._move(self.first_page, self.first_page + self.load_pages, self.is_aside)

    def save(self, computed_tokens: int, tokens_per_block: int) -> Move | None:
        """The order for the pages that the pass fills; None: no further page."""
        last = self.stage.saved_tokens_max
        if self.saves_tail and 0 < last <= computed_tokens:
            computed_tokens = -(-last // tokens_per_block) * tokens_per_block
        full = min(computed_tokens // tokens_per_block, self.pages_max, len(self.block_ids))
        if full <= self.done_pages or self.is_unstaged:
            return None
        move = self._move(self.done_pages, full)
        self.done_pages = full
        return move

    def _move(self, first: int, stop: int, is_aside: bool = False) -> Move:
        assert self.llm_id is not None, f"no request has taken {self.stage.request_id}"
        self.moves += 1
        stage, pages = self.stage, self.block_ids[first:stop]
        uses: tuple[SlotUse, ...] = ()
        if stage.uses:
            low, high = first // self.pages_per_block, -(-stop // self.pages_per_block)
            uses = tuple([use for use in stage.uses if low <= use.block < high])
        return Move(stage.request_id, self.llm_id, first, pages, stage.places, is_aside, uses)


def stage_problem(stage: Stage, block_tokens: int) -> str:
    """Why this stage cannot be used, or an empty string. Slow, because it hashes."""
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
        self.entries: dict[str, Entry] = {}
        # Stages that no request has taken, by length and last tokens of the prompt.
        self._free: dict[tuple[int, bytes], deque[Entry]] = {}
        self._lengths: dict[int, int] = {}  # number of these stages, by length of the prompt
        self.taken: dict[LlmId, Entry] = {}  # until the engine finishes the request

    def add(self, stage: Stage, salts: tuple[Salt, ...], saves_tail: bool = False) -> str:
        """Returns the problem, or an empty string."""
        if stage.request_id in self.entries:
            return f"{stage.request_id} is staged already"
        loaded = stage.loaded_tokens // self._tokens_per_block
        pages_max = len(stage.places) * self._pages_per_block
        if stage.saved_tokens_max:
            last = stage.saved_tokens_max + (self._tokens_per_block - 1 if saves_tail else 0)
            pages_max = min(pages_max, last // self._tokens_per_block)
        entry = Entry(stage, loaded, pages_max, self._pages_per_block, salts, done_pages=loaded)
        entry.saves_tail = saves_tail
        self.entries[stage.request_id] = entry
        self._free.setdefault(_key_of(stage), deque()).append(entry)
        self._lengths[stage.token_count] = self._lengths.get(stage.token_count, 0) + 1
        return ""

    def take(self, llm_id: LlmId, token_ids: Sequence[int], salt: Salt) -> Entry | None:
        """The oldest stage of exactly these tokens that no request has taken."""
        count = len(token_ids)
        if count not in self._lengths:
            return None
        try:
            packed = array("I", token_ids).tobytes()
        except (OverflowError, TypeError):  # placeholders of multimodal inputs; never staged
            return None
        for entry in self._free.get((count, packed[-TAIL_BYTES:]), ()):
            if salt in entry.salts and entry.stage.token_ids == packed:
                return self._take(entry, llm_id)
        return None

    def take_named(self, llm_id: LlmId, request_id: str, token_count: int) -> Entry | None:
        """The stage of this request of the worker, if no request of the engine has taken it."""
        entry = self.entries.get(request_id)
        if entry is None or entry.llm_id is not None or entry.stage.token_count != token_count:
            return None
        return self._take(entry, llm_id)

    def _take(self, entry: Entry, llm_id: LlmId) -> Entry:
        self._leave(entry)
        entry.llm_id = llm_id
        self.taken[llm_id] = entry
        return entry

    def remove(self, request_id: str) -> None:
        entry = self.entries.pop(request_id)
        if entry.llm_id is None:
            self._leave(entry)
        elif self.taken.get(entry.llm_id) is entry:
            del self.taken[entry.llm_id]

    def check(self) -> None:
        free = [entry for waiting in self._free.values() for entry in waiting]
        assert all(self._free.values()), "an empty queue of stages is kept"
        assert all(entry.llm_id is None for entry in free), "a stage was taken twice"
        assert len(free) == sum(self._lengths.values()), "lengths and stages disagree"
        assert len(free) + len(self.taken) <= len(self.entries), "a removed stage is in use"

    def _leave(self, entry: Entry) -> None:
        key, count = _key_of(entry.stage), entry.stage.token_count
        self._free[key].remove(entry)
        if not self._free[key]:
            del self._free[key]
        self._lengths[count] -= 1
        if not self._lengths[count]:
            del self._lengths[count]


def _key_of(stage: Stage) -> tuple[int, bytes]:
    return stage.token_count, stage.token_ids[-TAIL_BYTES:]
