"""Registration of a holder (the DRAM or the SSD of a node) with the directory.

A directory that has dropped the holder answers a report with `false`. A restarted or newly elected
directory answers with EpochPassed. In both cases the holder registers again under the same
incarnation and sends its inventory, a list of its blocks, in batches. The holder gets no new blocks
before the last batch. After an interruption it registers again and repeats the whole inventory.

Not here: the contents of a holder (slot_memory.py, ssd/), the time of each report (node.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import EpochPassed, RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.memory.slot_memory import Block
from mooncake_store.records.membership import NodeInfo

log = logging.getLogger("mooncake_store.node")
ADOPT_BLOCKS_MAX = 16_384  # blocks per message, about 1 MB


@dataclass(eq=False)
class Registration:
    """The registration of one holder."""

    info: NodeInfo  # its has_inventory must be True
    _directory: DirectoryClient
    _patient: DirectoryClient  # with a long timeout, for inventories
    _blocks: Callable[[], Sequence[Block]]  # the blocks of the holder now
    _is_known: bool = False  # whether the holder has registered and not deregistered
    _is_open: bool = False  # whether the directory has the complete inventory
    _is_refused: bool = False  # whether the last inventory was rejected, so the next one is empty
    epoch: int = 0  # epoch of the directory that the holder last registered with

    def report(self) -> None:
        """Report that the holder is alive; register if necessary. RequestInvalid: the directory
        rejects the holder, for example because a newer process has this node id. After another
        StoreError, call this method again."""
        info = self.info
        if self._is_open and self._is_still_known():
            return
        if self._is_open:
            log.warning("node_id=%s is not listed now and registers again", info.node_id)
        elif self._is_known:  # an inventory was interrupted
            self._directory.deregister_node(info.node_id, info.incarnation)
        self._is_open = False
        # The epoch is set before the inventory is read. A writer of headers checks the epoch after
        # its write (control.py). If the writer finds the old epoch, the inventory has its headers.
        self.epoch = self._directory.register_node(info)
        self._is_known = True
        self._send_inventory()
        self._is_open = True

    def _is_still_known(self) -> bool:
        info = self.info
        try:
            return self._directory.node_report(info.node_id, info.incarnation, epoch=self.epoch)
        except EpochPassed:  # another directory leads now
            return False
        except StoreUnavailable:
            if self._is_epoch_lost():
                return False
            raise

    def _is_epoch_lost(self) -> bool:
        """Whether the leader has a smaller epoch than this registration. This happens only if etcd
        has lost the counter of epochs or an operator has reset it."""
        try:
            return self._directory.is_elected and self._directory.leader().epoch < self.epoch
        except StoreUnavailable:  # no directory leads
            return False

    def _send_inventory(self) -> None:
        node_id, incarnation = self.info.node_id, self.info.incarnation
        blocks = [] if self._is_refused else self._blocks()
        try:
            for start in range(0, max(1, len(blocks)), ADOPT_BLOCKS_MAX):
                batch = blocks[start : start + ADOPT_BLOCKS_MAX]
                is_last = start + ADOPT_BLOCKS_MAX >= len(blocks)
                adopted = self._patient.adopt(
                    node_id, incarnation, batch, is_last, epoch=self.epoch
                )
                # Report between batches, because a node without reports counts as dead.
                self._directory.node_report(node_id, incarnation, epoch=self.epoch)
        except RequestInvalid as error:
            self._is_refused = True
            raise StoreError(f"{node_id}: directory rejected the inventory: {error}") from error
        self._is_refused = False
        if blocks:
            log.info("node_id=%s directory adopted %d of %d blocks", node_id, adopted, len(blocks))

    def close(self) -> None:
        """Deregister. Idempotent. If this fails, the directory removes the holder after its TTL."""
        if self._is_known:
            self._is_known = self._is_open = False
            self._directory.deregister_node(self.info.node_id, self.info.incarnation)
