"""Prefix runs of each node: the leading blocks of a prompt in its DRAM and then on its SSD.

A *run* is the number of leading blocks of a prompt that a node holds without a gap. A node with an
SSD registers with the directory twice, as "s0" and as "s0/ssd"
(mooncake_store/records/membership.py). DRAM and SSDs have separate indexes here. DRAM evicts blocks
from the end of a prefix, so an SSD mostly holds the end of a run whose start is in DRAM. The SSD
index is therefore searched from the end of the DRAM run. A prefix that alternates between DRAM and
SSD more than once is undercounted.

A node counts as *full* after the first removal of one of its blocks, until it goes down or a
snapshot arrives. Each new block at a full node is assumed to evict another block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from conductor.load.pool import Column, Pool
from mooncake_store.prefix_index.prefix_index import FEW_BITS, PrefixIndex, Segment, numbers_in
from mooncake_store.records.membership import SSD_SUFFIX

SEGMENTS_MAX = 256  # cached columns per index; 8 KiB each for 1,000 workers

# (blocks of the run, number of its blocks in DRAM, nodes with exactly this run)
Group = tuple[int, int, Iterator[str]]


class Holdings:
    """How much of one prompt's prefix each node holds. Valid until one of the indexes changes."""

    def __init__(self, tiers: Tiers, keys: Sequence[bytes], pool: Pool) -> None:
        self._tiers, self._keys = tiers, keys
        dram = tiers.dram
        self._in_dram = dram.find(keys)
        self.full, full = tiers.full(pool)  # 1 for each worker whose node is full, else 0
        self._on_ssd: list[tuple[int, list[Segment]]] = []  # (DRAM blocks, SSD runs after them)
        # Leading blocks at each worker's node, in DRAM alone and in DRAM plus SSD.
        self.dram_blocks: Column = pool.zeros
        self.blocks: Column = pool.zeros
        self.longest = self.least = 0  # upper and lower bound of the runs of the workers' nodes
        address = pool.zeros_address
        if self._in_dram:
            self.longest = self._in_dram[-1][0]
            self.dram_blocks, self.least, address = tiers.nodes(dram, pool).blocks(self._in_dram)
            self.blocks = self.dram_blocks
        # Addresses of `blocks`, `dram_blocks` and `full`. The last one is 0 if no node is full.
        self.addresses = address, address, full
        if len(tiers.ssd):
            self._look_on_ssds(pool)
        self.has_ssd = bool(self._on_ssd)
        if self.has_ssd:
            self.addresses = self.blocks.ctypes.data, address, full
        self.is_same = self.least == self.longest  # True only if all workers' nodes have equal runs

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
        """A node with the longest run. There must be a run, and no run may have SSD blocks."""
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
        """As `groups`, for runs with SSD blocks, in any order. A node with a run that continues on
        its SSD is in two groups: with its DRAM run alone, and with its whole run."""
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
    """Leading blocks at the node of each worker."""

    column: Column
    least: int  # the minimum of the column
    address: int  # of the column's data


class _Nodes:
    """Maps the workers of a pool to the node numbers of an index."""

    def __init__(self, index: PrefixIndex, node_ids: Sequence[str]) -> None:
        self.node_ids, self.version = node_ids, index.numbers_version
        self._index = index
        numbers = [index.number(node_id) for node_id in node_ids]
        self._numbers = np.array(numbers, np.int64)
        # For each segment (depth, bitmap of nodes), the result of `blocks` for this segment alone.
        self._alone: dict[Segment, _Held] = {}
        self._several = np.zeros(len(numbers))  # the last result of `blocks` for several segments
        self._several_address = self._several.ctypes.data
        self._rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            self._rows.setdefault(number, []).append(row)

    def blocks(self, found: Sequence[Segment]) -> _Held:
        """Leading blocks at the node of each worker. `found`: at least one segment, as the `find`
        of the index returns them. The result is read-only, and valid until the next call."""
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
            if len(self._alone) >= SEGMENTS_MAX:  # rare, as few segments cover most prompts
                self._alone.clear()
            blocks = self._index.blocks_by_number([segment]).take(self._numbers).astype(np.float64)
            known = _Held(blocks, int(blocks.min()), blocks.ctypes.data)
            self._alone[segment] = known
        return known


class Tiers:
    """The index of blocks in DRAM, and the index of blocks on SSDs."""

    def __init__(self, dram: PrefixIndex) -> None:
        self.dram = dram
        self.ssd = PrefixIndex(dram.blocks_max)
        self._nodes: dict[int, _Nodes] = {}  # by id() of the index
        self._full: set[str] = set()  # full nodes
        # Result of `full` as (node ids of the pool, column, its address); None: to be computed.
        self._full_rows: tuple[Sequence[str], Column, int] | None = None

    def add_many(self, keys: Sequence[bytes], holder: str) -> None:
        """Add blocks in the order in which they were announced."""
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
        """A column with 1 for each worker whose node is full, else 0, and the column's address. If
        no node is full, the result is `pool.zeros` and the address 0."""
        if not self._full:
            return pool.zeros, 0
        if self._full_rows is None or self._full_rows[0] is not pool.node_ids:
            is_full = np.array([float(node_id in self._full) for node_id in pool.node_ids])
            self._full_rows = (pool.node_ids, is_full, is_full.ctypes.data)
        return self._full_rows[1:]

    def _of(self, holder: str) -> PrefixIndex:
        return self.ssd if holder.endswith(SSD_SUFFIX) else self.dram

    def nodes(self, index: PrefixIndex, pool: Pool) -> _Nodes:
        """The nodes of the pool's workers by their numbers in this index."""
        known = self._nodes.get(id(index))
        if (
            known is None
            or known.node_ids is not pool.node_ids
            or known.version != index.numbers_version
        ):
            known = self._nodes[id(index)] = _Nodes(index, pool.node_ids)
        return known

    def check(self) -> None:
        self.dram.check()
        self.ssd.check()
