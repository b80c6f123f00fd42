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
at, a removed key an empty bitmap; the pages of keys are swept of both, a few keys for each
change. A holder's number, the position of its bit, goes to another one only when no bitmap has it.

Not here: where in a node a block is (directory.py); which holder to prefer (the conductor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Segment = tuple[int, int]  # (depth, bitmap of the holders that have at least so many blocks)
BlockCounts = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

FEW_BITS = 12  # are set one by one, faster than through a new mask
STARTS_MAX, MASKS_MAX = 64, 512  # arrays that are kept; of 8 KiB and 1 KiB for 1,000 holders
SWEPT_PER_CHANGE = 4  # keys looked at for each one that changes, while there is something to sweep
EMPTY_SHARE_MAX = 8  # one key in so many may be empty before they are swept
PAGE_KEYS = 512


class NumberedHolder:
    """A node with blocks, or one that is gone while bitmaps still have its bit."""

    __slots__ = (
        "after_add",
        "after_remove",
        "before_add",
        "before_remove",
        "bit",
        "blocks",
        "name",
        "number",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.bit = 1 << number
        self.blocks = 0  # keys whose bitmap has the bit
        # The last change of a bitmap. The next key of a prompt has the same bitmap object before,
        # so it gets the same one after: that is how bitmaps are shared. -1 is none.
        self.before_add, self.after_add = -1, -1
        self.before_remove, self.after_remove = -1, -1


def numbers_in(bitmap: int) -> Iterator[int]:
    while bitmap:
        yield (bitmap & -bitmap).bit_length() - 1
        bitmap &= bitmap - 1


IN_BYTE = tuple(tuple(numbers_in(bitmap)) for bitmap in range(256))


class _Masks(dict[int, Mask]):
    """By bitmap: what picks its holders' elements out of an array of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __missing__(self, bitmap: int) -> Mask:
        if len(self) >= MASKS_MAX:
            self.clear()
        raw = np.frombuffer(bitmap.to_bytes(self.size // 8, "little"), np.uint8)
        self[bitmap] = np.unpackbits(raw, bitorder="little").view(np.bool_)
        return self[bitmap]


class _Starts(dict[Segment, BlockCounts]):
    """By first segment: its array. Nearly all prompts begin with the same one."""

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

    A holder has the lowest number that is free, so bitmaps stay short while nodes come and go, and
    keeps it as long as a bitmap has its bit: also when it is gone with all it had (`drop`), until
    the owner of the bitmaps has swept them (`take_bits`).
    """

    def __init__(self) -> None:
        self.version = 0
        self.clear()

    def clear(self) -> None:
        self.holders: dict[str, NumberedHolder] = {}  # with blocks
        self.dropped: dict[int, NumberedHolder] = {}  # bit -> gone, and still in bitmaps
        self.live = 0  # the bits of `holders`
        self._by_number: list[NumberedHolder | None] = []  # of both
        self._changed()

    def new(self, name: str) -> NumberedHolder:
        if None in self._by_number:
            holder = NumberedHolder(name, self._by_number.index(None))
            self._by_number[holder.number] = holder
        else:
            holder = NumberedHolder(name, len(self._by_number))
            self._by_number.append(holder)
        self.holders[name] = holder
        self.live |= holder.bit
        self._changed()
        return holder

    def drop(self, name: str) -> None:
        """It is gone; its bit means nothing from now on."""
        holder = self.holders.pop(name, None)
        if holder is not None:
            self.live ^= holder.bit
            self.dropped[holder.bit] = holder
            self._changed()

    def take_blocks(self, holder: NumberedHolder, blocks: int) -> None:
        """So many bitmaps fewer have its bit; after the last one its number is free again."""
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
        """So many bitmaps lost these bits."""
        for number in numbers_in(bits):
            holder = self._by_number[number]
            assert holder is not None, f"a bitmap has bit {number}, which nobody has"
            self.take_blocks(holder, bitmaps)

    def number(self, name: str) -> int:
        """-1 for a holder without blocks."""
        holder = self.holders.get(name)
        return -1 if holder is None else holder.number

    def name(self, number: int) -> str:
        holder = self._by_number[number] if 0 <= number < len(self._by_number) else None
        assert holder is not None and self.live & holder.bit, f"nobody has number {number}"
        return holder.name

    def blocks_by_number(self, found: Sequence[Segment]) -> BlockCounts:
        """PrefixIndex.blocks_by_number."""
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
        """Who has which number, or which numbers there are."""
        self.version += 1
        self._size = (len(self._by_number) // 8 + 1) * 8  # of arrays: more than there are numbers
        self._masks = _Masks(self._size)
        self._starts = _Starts(self._masks)

    def check(self) -> None:
        """Prove the invariants."""
        everyone = {holder.bit: holder for holder in self.holders.values()}
        assert self.live == sum(everyone) and not everyone.keys() & self.dropped.keys()
        assert all(name == holder.name for name, holder in self.holders.items())
        everyone |= self.dropped
        listed = {h.bit: h for n, h in enumerate(self._by_number) if h and h.number == n}
        assert listed == everyone, "a number is free and somebody has it"
        assert all(holder.blocks > 0 for holder in everyone.values()), "a number for no blocks"
        assert not self._by_number or self._by_number[-1] is not None, "bitmaps are too long"


class KeyPages:
    """The keys of the index in the order in which they came, in pages. Eight bytes for a key.

    A dict keeps that order too, but cannot be walked a little at a time while it changes, and its
    first key takes ever longer to find once many before it are gone. Here the oldest key is at
    hand, and a sweep goes on from page to page where it last stopped.
    """

    def __init__(self) -> None:
        self._pages: list[list[bytes]] = []  # none of them empty
        self._next = 0  # the page that is swept next

    def __iter__(self) -> Iterator[bytes]:
        for page in self._pages:
            yield from page

    def extend(self, keys: list[bytes]) -> None:
        """These are the newest. None of them may be here already."""
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
        """Some of the keys, the newest; none when none are left."""
        return self._pages.pop() if self._pages else []

    def sweep(self, keep: Callable[[list[bytes]], list[bytes]]) -> int:
        """`keep` says what stays of the next page. Returns how many keys it was asked about."""
        pages = self._pages
        if not pages:
            return 0
        at = self._next if self._next < len(pages) else 0
        asked = len(pages[at])
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
        return asked

    def check(self) -> None:
        """Prove the invariants."""
        assert all(0 < len(page) <= PAGE_KEYS for page in self._pages), "an odd page"
        keys = list(self)
        assert len(set(keys)) == len(keys), "a key is in two places"


class PrefixIndex:
    def __init__(self, blocks_max: int = 4_000_000) -> None:
        assert blocks_max > 0
        self.blocks_max = blocks_max
        self._holders = HolderNumbers()
        # `find` as an array: element n is how many leading blocks holder number n has. There is at
        # least one element more than there are numbers, so -1, the number of who has none, reads 0.
        self.blocks_by_number = self._holders.blocks_by_number
        self._cleared: list[tuple[dict[bytes, int], KeyPages]] = []  # to be freed bit by bit
        self._start_over()

    def _start_over(self) -> None:
        self._bitmaps: dict[bytes, int] = {}  # 0 for a key that nobody has any more
        self._get = self._bitmaps.get
        self._pages = KeyPages()  # its keys
        self._empty = 0  # keys with bitmap 0
        self._owed = 0  # keys to look at, see _sweep_after

    def __len__(self) -> int:
        """Keys with holders. What only a dropped holder had counts until it is swept."""
        return len(self._bitmaps) - self._empty

    def __contains__(self, key: bytes) -> bool:
        return bool(self._get(key, 0) & self._holders.live)

    @property
    def numbers_version(self) -> int:
        """While it is the same, every holder has the number that it had."""
        return self._holders.version

    # Changes

    def add_many(self, keys: Sequence[bytes], holder: str) -> None:
        """The holder has these blocks, perhaps had some before. Fastest in order of the chain."""
        owner = self._holders.holders.get(holder) or self._holders.new(holder)
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
        self._holders.take_blocks(owner, 1 - added)
        self._sweep_after(len(keys))

    def remove_many(self, keys: Sequence[bytes], holder: str) -> None:
        """No error for what is not there: the index may have forgotten it."""
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
        """The holder is gone with all it had. Takes no longer for a million blocks than for one."""
        self._holders.drop(holder)

    def clear(self) -> None:
        """Empty at once; the memory comes back with the next changes, or by `sweep`."""
        self._cleared.append((self._bitmaps, self._pages))
        self._holders.clear()
        self._start_over()

    def sweep(self, keys_max: int) -> bool:
        """Free what is left of dropped holders and removed keys, looking at about so many keys.

        Changes do it by themselves; this is for idle moments. False when nothing is left.
        """
        while keys_max > 0:
            if self._cleared:
                keys_max -= self._free_a_page()
            elif self._holders.dropped or self._empty:
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

    def number(self, holder: str) -> int:
        """From 0, below the longest bitmap's length; -1 for a holder without blocks."""
        return self._holders.number(holder)

    def name(self, number: int) -> str:
        """The inverse of `number`, for a number that a holder has."""
        return self._holders.name(number)

    def names(self, bitmap: int) -> list[str]:
        """Of the holders in a segment's bitmap, in order of their numbers."""
        return [self._holders.name(number) for number in numbers_in(bitmap)]

    def holders(self, key: bytes) -> list[str]:
        """Who has this block, by name."""
        return sorted(self.names(self._get(key, 0) & self._holders.live))

    def copies(self, key: bytes) -> int:
        """How many have this block: as many as `holders` names, however many that are."""
        return (self._get(key, 0) & self._holders.live).bit_count()

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the chain `keys` each holder has, by name; no zeros."""
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
        """Each change pays for a few keys of what there is to sweep, so no change pays for all."""
        is_dirty = self._empty * EMPTY_SHARE_MAX > len(self._bitmaps)
        if not (is_dirty or self._holders.dropped or self._cleared):
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
        """Prove the invariants."""
        self._pages.check()
        assert set(self._pages) == set(self._bitmaps), "the pages list other keys"
        assert len(self._bitmaps) <= self.blocks_max
        assert self._empty == sum(not bitmap for bitmap in self._bitmaps.values())
        self._holders.check()
        bits = Counter(n for bitmap in self._bitmaps.values() for n in numbers_in(bitmap))
        holders = [*self._holders.holders.values(), *self._holders.dropped.values()]
        assert bits == {holder.number: holder.blocks for holder in holders}, "a count is wrong"
