"""What of a prompt's prefix each node has: a run of blocks in DRAM, and behind it one on its SSD.

A node with an SSD registers with the directory twice, as "s0" and as "s0/ssd" (membership.py), so
the directory's events name two holders. Here each kind has its own index. Blocks leave DRAM from
the end of a prefix, so what is on an SSD is mostly the end of a run whose start is in memory: the
run on the SSD is looked for where the one in DRAM ends. A prefix that changes between the two more
than once is undercounted.

Not here: what it costs to bring a block from one of them (fetching.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_store.membership import SSD_SUFFIX
from mooncake_store.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Run:
    """Leading blocks that one node has."""

    dram_blocks: int = 0
    blocks: int = 0  # with those on its SSD that follow


Runs = Mapping[str, Run]  # by node; only nodes that have the first block
NOTHING = Run()


class Tiers:
    """Two indexes, fed by one stream of events."""

    def __init__(self, dram: PrefixIndex) -> None:
        self.dram = dram
        self._ssd = PrefixIndex(dram.blocks_max)

    def add(self, key: bytes, holder: str) -> None:
        self._of(holder).add(key, holder.removesuffix(SSD_SUFFIX))

    def remove(self, key: bytes, holder: str) -> None:
        self._of(holder).remove(key, holder.removesuffix(SSD_SUFFIX))

    def drop_holder(self, holder: str) -> None:
        self._of(holder).drop_holder(holder.removesuffix(SSD_SUFFIX))

    def clear(self) -> None:
        self.dram.clear()
        self._ssd.clear()

    def _of(self, holder: str) -> PrefixIndex:
        return self._ssd if holder.endswith(SSD_SUFFIX) else self.dram

    def runs(self, keys: Sequence[bytes]) -> Runs:
        """What each node has of this chain of keys, from its start."""
        in_dram = self.dram.match(keys).blocks_by_holder
        runs = {node_id: Run(blocks, blocks) for node_id, blocks in in_dram.items()}
        if not len(self._ssd):
            return runs
        for depth in {0, *in_dram.values()}:
            for node_id, more in self._ssd.match(keys[depth:]).blocks_by_holder.items():
                if in_dram.get(node_id, 0) == depth:
                    runs[node_id] = Run(depth, depth + more)
        return runs

    def check(self) -> None:
        """Prove the invariants."""
        self.dram.check()
        self._ssd.check()
