"""What of a prompt's prefix each node has: a run of blocks in DRAM, and behind it one on its SSD.

A node with an SSD registers with the directory twice, as "s0" and as "s0/ssd"
(mooncake_store/records/membership.py), so the directory's events name two holders. Here each kind
has its own index. Blocks leave DRAM from the end of a prefix, so what is on an SSD is mostly the
end of a run whose start is in memory: the run on the SSD is looked for where the one in DRAM ends.
A prefix that changes between the two more than once is undercounted.

A node that let a block go is *full* from then on: what comes there takes the room of others.

Not here: what it costs to bring a block from one of them (fetching.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from conductor.load.pool import Column, Pool
from mooncake_store.prefix_index.prefix_index import FEW_BITS, PrefixIndex, Segment, numbers_in
from mooncake_store.records.membership import SSD_SUFFIX

SEGMENTS_MAX = 256  # arrays that are kept; of 8 KiB for 1,000 workers

Group = tuple[int, int, Iterator[str]]  # (blocks, of these in DRAM, nodes that have just so many)


class Holdings:
    """Who has how much of one prompt's prefix. Good until the next change of an index."""

    __slots__ = (
        "_in_dram",
        "_keys",
        "_on_ssd",
        "_tiers",
        "addresses",
        "blocks",
        "dram_blocks",
        "full",
        "has_ssd",
        "is_empty",
        "is_same",
        "least",
        "longest",
    )

    def __init__(self, tiers: Tiers, keys: Sequence[bytes], pool: Pool) -> None:
        self._tiers, self._keys = tiers, keys
        dram = tiers.dram
        self._in_dram = dram.find(keys)
        self.full, full = tiers.full(pool)  # 1 where the worker's node is
        self._on_ssd: list[tuple[int, list[Segment]]] = []  # (DRAM blocks before, what follows)
        # How many leading blocks each worker's node has in DRAM, and with its SSD behind that.
        self.dram_blocks: Column = pool.zeros
        self.blocks: Column = pool.zeros
        self.longest = self.least = 0  # no worker's node has more, and none has less
        address = pool.zeros_address
        if self._in_dram:
            self.longest = self._in_dram[-1][0]
            self.dram_blocks, self.least, address = tiers.nodes(dram, pool).blocks(self._in_dram)
            self.blocks = self.dram_blocks
        self.addresses = address, address, full  # of blocks, dram_blocks and full; 0: nobody is
        if len(tiers.ssd):
            self._look_on_ssds(pool)
        self.has_ssd = bool(self._on_ssd)
        if self.has_ssd:
            self.addresses = self.blocks.ctypes.data, address, full
        self.is_empty = not self.longest
        self.is_same = self.least == self.longest  # every worker's node has as much

    def _look_on_ssds(self, pool: Pool) -> None:
        ssd = self._tiers.ssd
        nodes = self._tiers.nodes(ssd, pool)
        for depth in (0, *(depth for depth, _ in self._in_dram)):
            found = ssd.find(self._keys[depth:])
            if found:
                self._on_ssd.append((depth, found))
                self.longest = max(self.longest, depth + found[-1][0])
                more = nodes.blocks(found).column
                self.blocks = self.blocks + np.where(self.dram_blocks == depth, more, 0.0)

    def longest_holder(self) -> str:
        """The first node of the first group; without SSDs, and not when it is empty."""
        bitmap = self._in_dram[-1][1]
        return self._tiers.dram.name((bitmap & -bitmap).bit_length() - 1)

    def groups(self) -> Iterator[Group]:
        """Holders by the length of their run, longest first."""
        if self._on_ssd:
            yield from sorted(self._all_groups(), key=lambda group: -group[0])
            return
        deeper, name = 0, self._tiers.dram.name
        for depth, bitmap in reversed(self._in_dram):
            yield depth, depth, map(name, numbers_in(bitmap & ~deeper))
            deeper = bitmap

    def _all_groups(self) -> Iterator[Group]:
        """With SSDs. Nodes that have more on their SSD are in two groups: part of a run is one."""
        dram, ssd, deeper = self._tiers.dram, self._tiers.ssd, 0
        exactly: dict[str, int] = {}
        for depth, bitmap in reversed(self._in_dram):
            nodes = dram.names(bitmap & ~deeper)
            exactly |= dict.fromkeys(nodes, depth)
            yield depth, depth, iter(nodes)
            deeper = bitmap
        for before, found in self._on_ssd:
            further = 0
            for depth, bitmap in reversed(found):
                nodes = ssd.names(bitmap & ~further)
                there = [node_id for node_id in nodes if exactly.get(node_id, 0) == before]
                yield before + depth, before, iter(there)
                further = bitmap


class _Held(NamedTuple):
    """How many blocks the node of each worker has."""

    column: Column
    least: int  # nobody has fewer
    address: int  # of the column


class _Nodes:
    """The nodes of a pool's workers by their numbers in an index."""

    def __init__(self, index: PrefixIndex, node_ids: Sequence[str]) -> None:
        self.node_ids, self.version = node_ids, index.numbers_version
        self._index = index
        numbers = [index.number(node_id) for node_id in node_ids]
        self._numbers = np.array(numbers, np.int64)
        # For each segment, how many blocks each node has if there were no other segment.
        self._alone: dict[Segment, _Held] = {}
        self._several = np.zeros(len(numbers))  # of several segments, until the next time
        self._several_address = self._several.ctypes.data
        self._rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            self._rows.setdefault(number, []).append(row)

    def blocks(self, found: Sequence[Segment]) -> _Held:
        """How many of the leading blocks the node of each worker has. Of segments as `find` gives
        them, at least one. Good until the next call; not to be changed."""
        alone = self._of(found[0])
        if len(found) == 1:
            return alone
        blocks = self._several
        blocks[:] = alone.column
        for segment in found[1:]:
            depth, bitmap = segment
            if bitmap.bit_count() > FEW_BITS:
                np.maximum(blocks, self._of(segment).column, blocks)
                continue
            while bitmap:
                number = bitmap.bit_length() - 1
                for row in self._rows.get(number, ()):
                    blocks[row] = depth
                bitmap ^= 1 << number
        return _Held(blocks, alone.least, self._several_address)

    def _of(self, segment: Segment) -> _Held:
        known = self._alone.get(segment)
        if known is None:
            if len(self._alone) >= SEGMENTS_MAX:  # most prompts have one of few
                self._alone.clear()
            blocks = self._index.blocks_by_number([segment]).take(self._numbers).astype(np.float64)
            known = _Held(blocks, int(blocks.min()), blocks.ctypes.data)
            self._alone[segment] = known
        return known


class Tiers:
    """Two indexes, fed by one stream of events."""

    def __init__(self, dram: PrefixIndex) -> None:
        self.dram = dram
        self.ssd = PrefixIndex(dram.blocks_max)
        self._nodes: dict[int, _Nodes] = {}  # by the index
        self._full: set[str] = set()
        # Of these workers' nodes, and where that column is.
        self._full_rows: tuple[Sequence[str], Column, int] | None = None

    def add_many(self, keys: Sequence[bytes], holder: str) -> None:
        """In the order in which they were announced."""
        if keys:
            self._of(holder).add_many(keys, holder.removesuffix(SSD_SUFFIX))

    def remove_many(self, keys: Sequence[bytes], holder: str) -> None:
        if keys:
            self._of(holder).remove_many(keys, holder.removesuffix(SSD_SUFFIX))
            if holder not in self._full:
                self._full.add(holder)
                self._full_rows = None

    def drop_holder(self, holder: str) -> None:
        self._of(holder).drop_holder(holder.removesuffix(SSD_SUFFIX))
        self._full.discard(holder)
        self._full_rows = None

    def clear(self) -> None:
        self.dram.clear()
        self.ssd.clear()
        self._full.clear()
        self._full_rows = None

    def full(self, pool: Pool) -> tuple[Column, int]:
        """For each worker 1 if its node's memory is full, else 0; `pool.zeros` if nobody's is.
        And the address of that column, 0 if nobody's is."""
        if not self._full:
            return pool.zeros, 0
        if self._full_rows is None or self._full_rows[0] is not pool.node_ids:
            is_full = np.array([float(node_id in self._full) for node_id in pool.node_ids])
            self._full_rows = (pool.node_ids, is_full, is_full.ctypes.data)
        return self._full_rows[1:]

    def _of(self, holder: str) -> PrefixIndex:
        return self.ssd if holder.endswith(SSD_SUFFIX) else self.dram

    def nodes(self, index: PrefixIndex, pool: Pool) -> _Nodes:
        """The nodes of the pool's workers, as this index numbers them."""
        known = self._nodes.get(id(index))
        if (
            known is None
            or known.node_ids is not pool.node_ids
            or known.version != index.numbers_version
        ):
            known = self._nodes[id(index)] = _Nodes(index, pool.node_ids)
        return known

    def check(self) -> None:
        """Prove the invariants."""
        self.dram.check()
        self.ssd.check()
