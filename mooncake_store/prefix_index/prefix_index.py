"""Prefix index: block key -> bitmap of the holders that have the block.

A holder is the DRAM or the SSD of a storage node. A lookup intersects the bitmaps of the prompt's
block keys in order. A holder leaves the result at the first block that it lacks, and its prefix
ends before this block. Most steps change nothing, because blocks of one prompt that were added
together share one bitmap object. A step to the same object costs one comparison of addresses.

The answer is a list of *index tuples* (Segment), one for each depth at which a holder leaves. It
can be read as an array (`blocks_by_number`) or by name (`match`).

The index is a replica of the directory's index, fed by events (event_feed.py), so it may be behind.
It is also bounded: beyond `blocks_max` keys the oldest key is forgotten. Late additions and
forgotten blocks make the index undercount, late removals make it overcount.

Every operation is short, whatever the size of the index. A dropped holder leaves a bit that lookups
mask out, and a removed key leaves an empty bitmap. Each change sweeps a few such keys. The number
of a holder is the position of its bit, and is reused only when no bitmap has the bit.

Not here: the slot of a block on its node (directory.py), the choice of a holder (the conductor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Segment = tuple[int, int]  # (depth, bitmap of the holders with at least `depth` blocks)
BlockCounts = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

FEW_BITS = 12  # up to this many holders are set one by one, which is faster than with a mask
STARTS_MAX, MASKS_MAX = 64, 512  # cached arrays; 8 KiB and 1 KiB each for 1,000 holders
SWEPT_PER_CHANGE = 4  # keys swept per changed key, while a sweep is needed
EMPTY_SHARE_MAX = 8  # a sweep starts when more than 1 in EMPTY_SHARE_MAX keys is empty
PAGE_KEYS = 512  # most keys in a page of KeyPages


@dataclass(slots=True, eq=False)
class NumberedHolder:
    """A holder with blocks, or a dropped holder while bitmaps still have its bit."""

    name: str
    number: int  # from 0, the lowest that was free
    bit: int  # 1 << number
    blocks: int = 0  # number of keys whose bitmap has the bit
    # A bitmap object before and after the last change for this holder; -1: none. If the next key
    # to change has the object `before`, it gets the object `after`. So keys share bitmap objects.
    before_add: int = -1
    after_add: int = -1
    before_remove: int = -1
    after_remove: int = -1


def numbers_in(bitmap: int) -> Iterator[int]:
    while bitmap:
        yield (bitmap & -bitmap).bit_length() - 1
        bitmap &= bitmap - 1


IN_BYTE = tuple(tuple(numbers_in(bitmap)) for bitmap in range(256))


class _Masks(dict[int, Mask]):
    """Cache: bitmap -> mask that selects its holders in an array of `size` elements."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __missing__(self, bitmap: int) -> Mask:
        if len(self) >= MASKS_MAX:
            self.clear()
        raw = np.frombuffer(bitmap.to_bytes(self.size // 8, "little"), np.uint8)
        self[bitmap] = np.unpackbits(raw, bitorder="little").view(np.bool_)
        return self[bitmap]


class _Starts(dict[Segment, BlockCounts]):
    """Cache: first index tuple of an answer -> its array. Most answers begin with the same
    tuple."""

    def __init__(self, masks: _Masks) -> None:
        self._masks = masks

    def __missing__(self, segment: Segment) -> BlockCounts:
        if len(self) >= STARTS_MAX:
            self.clear()
        depth, bitmap = segment
        self[segment] = np.where(self._masks[bitmap], np.int64(depth), np.int64(0))
        return self[segment]


class HolderNumbers:
    """Holders as small numbers, sets of holders as bitmaps, and bitmaps as numpy arrays.

    A holder gets the lowest free number, so bitmaps stay short while nodes join and leave. It keeps
    the number while a bitmap has its bit, even if it was dropped (`drop`).
    """

    def __init__(self) -> None:
        self.version = 0  # increases when a holder gets or loses its number
        self.clear()

    def clear(self) -> None:
        self.holders: dict[str, NumberedHolder] = {}  # name -> holder with blocks
        # Bit -> dropped holder whose bit is still in bitmaps.
        self.dropped: dict[int, NumberedHolder] = {}
        self.live = 0  # bitmap of all bits in `holders`
        # Number -> holder, live or dropped; None: free.
        self._by_number: list[NumberedHolder | None] = []
        self._changed()

    def new(self, name: str) -> NumberedHolder:
        if None not in self._by_number:
            self._by_number.append(None)
        number = self._by_number.index(None)
        holder = self._by_number[number] = NumberedHolder(name, number, 1 << number)
        self.holders[name] = holder
        self.live |= holder.bit
        self._changed()
        return holder

    def drop(self, name: str) -> None:
        """Drop a holder; its bit has no meaning from now on."""
        holder = self.holders.pop(name, None)
        if holder is not None:
            self.live ^= holder.bit
            self.dropped[holder.bit] = holder
            self._changed()

    def take_blocks(self, holder: NumberedHolder, blocks: int) -> None:
        """Count `blocks` fewer bitmaps with the holder's bit; without any, its number is free."""
        holder.blocks -= blocks
        if holder.blocks:
            return
        if self.dropped.pop(holder.bit, None) is None:
            del self.holders[holder.name]
            self.live ^= holder.bit
        self._by_number[holder.number] = None
        while self._by_number and self._by_number[-1] is None:
            self._by_number.pop()
        self._changed()

    def take_bits(self, bits: int, bitmaps: int) -> None:
        """Count `bitmaps` fewer bitmaps for each of these bits."""
        for number in numbers_in(bits):
            holder = self._by_number[number]
            assert holder is not None, f"a bitmap has bit {number}, which no holder has"
            self.take_blocks(holder, bitmaps)

    def number(self, name: str) -> int:
        """The number of a holder, from 0; -1 for a holder without blocks."""
        holder = self.holders.get(name)
        return -1 if holder is None else holder.number

    def name(self, number: int) -> str:
        holder = self._by_number[number] if 0 <= number < len(self._by_number) else None
        assert holder is not None and self.live & holder.bit, f"no holder has number {number}"
        return holder.name

    def blocks_by_number(self, found: Sequence[Segment]) -> BlockCounts:
        """The answer of PrefixIndex.find as an array: holder number -> leading blocks."""
        if not found:
            return np.zeros(self._size, np.int64)
        blocks = self._starts[found[0]].copy()
        for depth, bitmap in found[1:]:
            if bitmap < 256:
                for number in IN_BYTE[bitmap]:
                    blocks[number] = depth
            elif bitmap.bit_count() <= FEW_BITS:
                while bitmap:
                    number = bitmap.bit_length() - 1
                    blocks[number] = depth
                    bitmap ^= 1 << number
            else:
                blocks[self._masks[bitmap]] = depth
        return blocks

    def _changed(self) -> None:
        """Reset the cached arrays after a change of the numbers."""
        self.version += 1
        # Length of the arrays: a multiple of 8 above the highest number.
        self._size = (len(self._by_number) // 8 + 1) * 8
        self._masks = _Masks(self._size)
        self._starts = _Starts(self._masks)

    def check(self) -> None:
        numbered = {holder.bit: holder for holder in self.holders.values()}
        assert self.live == sum(numbered) and not numbered.keys() & self.dropped.keys()
        assert all(name == holder.name for name, holder in self.holders.items())
        numbered |= self.dropped
        listed = {h.bit: h for n, h in enumerate(self._by_number) if h and h.number == n}
        assert listed == numbered, "a free number has a holder"
        assert all(holder.blocks > 0 for holder in numbered.values()), "a number without blocks"
        assert not self._by_number or self._by_number[-1] is not None, "bitmaps are too long"


class KeyPages:
    """The keys of the index in order of insertion, in pages; 8 bytes per key.

    A dict keeps this order too, but cannot be iterated in parts while it changes. Finding its first
    key also takes longer after many deletions at its front. Here the oldest key is found at once,
    and a sweep continues at the page where the last sweep stopped.
    """

    def __init__(self) -> None:
        self._pages: list[list[bytes]] = []  # none of them empty
        self._next = 0  # index of the next page to sweep

    def __iter__(self) -> Iterator[bytes]:
        for page in self._pages:
            yield from page

    def extend(self, keys: list[bytes]) -> None:
        """Append keys, none of which may be in the pages already."""
        room = 0
        if self._pages:
            last = self._pages[-1]
            room = PAGE_KEYS - len(last)
            last += keys[:room] if len(keys) > room else keys
        for start in range(room, len(keys), PAGE_KEYS):
            self._pages.append(keys[start : start + PAGE_KEYS])

    def pop_oldest(self) -> bytes:
        key = self._pages[0].pop(0)
        if not self._pages[0]:
            del self._pages[0]
            self._next = max(0, self._next - 1)
        return key

    def pop_page(self) -> list[bytes]:
        """Remove and return the last page, with the newest keys; [] when no page is left."""
        return self._pages.pop() if self._pages else []

    def sweep(self, keep: Callable[[list[bytes]], list[bytes]]) -> int:
        """Reduce the next page to the keys that `keep` returns. Returns its earlier length."""
        pages = self._pages
        if not pages:
            return 0
        at = self._next if self._next < len(pages) else 0
        length = len(pages[at])
        kept = keep(pages[at])
        if at and len(pages[at - 1]) + len(kept) <= PAGE_KEYS:
            pages[at - 1] += kept
            kept = []
        if kept:
            pages[at] = kept
            at += 1
        else:
            del pages[at]
        self._next = at
        return length

    def check(self) -> None:
        assert all(0 < len(page) <= PAGE_KEYS for page in self._pages), "a page has a wrong length"
        keys = list(self)
        assert len(set(keys)) == len(keys), "a key is in two pages"


class PrefixIndex:
    def __init__(self, blocks_max: int = 4_000_000) -> None:
        assert blocks_max > 0
        self.blocks_max = blocks_max
        self._holders = HolderNumbers()
        # The last element of the array is 0, so index -1 (a holder without blocks) reads 0.
        self.blocks_by_number = self._holders.blocks_by_number
        self.number, self.name = self._holders.number, self._holders.name
        self._cleared: list[tuple[dict[bytes, int], KeyPages]] = []  # contents before `clear`
        self._start_over()

    def _start_over(self) -> None:
        self._bitmaps: dict[bytes, int] = {}  # block key -> bitmap of holders; 0: no holder is left
        self._get = self._bitmaps.get
        self._pages = KeyPages()  # the keys of _bitmaps, by age
        self._empty = 0  # keys with bitmap 0
        self._keys_to_sweep = 0  # keys still to sweep, see _sweep_after

    def __len__(self) -> int:
        """The number of keys with holders. A key whose holders are all dropped counts until a sweep
        reaches it."""
        return len(self._bitmaps) - self._empty

    def __contains__(self, key: bytes) -> bool:
        return bool(self._get(key, 0) & self._holders.live)

    @property
    def numbers_version(self) -> int:
        """While this value is unchanged, every holder keeps its number."""
        return self._holders.version

    # Changes

    def add_many(self, keys: Sequence[bytes], holder: str) -> None:
        """Add these blocks of a holder; known blocks are allowed. Fastest in a prompt's order."""
        owner = self._holders.holders.get(holder) or self._holders.new(holder)
        bitmaps, get, bit = self._bitmaps, self._get, owner.bit
        before, after = owner.before_add, owner.after_add
        owner.blocks += 1  # keeps the holder's number while its oldest blocks are forgotten
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
        self._holders.take_blocks(owner, 1 - added)
        self._sweep_after(len(keys))

    def remove_many(self, keys: Sequence[bytes], holder: str) -> None:
        """Remove these blocks of a holder. Unknown or forgotten blocks are allowed."""
        owner = self._holders.holders.get(holder)
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
        self._holders.take_blocks(owner, removed)
        self._sweep_after(len(keys))

    def drop_holder(self, holder: str) -> None:
        """Remove a holder with all its blocks, in constant time."""
        self._holders.drop(holder)

    def clear(self) -> None:
        """Empty the index at once. Later changes, or `sweep`, free the memory."""
        self._cleared.append((self._bitmaps, self._pages))
        self._holders.clear()
        self._start_over()

    def sweep(self, keys_max: int) -> bool:
        """Free dropped holders and removed keys, visiting about `keys_max` keys. Changes sweep too;
        this call is for idle moments. Returns False if nothing is left to free."""
        while keys_max > 0:
            if self._cleared:
                keys_max -= self._free_a_page()
            elif self._holders.dropped or self._empty:
                keys_max -= self._pages.sweep(self._kept)
            else:
                return False
        return True

    # Lookups

    def find(self, keys: Sequence[bytes]) -> list[Segment]:
        """The holders' prefix lengths of the prompt `keys`, as index tuples by ascending depth.

        Each bitmap is a subset of the bitmap before. A holder that is in one bitmap and not in the
        next has exactly `depth` leading blocks. The last tuple has the longest prefix. [] when no
        holder has the first block. Valid until the next change of the index.
        """
        alive = self._holders.live
        if not alive:
            return []
        found, depth, last = [], 0, -1
        for bitmap in map(self._get, keys):
            if bitmap is not last:
                if not bitmap:
                    break
                last, left = bitmap, alive & bitmap
                if left != alive:
                    if depth:
                        found.append((depth, alive))
                    if not left:
                        return found
                    alive = left
            depth += 1
        if depth:
            found.append((depth, alive))
        return found

    def names(self, bitmap: int) -> list[str]:
        """The names of the holders in a bitmap, in order of their numbers."""
        return [self._holders.name(number) for number in numbers_in(bitmap)]

    def holders(self, key: bytes) -> list[str]:
        """The names of the holders of this block, sorted."""
        return sorted(self.names(self._get(key, 0) & self._holders.live))

    def copies(self, key: bytes) -> int:
        """The number of holders of this block, without listing them."""
        return (self._get(key, 0) & self._holders.live).bit_count()

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """The number of leading blocks of the prompt `keys` per holder name; without zeros."""
        runs: dict[str, int] = {}
        for depth, bitmap in self.find(keys):
            runs.update(dict.fromkeys(self.names(bitmap), depth))
        return runs

    # Forgetting and sweeping

    def _forget_oldest(self) -> None:
        bitmap = self._bitmaps.pop(self._pages.pop_oldest())
        self._empty -= not bitmap
        self._holders.take_bits(bitmap, 1)

    def _sweep_after(self, changes: int) -> None:
        """Sweep a few keys per change, so that no change waits for a whole sweep."""
        is_dirty = self._empty * EMPTY_SHARE_MAX > len(self._bitmaps)
        if not (is_dirty or self._holders.dropped or self._cleared):
            self._keys_to_sweep = 0
            return
        self._keys_to_sweep += changes * SWEPT_PER_CHANGE
        if self._keys_to_sweep >= min(PAGE_KEYS, len(self._bitmaps)):
            self.sweep(self._keys_to_sweep)
            self._keys_to_sweep = 0

    def _free_a_page(self) -> int:
        bitmaps, pages = self._cleared[-1]
        for key in (page := pages.pop_page()):
            del bitmaps[key]
        if not bitmaps:
            self._cleared.pop()
        return max(1, len(page))

    def _kept(self, page: list[bytes]) -> list[bytes]:
        """The keys of a page that still have holders; clears the bits of dropped holders."""
        bitmaps, live, kept = self._bitmaps, self._holders.live, []
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
            self._holders.take_bits(bits, keys)
        return kept

    def check(self) -> None:
        self._pages.check()
        assert set(self._pages) == set(self._bitmaps), "the pages and the index have different keys"
        assert len(self._bitmaps) <= self.blocks_max
        assert self._empty == sum(not bitmap for bitmap in self._bitmaps.values())
        self._holders.check()
        bits = Counter(n for bitmap in self._bitmaps.values() for n in numbers_in(bitmap))
        holders = [*self._holders.holders.values(), *self._holders.dropped.values()]
        assert bits == {holder.number: holder.blocks for holder in holders}, "a count is wrong"
