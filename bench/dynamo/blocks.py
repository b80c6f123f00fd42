"""The KV blocks of one worker of Dynamo's engine: physical copies, held or idle, LRU.

A full block of a prompt has a block key (its tokens and its whole prefix). It can be hit while it
is held and, after release, until its memory is needed. Two prompts that compute the same block at
the same time make two copies. A held block is never evicted. Released full blocks join the end of
the eviction queue, the deepest first; partial blocks are free at once.

Generated blocks get a unique number as their key. Only the sequence that generated them looks them
up, after it was preempted; for all others they only occupy memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

PARTIAL = -1  # no key: freed on release

Key = bytes | int  # key of a prompt's block, or a unique number
# (key, is_there): the first copy of a key was added, or its last one removed
Watcher = Callable[[Key, bool], None]


class BlockPool:
    def __init__(self, blocks: int, watcher: Watcher | None = None) -> None:
        assert blocks > 0
        self.blocks = blocks
        self._watcher = watcher
        self._keys: list[Key] = [PARTIAL] * blocks
        self._holds = [0] * blocks
        self._free = list(range(blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._copies: dict[Key, dict[int, None]] = {}  # key -> its blocks, oldest first

    @property
    def room(self) -> int:
        """Blocks without a holder: free ones, and idle ones that can be evicted."""
        return len(self._free) + len(self._idle)

    def hits(self, keys: Sequence[Key]) -> list[int]:
        """One cached block for each leading key that has one."""
        found = []
        for key in keys:
            copies = self._copies.get(key)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def held(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are held already."""
        return sum(self._holds[block] > 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._holds[block]:
                del self._idle[block]
            self._holds[block] += 1

    def take(self, key: Key) -> int:
        """A block for new contents, held once; evicts the least recently released one if needed."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holds[block] = 1
        self._name(block, key)
        return block

    def fill(self, block: int, key: Key) -> None:
        """A held partial block became full, and can be found by its key."""
        assert self._holds[block] and self._keys[block] == PARTIAL
        self._name(block, key)

    def release(self, blocks: Sequence[int]) -> None:
        """Release a chain, root first in `blocks`; its deepest block will be evicted first."""
        for block in reversed(blocks):
            self._holds[block] -= 1
            assert self._holds[block] >= 0, f"block {block} was released too often"
            if self._holds[block]:
                continue
            if self._keys[block] == PARTIAL:
                self._free.append(block)
            else:
                self._idle[block] = None

    def _name(self, block: int, key: Key) -> None:
        self._keys[block] = key
        if key == PARTIAL:
            return
        copies = self._copies.get(key)
        if copies is not None:
            copies[block] = None
            return
        self._copies[key] = {block: None}
        if self._watcher is not None:
            self._watcher(key, True)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key == PARTIAL:
            return
        copies = self._copies[key]
        del copies[block]
        if not copies:
            del self._copies[key]
            if self._watcher is not None:
                self._watcher(key, False)

    def check(self) -> None:
        held = {block for block, holds in enumerate(self._holds) if holds}
        groups = (held, set(self._idle), set(self._free))
        assert sum(map(len, groups)) == self.blocks == len(set().union(*groups))
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert all(self._keys[block] != PARTIAL for block in self._idle)
        listed = {block: key for key, copies in self._copies.items() for block in copies}
        named = {b: k for b, k in enumerate(self._keys) if k != PARTIAL and b not in groups[2]}
        assert listed == named, "the blocks of a key are not those that carry it"
