"""Registration of a holder (the DRAM or the SSD of a node) with the directory.

A directory that has dropped the holder answers a report with `false`. A restarted or newly elected
directory answers with EpochPassed. The holder then registers again under the same incarnation and
sends its inventory, a list of its blocks, in batches. It gets no new blocks before the last batch.
After an interruption it registers again, so the directory never uses a part of an inventory.

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

    info: NodeInfo  # with has_inventory
    _directory: DirectoryClient
    _patient: DirectoryClient  # with a long timeout, for inventories
    _blocks: Callable[[], Sequence[Block]]  # the blocks of the holder now
    _is_known: bool = False  # whether the holder has registered and not deregistered
    _is_open: bool = False  # whether the directory has the complete inventory
    _is_refused: bool = False  # whether the directory rejected it; the next one is then empty
    epoch: int = 0  # of the last directory that the holder registered with

    def report(self) -> None:
        """Report that the holder is alive; register if necessary. RequestInvalid: it is rejected,
        for example because a newer process has this node id. Other StoreErrors: call again."""
        info = self.info
        if self._is_open and self._is_still_known():
            return
        if self._is_open:
            log.warning("node_id=%s not listed by the directory, registers again", info.node_id)
        elif self._is_known:  # an inventory was interrupted
            self._directory.deregister_node(info.node_id, info.incarnation)
        self._is_open = False
        # Set before the inventory is read. A writer checks the epoch after it wrote its header. If
        # the writer found the old epoch, the inventory therefore has that header (control.py).
        self.epoch = self._directory.register_node(info)
        self._is_known = True
        self._send_inventory()
        self._is_open = True

    def _is_still_known(self) -> bool:
        info = self.info
        try:
            return self._directory.node_report(info.node_id, info.incarnation, epoch=self.epoch)
        except EpochPassed:  # another directory leads by now
            return False
        except StoreUnavailable:
            if self._is_epoch_lost():
                return False
            raise

    def _is_epoch_lost(self) -> bool:
        """Whether the leader has a smaller epoch than this registration. Epochs of leaders only
        grow unless etcd loses the counter or an operator resets it. The directory of this
        registration will then never lead again."""
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
                # Report between batches: a long inventory must not look like a dead node.
                self._directory.node_report(node_id, incarnation, epoch=self.epoch)
        except RequestInvalid as error:
            self._is_refused = True
            raise StoreError(f"the inventory of {node_id} was rejected: {error}") from error
        self._is_refused = False
        if blocks:
            log.info("node_id=%s adopted %d of %d blocks", node_id, adopted, len(blocks))

    def close(self) -> None:
        """Deregister. Idempotent. After a StoreError the directory removes the node by its TTL."""
        if self._is_known:
            self._is_known = self._is_open = False
            self._directory.deregister_node(self.info.node_id, self.info.incarnation)
