"""Prompts that were staged, and which of TensorRT-LLM's requests took which of them.

A request is recognised by all of its tokens and its cache salt, compared with the staged ones.
That is what the keys say too (they are checked against the tokens when a stage arrives), and
comparing takes about half of the time of hashing: this happens while TensorRT-LLM holds the lock of
its own prefix tree. Equal prompts each have a stage of their own and are handed out in order.

Pure, except that it checks keys. scheduler.py holds the lock around it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.engine.trtllm.block_pages import Move
from backends.engine.trtllm.messages import Stage
from mooncake_store.block_keys import TOKEN_BYTES, block_keys, unpacked_tokens

TAIL_BYTES = 16 * TOKEN_BYTES  # prompts differ at the end more often than at the start
Place = tuple[int, bytes]  # a prompt's length and last tokens
Salt = str | int  # the request's, or the number that TensorRT-LLM makes of it


@dataclass(slots=True, eq=False)
class Entry:
    """One stage, and the request of TensorRT-LLM that took it."""

    stage: Stage
    loaded_pages: int  # in the pool from the start; whole pages of TensorRT-LLM
    pages_max: int  # that there is room for in the pool
    salt_id: int | None  # the number that TensorRT-LLM makes of its salt; None: unknown
    llm_id: int | None = None
    block_ids: list[int] = field(default_factory=list)
    local_tokens: int = 0
    first_page: int = 0  # of those to load
    load_pages: int = 0
    is_load_due: bool = False  # promised, not ordered yet: must happen whatever comes
    is_aside: bool = False  # its load runs beside the passes, which do not have it meanwhile
    is_unstaged: bool = False
    done_pages: int = 0  # in the pool, or ordered to be saved there
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
        pages = self.block_ids[first:stop]
        return Move(self.stage.request_id, self.llm_id, first, pages, self.stage.pages, is_aside)


def stage_problem(stage: Stage, block_tokens: int) -> str:
    """Why this stage cannot be used; slow (it hashes), and needs no lock."""
    tokens = stage.token_count
    if len(stage.token_ids) % TOKEN_BYTES or not tokens:
        return f"{len(stage.token_ids)} bytes of token ids are no prompt"
    keys = block_keys(unpacked_tokens(stage.token_ids), block_tokens, stage.chain_seed)
    if keys != stage.keys:
        return "its keys are not those of its tokens"
    if not 0 <= stage.loaded_tokens <= min(tokens, len(stage.pages) * block_tokens):
        return f"{stage.loaded_tokens} tokens cannot be loaded from {len(stage.pages)} pages"
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
        pages_max = len(stage.pages) * self._pages_per_block
        entry = Entry(stage, loaded, pages_max, salt_id, done_pages=loaded)
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
