"""Which nodes have how much of a prompt's prefix: key -> bitmap of holders.

A lookup walks the request's keys and intersects the bitmaps. A holder drops out at the first block
that it lacks, and where it drops out is the length of its prefix; most steps change nothing and
cost one dictionary access and one AND, however many holders there are.

It is a replica of the directory's index, fed by events (event_feed.py), so it may be behind. It is
bounded too: beyond `blocks_max` the block that was added first is forgotten. Both make it
undercount, which costs a recomputation at worst; overcounting would send requests after KV that is
not there.

Not here: where in a node a block is (directory.py); which holder to prefer (the conductor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a chain of keys is where."""

    blocks_by_holder: dict[str, int]  # longest run from the start; only holders that have block 0
    best_blocks: int
    best_holder: str | None  # of `best_blocks`; ties go to the smaller name; None without any hit
    union_blocks: int  # the run of blocks that are somewhere, not all in one place

    def blocks(self, holder: str) -> int:
        return self.blocks_by_holder.get(holder, 0)


class PrefixIndex:
    def __init__(self, blocks_max: int = 4_000_000) -> None:
        assert blocks_max > 0
        self.blocks_max = blocks_max
        self._bitmaps: dict[bytes, int] = {}  # in the order in which keys were first added
        self._bits: dict[str, int] = {}  # holder -> its bit, a power of two
        self._names: dict[int, str] = {}  # the inverse
        self._blocks: dict[int, int] = {}  # bit -> how many keys have it

    def __len__(self) -> int:
        return len(self._bitmaps)

    def __contains__(self, key: bytes) -> bool:
        return key in self._bitmaps

    def add(self, key: bytes, holder: str) -> None:
        bit = self._bits.get(holder) or self._new_bit(holder)
        bitmap = self._bitmaps.get(key, 0)
        if bitmap & bit:
            return
        if not bitmap and len(self._bitmaps) >= self.blocks_max:
            self._forget_oldest()
            bit = self._bits.get(holder) or self._new_bit(holder)
        self._bitmaps[key] = bitmap | bit
        self._blocks[bit] += 1

    def remove(self, key: bytes, holder: str) -> None:
        """No error when it is not there: the index may have forgotten it."""
        bit = self._bits.get(holder, 0)
        bitmap = self._bitmaps.get(key, 0)
        if bitmap & bit:
            self._clear_bits(key, bitmap, bit)

    def drop_holder(self, holder: str) -> None:
        """The holder is gone with all it had."""
        bit = self._bits.get(holder)
        if bit is None:
            return
        for key, bitmap in list(self._bitmaps.items()):
            if bitmap & bit:
                self._clear_bits(key, bitmap, bit)

    def clear(self) -> None:
        self._bitmaps.clear()
        self._bits.clear()
        self._names.clear()
        self._blocks.clear()

    def holders(self, key: bytes) -> list[str]:
        """Who has this block, by name."""
        return sorted(self._named(self._bitmaps.get(key, 0)))

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """How much of the chain `keys`, from its start, each holder has."""
        get = self._bitmaps.get
        runs: dict[str, int] = {}
        alive = get(keys[0], 0) if keys else 0  # holders that have every block so far
        depth = 0
        for key in keys:
            bitmap = get(key, 0)
            if alive & ~bitmap:
                for name in self._named(alive & ~bitmap):
                    runs[name] = depth
                alive &= bitmap
            if not bitmap:
                break
            depth += 1
        for name in self._named(alive):
            runs[name] = depth
        best_blocks = max(runs.values(), default=0)
        best = min((name for name, blocks in runs.items() if blocks == best_blocks), default=None)
        return PrefixMatch(runs, best_blocks, best, depth)

    def _named(self, bitmap: int) -> list[str]:
        names = []
        while bitmap:
            bit = bitmap & -bitmap
            names.append(self._names[bit])
            bitmap ^= bit
        return names

    def _new_bit(self, holder: str) -> int:
        """The lowest bit that nobody has, so that bitmaps stay short while nodes come and go."""
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._bits[holder], self._names[bit], self._blocks[bit] = bit, holder, 0
        return bit

    def _clear_bits(self, key: bytes, bitmap: int, bits: int) -> None:
        if bitmap == bits:
            del self._bitmaps[key]
        else:
            self._bitmaps[key] = bitmap & ~bits
        while bits:
            bit = bits & -bits
            bits ^= bit
            self._blocks[bit] -= 1
            if not self._blocks[bit]:  # the last block of this holder: its bit is free again
                del self._bits[self._names.pop(bit)], self._blocks[bit]

    def _forget_oldest(self) -> None:
        key, bitmap = next(iter(self._bitmaps.items()))
        self._clear_bits(key, bitmap, bitmap)

    def check(self) -> None:
        """Prove the invariants."""
        assert len(self._bitmaps) <= self.blocks_max
        assert self._names == {bit: name for name, bit in self._bits.items()}
        counts = dict.fromkeys(self._names, 0)
        for key, bitmap in self._bitmaps.items():
            assert bitmap, f"{key.hex()} is indexed and nowhere"
            for name in self._named(bitmap):
                counts[self._bits[name]] += 1
        assert counts == self._blocks, "a count of blocks is wrong"
        assert all(counts.values()), "a holder without blocks keeps a bit"
