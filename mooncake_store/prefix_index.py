"""Which nodes have how much of a prompt's prefix: key -> bitmap of holders.

A lookup walks the request's keys and intersects the bitmaps. A holder drops out at the first block
that it lacks, and where it drops out is the length of its prefix. Most steps change nothing: the
blocks of one prompt came together, so they share one bitmap object, and runs of it are skipped at
the speed of C, however many holders there are. The answer is a list of *segments*, one for each
depth at which somebody drops out, and costs the same for 8 holders and for 1,000; who scores all
of them takes it as an array (`blocks_by_number`), who explains takes it by name (`match`).

It is a replica of the directory's index, fed by events (event_feed.py), so it may be behind. It is
bounded too: beyond `blocks_max` the block that was added first is forgotten. Both make it
undercount, which costs a recomputation at worst; overcounting would send requests after KV that is
not there.

Nothing here takes long, whatever is inside. A holder that is gone leaves a bit that no lookup looks
at, a removed key an empty bitmap; the pages of key_pages.py are swept of both, a few keys for each
change. A holder's number, the place of its bit, goes to another one only when no bitmap has it.

Not here: where in a node a block is (directory.py); which holder to prefer (the conductor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np

from mooncake_store.key_pages import PAGE_KEYS, KeyPages

Segment = tuple[int, int]  # (depth, bitmap of the holders that have at least so many blocks)
BlockCounts = np.ndarray[tuple[int], np.dtype[np.int64]]

SWEPT_PER_CHANGE = 4  # keys looked at for each one that changes, while there is something to sweep
EMPTY_SHARE_MAX = 8  # one key in so many may be empty before they are swept
FEW_BITS = 8  # set one by one, faster than as an array
STARTS_MAX = 256  # first segments whose arrays are kept


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a chain of keys is where."""

    blocks_by_holder: dict[str, int]  # longest run from the start; only holders that have block 0
    best_blocks: int
    best_holder: str | None  # of `best_blocks`; ties go to the smaller name; None without any hit
    union_blocks: int  # the run of blocks that are somewhere, not all in one place

    def blocks(self, holder: str) -> int:
        return self.blocks_by_holder.get(holder, 0)


class _Holder:
    """A node with blocks, or one that is gone while bitmaps still have its bit."""

    __slots__ = (
        "after_add", "after_remove", "before_add", "before_remove", "bit", "blocks", "name",
        "number",
    )  # fmt: skip

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.bit = 1 << number
        self.blocks = 0  # keys whose bitmap has the bit
        # The last change of a bitmap. The next key of a prompt has the same bitmap object before,
        # so it gets the same one after: that is how bitmaps are shared. -1 is none.
        self.before_add, self.after_add = -1, -1
        self.before_remove, self.after_remove = -1, -1


class PrefixIndex:
    def __init__(self, blocks_max: int = 4_000_000) -> None:
        assert blocks_max > 0
        self.blocks_max = blocks_max
        self.numbers_version = 0  # another one: holders may have other numbers
        self._cleared: list[tuple[dict[bytes, int], KeyPages]] = []  # to be freed bit by bit
        self._start_over()

    def _start_over(self) -> None:
        self._bitmaps: dict[bytes, int] = {}  # 0 for a key that nobody has any more
        self._get = self._bitmaps.get
        self._pages = KeyPages()  # its keys
        self._holders: dict[str, _Holder] = {}
        self._dropped: dict[int, _Holder] = {}  # bit -> gone, and still in bitmaps
        self._by_number: list[_Holder | None] = []  # of both
        self._live = 0  # the bits of _holders
        self._empty = 0  # keys with bitmap 0
        self._owed = 0  # keys to look at, see _sweep_after
        self._numbers_changed()

    def __len__(self) -> int:
        """Keys with holders. What only a dropped holder had counts until it is swept."""
        return len(self._bitmaps) - self._empty

    def __contains__(self, key: bytes) -> bool:
        return bool(self._get(key, 0) & self._live)

    # Changes

    def add(self, key: bytes, holder: str) -> None:
        self.add_many((key,), holder)

    def add_many(self, keys: Sequence[bytes], holder: str) -> None:
        """The holder has these blocks, perhaps had some before. Fastest in order of the chain."""
        owner = self._holders.get(holder) or self._new_holder(holder)
        bitmaps, get, bit = self._bitmaps, self._get, owner.bit
        before, after = owner.before_add, owner.after_add
        owner.blocks += 1  # stays while others are forgotten
        new: list[bytes] = []
        added = 0
        for key in keys:
            bitmap = get(key)
            if bitmap is before:
                bitmaps[key] = after
            elif not bitmap:
                if bitmap is None:
                    if len(bitmaps) >= self.blocks_max:
                        self._pages.extend(new)
                        owner.blocks += added
                        new, added = [], 0
                        self._forget_oldest()
                    new.append(key)
                else:
                    self._empty -= 1
                bitmaps[key] = bit
            elif bitmap & bit:
                continue
            else:
                before, after = bitmap, bitmap | bit
                bitmaps[key] = after
            added += 1
        owner.before_add, owner.after_add = before, after
        self._pages.extend(new)
        self._take_blocks(owner, 1 - added)
        self._sweep_after(len(keys))

    def remove(self, key: bytes, holder: str) -> None:
        self.remove_many((key,), holder)

    def remove_many(self, keys: Sequence[bytes], holder: str) -> None:
        """No error for what is not there: the index may have forgotten it."""
        owner = self._holders.get(holder)
        if owner is None:
            return
        bitmaps, get, bit = self._bitmaps, self._get, owner.bit
        before, after = owner.before_remove, owner.after_remove
        removed = 0
        for key in keys:
            bitmap = get(key, 0)
            if bitmap is before:
                bitmaps[key] = after
            elif bitmap == bit:
                bitmaps[key] = 0
                self._empty += 1
            elif bitmap & bit:
                before, after = bitmap, bitmap ^ bit
                bitmaps[key] = after
            else:
                continue
            removed += 1
        owner.before_remove, owner.after_remove = before, after
        self._take_blocks(owner, removed)
        self._sweep_after(len(keys))

    def drop_holder(self, holder: str) -> None:
        """The holder is gone with all it had. Takes no longer for a million blocks than for one."""
        owner = self._holders.pop(holder, None)
        if owner is not None:
            self._live ^= owner.bit
            self._dropped[owner.bit] = owner
            self._numbers_changed()

    def clear(self) -> None:
        """Empty at once; the memory comes back with the next changes, or by `sweep`."""
        self._cleared.append((self._bitmaps, self._pages))
        self._start_over()

    def sweep(self, keys_max: int) -> bool:
        """Free what is left of dropped holders and removed keys, looking at about so many keys.

        Changes do it by themselves; this is for idle moments. False when nothing is left.
        """
        while keys_max > 0:
            if self._cleared:
                keys_max -= self._free_a_page()
            elif self._dropped or self._empty:
                keys_max -= self._pages.sweep(self._kept)
            else:
                return False
        return True

    # Questions

    def find(self, keys: Sequence[bytes]) -> list[Segment]:
        """Who has how much of the chain `keys`, from its start.

        Segments by depth: each bitmap is a part of the one before it, and who is in it and not in
        the next one has exactly `depth` blocks. The last segment has the longest prefix. Empty
        when nobody has the first block. Good until the next change of the index.
        """
        alive = self._live
        if not alive or not keys:
            return []
        found: list[Segment] = []
        walk, depth_max = cast(Any, iter(keys)), len(keys)  # it knows how many are left
        for bitmap, _ in groupby(map(self._get, walk)):
            left = alive & bitmap if bitmap else 0
            if left != alive:
                depth = depth_max - walk.__length_hint__() - 1  # this run's first key is taken
                if depth:
                    found.append((depth, alive))
                if not left:
                    return found
                alive = left
        found.append((depth_max, alive))
        return found

    def blocks_by_number(self, found: Sequence[Segment]) -> BlockCounts:
        """`find` as an array: element n is how many leading blocks holder number n has.

        There is at least one element more than there are numbers, so number -1, which
        `number` gives to who has nothing, reads 0.
        """
        if not found:
            return np.zeros(8 * self._bitmap_bytes, np.int64)
        start = self._starts.get(found[0])
        blocks = self._new_start(found[0]) if start is None else start.copy()
        for depth, bitmap in found[1:]:
            if bitmap.bit_count() > FEW_BITS:
                blocks[self._mask(bitmap)] = depth
                continue
            while bitmap:
                number = bitmap.bit_length() - 1
                blocks[number] = depth
                bitmap ^= 1 << number
        return blocks

    def number(self, holder: str) -> int:
        """Small, from 0, the same while `numbers_version` is; -1 for a holder without blocks."""
        owner = self._holders.get(holder)
        return -1 if owner is None else owner.number

    def name(self, number: int) -> str:
        """The inverse of `number`, for a number that a holder has."""
        owner = self._by_number[number]
        assert owner is not None and self._live & owner.bit, f"nobody has number {number}"
        return owner.name

    def names(self, bitmap: int) -> list[str]:
        """Of the holders in a bitmap, in order of their numbers."""
        names = []
        while bitmap:
            names.append(self.name((bitmap & -bitmap).bit_length() - 1))
            bitmap &= bitmap - 1
        return names

    def holders(self, key: bytes) -> list[str]:
        """Who has this block, by name."""
        return sorted(self.names(self._get(key, 0) & self._live))

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """How much of the chain `keys`, from its start, each holder has, by name."""
        runs: dict[str, int] = {}
        depth, best = 0, None
        for depth, bitmap in self.find(keys):
            names = self.names(bitmap)
            runs.update(dict.fromkeys(names, depth))
            best = min(names)
        union = depth
        while union < len(keys) and keys[union] in self:
            union += 1
        return PrefixMatch(runs, depth, best, union)

    def _new_start(self, segment: Segment) -> BlockCounts:
        if len(self._starts) >= STARTS_MAX:
            self._starts.clear()
        depth, bitmap = segment
        self._starts[segment] = self._mask(bitmap).astype(np.int64) * depth
        return self._starts[segment].copy()

    def _mask(self, bitmap: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        raw = np.frombuffer(bitmap.to_bytes(self._bitmap_bytes, "little"), np.uint8)
        return np.unpackbits(raw, bitorder="little").view(np.bool_)

    # Numbers

    def _new_holder(self, name: str) -> _Holder:
        """With the lowest free number, so that bitmaps stay short while nodes come and go."""
        if None in self._by_number:
            owner = _Holder(name, self._by_number.index(None))
            self._by_number[owner.number] = owner
        else:
            owner = _Holder(name, len(self._by_number))
            self._by_number.append(owner)
        self._holders[name] = owner
        self._live |= owner.bit
        self._numbers_changed()
        return owner

    def _take_blocks(self, owner: _Holder, blocks: int) -> None:
        """So many keys fewer have its bit; after the last one its number is free again."""
        owner.blocks -= blocks
        if owner.blocks:
            return
        if self._dropped.pop(owner.bit, None) is None:
            del self._holders[owner.name]
            self._live ^= owner.bit
        self._by_number[owner.number] = None
        while self._by_number and self._by_number[-1] is None:
            self._by_number.pop()
        self._numbers_changed()

    def _numbers_changed(self) -> None:
        self.numbers_version += 1
        self._bitmap_bytes = len(self._by_number) // 8 + 1
        self._starts: dict[Segment, BlockCounts] = {}

    # Forgetting and sweeping

    def _forget_oldest(self) -> None:
        bitmap = self._bitmaps.pop(self._pages.pop_oldest())
        self._empty -= not bitmap
        self._take_bits(bitmap, 1)

    def _take_bits(self, bits: int, keys: int) -> None:
        """So many keys lost these bits."""
        while bits:
            number = bits.bit_length() - 1
            owner = self._by_number[number]
            assert owner is not None, f"a bitmap has bit {number}, which nobody has"
            self._take_blocks(owner, keys)
            bits ^= owner.bit

    def _sweep_after(self, changes: int) -> None:
        """Each change pays for a few keys of what there is to sweep, so no change pays for all."""
        is_dirty = self._empty * EMPTY_SHARE_MAX > len(self._bitmaps)
        if not (is_dirty or self._dropped or self._cleared):
            self._owed = 0
            return
        self._owed += changes * SWEPT_PER_CHANGE
        if self._owed >= min(PAGE_KEYS, len(self._bitmaps)):
            self.sweep(self._owed)
            self._owed = 0

    def _free_a_page(self) -> int:
        bitmaps, pages = self._cleared[-1]

        for key in (page := pages.pop_page()):
            del bitmaps[key]
        if not bitmaps:
            self._cleared.pop()
        return max(1, len(page))

    def _kept(self, page: list[bytes]) -> list[bytes]:
        """What stays of a page; the bits of dropped holders go."""
        bitmaps, live, kept = self._bitmaps, self._live, []
        gone: dict[int, int] = {}  # bits -> keys that lost them
        before, after = -1, -1
        for key in page:
            bitmap = bitmaps[key]
            if bitmap is not before:
                before, after = bitmap, bitmap & live
            if after:
                kept.append(key)
            else:
                del bitmaps[key]
            if after != before:
                if after:
                    bitmaps[key] = after
                gone[before ^ after] = gone.get(before ^ after, 0) + 1
            elif not after:
                self._empty -= 1
        for bits, keys in gone.items():
            self._take_bits(bits, keys)
        return kept

    def check(self) -> None:
        """Prove the invariants."""
        self._pages.check()
        assert set(self._pages) == set(self._bitmaps), "the pages list other keys"
        assert len(self._bitmaps) <= self.blocks_max
        assert self._empty == sum(not bitmap for bitmap in self._bitmaps.values())
        owners = {owner.bit: owner for owner in self._holders.values()}
        assert self._live == sum(owners) and not owners.keys() & self._dropped.keys()
        assert all(name == owner.name for name, owner in self._holders.items())
        owners |= self._dropped
        listed = {o.bit: o for n, o in enumerate(self._by_number) if o and o.number == n}
        assert listed == owners, "a number is free and somebody has it"
        counts = dict.fromkeys(owners, 0)
        for bitmap in self._bitmaps.values():
            while bitmap:
                bit = bitmap & -bitmap
                counts[bit] += 1
                bitmap ^= bit
        assert counts == {bit: owner.blocks for bit, owner in owners.items()}, "a count is wrong"
        assert all(counts.values()), "a holder without blocks keeps a number"
