"""The SSDs of a simulated cluster: spilling blocks to them and restoring blocks from them.

The real Directory decides which cold blocks get a copy on the SSD of their node once its DRAM is
fuller than `spill_fraction`. It also decides which copies are dropped when the SSD is full, and
which copies a lookup finds. Blocks are spilled in batches, as in mooncake_store/node/spiller.py. A
batch holds no leases while it is written, so a block that is evicted before the write ends is not
spilled. A restored block is put into the DRAM of its node, where the next reader finds it.

A disk is a link of its read rate that all its transfers share evenly. A written byte counts as
`read_bytes_per_s / write_bytes_per_s` read bytes.

Not here: which blocks a request restores (prefill_node.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.store import SimulatedStore
from mooncake_store.records.blocks import Spill
from mooncake_store.records.membership import SSD_SUFFIX

# The values of mooncake_store/node/spiller.py, copied so that its threads and disks are not
# imported.
SPILL_BLOCKS_MAX, SPILL_IDLE_S = 64, 0.5


@dataclass(frozen=True, slots=True)
class DiskRates:
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


@dataclass(slots=True, eq=False)
class SpillBatch:
    """Blocks being written; `gone`: those evicted from DRAM since the batch began."""

    owner: str
    spills: Sequence[Spill]
    gone: set[bytes] = field(default_factory=set)


class SimulatedSsds:
    def __init__(
        self, clock: VirtualClock, store: SimulatedStore, rates: DiskRates, block_bytes: int
    ) -> None:
        self._clock, self._store, self._block_bytes = clock, store, block_bytes
        self._disks = Network(clock, rates.read_bytes_per_s, rates.latency_s)
        self._written_bytes = round(block_bytes * rates.read_bytes_per_s / rates.write_bytes_per_s)
        self._batches: dict[str, SpillBatch] = {}  # by node
        self._begun = 0
        self.spilled_blocks = 0
        store.on_removed.append(self._removed)

    # -- to the SSD

    def spill_all(self, node_ids: Sequence[str], is_over: Callable[[], bool]) -> None:
        """Begin a batch on each idle node every SPILL_IDLE_S seconds until `is_over()`."""
        for node_id in node_ids:
            if node_id not in self._batches and self._store.has_node(node_id):
                self._spill(node_id)
        if not is_over():
            self._clock.after(SPILL_IDLE_S, self.spill_all, node_ids, is_over)

    def _spill(self, node_id: str) -> None:
        self._begun += 1
        owner = f"spill {self._begun}"
        spills = self._store.take_spills(node_id, owner, SPILL_BLOCKS_MAX)
        if not spills:
            return
        batch = self._batches[node_id] = SpillBatch(owner, spills)
        ssd, size_bytes = f"{node_id} written", len(spills) * self._written_bytes
        ended = partial(self._written, node_id, batch)
        self._disks.send(node_id + SSD_SUFFIX, ssd, size_bytes, ended)

    def _removed(self, key: bytes, holder: str) -> None:
        batch = self._batches.get(holder)
        if batch is not None:
            batch.gone.add(key)

    def _written(self, node_id: str, batch: SpillBatch) -> None:
        del self._batches[node_id]
        if not self._store.has_node(node_id):
            return  # the host was lost, and its disk with it
        kept = [spill for spill in batch.spills if spill.key not in batch.gone]
        lost = [spill for spill in batch.spills if spill.key in batch.gone]
        self._store.end_spills(node_id, batch.owner, kept, lost)
        self.spilled_blocks += len(kept)
        if len(batch.spills) == SPILL_BLOCKS_MAX and kept:
            self._spill(node_id)

    # -- from the SSD

    def restore(
        self, node_id: str, keys: Sequence[bytes], owner: str, done: Callable[[int], None]
    ) -> None:
        """Read these blocks into their node's DRAM. `done` receives how many were stored."""

        def came() -> None:
            done(self._store.put(keys, node_id, owner) if self._store.has_node(node_id) else 0)

        size_bytes = len(keys) * self._block_bytes
        self._disks.send(node_id + SSD_SUFFIX, node_id, size_bytes, came)

    def check(self) -> None:
        self._disks.check()
        assert not self._batches, f"batches never ended: {sorted(self._batches)}"
