"""Copies cold blocks from the segment to the SSD, ahead of their eviction.

The directory chooses the blocks and their SSD slots (take_spills). The blocks have no lease, so a
block may be evicted and overwritten in the segment while it is written to the disk. The writer of
the new block changes the header of the slot first. The spiller therefore checks header and
checksum, writes to the disk, and checks the header again before it records and commits the copy.

Not here: the disk (ssd/), the choice of blocks (directory/core/copies.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import NodeUnknown, StoreError, StoreUnavailable
from mooncake_store.memory.slot_memory import SlotMemory
from mooncake_store.records.blocks import Slot, Spill
from mooncake_store.records.membership import SSD_SUFFIX
from mooncake_store.ssd.entries import SsdEntry
from mooncake_store.ssd.ssd_tier import WRITE_S_MAX, BlockJob, SsdTier

log = logging.getLogger("mooncake_store.node")
BLOCKS_MAX = 64  # maximum number of blocks per batch
LEASE_S = 2 * WRITE_S_MAX  # duration of the lease on the SSD slots of a batch
IDLE_S = 0.5  # pause after take_spills returned fewer than BLOCKS_MAX blocks
DELAY_S_MAX = 30.0  # limit of the pause, which doubles after each batch without a stored block


@dataclass
class SpillCounters:
    """Counters since the start of the process."""

    spilled_blocks: int = 0
    spilled_bytes: int = 0
    spills_given_up: int = 0  # offered blocks that were not stored, or whose commit was rejected


class Spiller:
    """A thread that calls step() for each batch. `tier` returns the open SSD tier, or None."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        directory: DirectoryClient,
        memory: SlotMemory,
        tier: Callable[[], SsdTier | None],
    ) -> None:
        self.counters = SpillCounters()
        self._node_id, self._ssd_id = node_id, node_id + SSD_SUFFIX
        self._incarnation = incarnation
        self._directory, self._memory, self._tier = directory, memory, tier
        self._batch = 0
        self.delay_s = IDLE_S  # pause before the next batch if step() returned False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="spill", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            has_more = False
            try:
                has_more = self.step()
            except (StoreUnavailable, NodeUnknown):
                pass  # StorageNode.report logs such outages
            except StoreError as error:
                log.warning("node_id=%s cannot spill a batch: %s", self._node_id, error)
            except Exception:  # catch all, because a bug must stop neither spilling nor the node
                log.exception("node_id=%s spilling failed", self._node_id)
            if not has_more:
                self._stop.wait(self.delay_s)

    def step(self) -> bool:
        """Spill one batch. True: the directory may offer more blocks now."""
        tier = self._tier()
        if tier is None or not tier.is_writable:
            return False
        self._batch += 1
        owner = f"spill {self._node_id} {self._incarnation} {self._batch}"
        spills = self._directory.take_spills(self._node_id, owner, BLOCKS_MAX, LEASE_S)
        kept = self._copy(tier, spills) if spills else {}
        if spills:
            self._commit(owner, spills, kept)
        is_in_vain = bool(spills) and not kept  # the next offer would be the same
        self.delay_s = min(2 * self.delay_s, DELAY_S_MAX) if is_in_vain else IDLE_S
        return len(spills) == BLOCKS_MAX and tier.is_writable and not is_in_vain

    def _copy(self, tier: SsdTier, spills: Sequence[Spill]) -> dict[int, SsdEntry]:
        """Write these blocks to the SSD; returns the stored entries by index in `spills`."""
        jobs: dict[int, BlockJob] = {}
        for index, spill in enumerate(spills):
            entry = self._verified(spill)
            if entry is not None:
                jobs[index] = BlockJob(entry, self._memory.shape.slot_offset_bytes(spill.slot))
        written = tier.write(list(jobs.values()))
        kept = {
            index: job.entry
            for (index, job), is_written in zip(jobs.items(), written, strict=True)
            if is_written and self._is_still_there(spills[index])
        }
        return kept if tier.keep(list(kept.values())) else {}

    def _verified(self, spill: Spill) -> SsdEntry | None:
        """The SSD entry of the block; None if the block was replaced or is corrupt."""
        header = self._memory.header(spill.slot)
        if header is None or not self._is_still_there(spill):
            return None
        digest = self._memory.checksum(spill.slot, spill.size_bytes, header.layers)
        if spill.checksum not in (0, digest):  # 0: the block has no checksum, and gets one here
            log.warning("node_id=%s block %s in DRAM is corrupt", self._node_id, spill.key.hex())
            return None
        return SsdEntry(
            spill.key, spill.ssd_slot, spill.ssd_generation, digest, spill.size_bytes, header.layers
        )

    def _is_still_there(self, spill: Spill) -> bool:
        return self._memory.is_ready(spill.slot, spill.generation, spill.key)

    def _commit(self, owner: str, spills: Sequence[Spill], kept: dict[int, SsdEntry]) -> None:
        """Commit the stored copies and abandon the other slots. If the commit fails, the manifest
        lists blocks that the directory does not know. This ends when the node next reports its
        inventory, or when other blocks overwrite these slots."""
        rows = [
            (entry.key, entry.slot, entry.generation, entry.checksum) for entry in kept.values()
        ]
        self.counters.spills_given_up += len(spills) - len(kept)
        if rows:
            epoch = spills[0].epoch
            committed = self._directory.commit(self._ssd_id, rows, owner, 0.0, epoch=epoch)
            for entry, is_committed in zip(kept.values(), committed, strict=True):
                self.counters.spilled_blocks += is_committed
                self.counters.spilled_bytes += entry.size_bytes * is_committed
                self.counters.spills_given_up += not is_committed
        unused = [
            Slot(self._ssd_id, spill.ssd_slot, spill.ssd_generation)
            for index, spill in enumerate(spills)
            if index not in kept
        ]
        if unused:
            self._directory.abandon(unused, owner)
        self._directory.release(owner)

    def close(self) -> None:
        """Stop the thread after the current batch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
