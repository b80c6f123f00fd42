"""Holders as small numbers, sets of holders as bitmaps, and bitmaps as numpy arrays.

A holder has the lowest number that is free, so bitmaps stay short while nodes come and go, and
keeps it as long as a bitmap has its bit: also when it is gone with all it had (`drop`), until the
owner of the bitmaps has swept them (`take_bits`).

Not here: which keys have which bitmaps (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Segment = tuple[int, int]  # (depth, bitmap of the holders that have at least so many blocks)
BlockCounts = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

FEW_BITS = 12  # are set one by one, faster than through a new mask
STARTS_MAX, MASKS_MAX = 64, 512  # arrays that are kept; of 8 KiB and 1 KiB for 1,000 holders


class NumberedHolder:
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
