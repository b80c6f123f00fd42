"""Who has which page of KV memory, and which pages still hold a prefix that can be reused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Cached:
    key: tuple[object, ...]  # (parent key, salt, tokens)
    block_id: int


class BlockManager:
    def __init__(self, blocks: int, tokens_per_block: int, is_reusing: bool) -> None:
        self.blocks = blocks
        self.per_block = tokens_per_block
        self._is_reusing = is_reusing
        self._free = list(range(blocks))
        random.Random(3).shuffle(self._free)  # ids come in no order, as after hours of service
        self._users: dict[int, int] = {}
        self._cached: dict[tuple[object, ...], int] = {}
        self._key_of: dict[int, tuple[object, ...]] = {}
        self.reused_blocks = self.missed_blocks = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def match(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        """Whole pages with these leading tokens, now used by the caller too; one token is left."""
        found: list[int] = []
        for key in self._keys(tokens[: len(tokens) - 1], salt):
            if key not in self._cached:
                break
            block_id = self._cached[key]
            if block_id not in self._users:
                self._free.remove(block_id)
            self._users[block_id] = self._users.get(block_id, 0) + 1
            found.append(block_id)
        self.reused_blocks += len(found)
        return found

    def partial_match(
        self, tokens: Sequence[int], salt: str | None, blocks: int
    ) -> tuple[int, int]:
        """(page, tokens of it) whose first tokens follow these `blocks` pages of a prompt."""
        keys = self._keys(tokens[: blocks * self.per_block], salt)
        parent = hash(keys[-1]) if keys else 0
        rest = list(tokens[blocks * self.per_block : len(tokens) - 1])
        best = (-1, 0)
        for key, block_id in self._cached.items():
            same = 0
            if key[0] == parent and key[1] == salt:
                for ours, theirs in zip(rest, key[2], strict=False):  # type: ignore[call-overload]
                    if ours != theirs:
                        break
                    same += 1
            if same > best[1]:
                best = (block_id, same)
        return best

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} pages of {len(self._free)} free ones"
        taken = [self._free.pop(0) for _ in range(count)]
        for block_id in taken:
            self._users[block_id] = 1
            self._forget(block_id)
        self.missed_blocks += count
        return taken

    def remember(self, block_ids: Sequence[int], tokens: Sequence[int], salt: str | None) -> None:
        """The whole pages of these tokens can be found by `match` from now on."""
        if not self._is_reusing:
            return
        for key, block_id in zip(self._keys(tokens, salt), block_ids, strict=False):
            if key not in self._cached:
                self._cached[key] = block_id
                self._key_of[block_id] = key

    def rebase(self, block_ids: list[int], tokens: Sequence[int], salt: str | None) -> None:
        """Replace full pages by equal ones of other requests, as manager V2 does. Its own are free
        then."""
        if not self._is_reusing:
            return
        for index, key in enumerate(self._keys(tokens, salt)[: len(block_ids)]):
            cached = self._cached.get(key)
            if cached is None or cached == block_ids[index]:
                continue
            if cached not in self._users:
                self._free.remove(cached)
            self._users[cached] = self._users.get(cached, 0) + 1
            own, block_ids[index] = block_ids[index], cached
            self.release([own])
            if own not in self._users:  # the next one to be given away
                self._free.remove(own)
                self._free.insert(0, own)

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._users[block_id] -= 1
            if not self._users[block_id]:
                del self._users[block_id]
                self._free.append(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._cached[key]

    def _keys(self, tokens: Sequence[int], salt: str | None) -> list[tuple[object, ...]]:
        keys: list[tuple[object, ...]] = []
        parent = 0
        for start in range(0, len(tokens) - self.per_block + 1, self.per_block):
            key = (parent, salt, tuple(tokens[start : start + self.per_block]))
            keys.append(key)
            parent = hash(key)
        return keys
