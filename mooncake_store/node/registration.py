"""One holder in the directory: registered, its inventory sent, reported each second.

A directory that restarted answers a report with `false`. Then the holder registers again, under the
same incarnation, and says what it holds, in batches, before it takes new blocks. An inventory that
was interrupted is begun anew from a fresh registration, so that no half of one is ever believed.

Not here: what lies in a holder (slot_memory.py, ssd/), when to report (node.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import EpochPassed, RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.memory.slot_memory import Block
from mooncake_store.records.membership import NodeInfo

log = logging.getLogger("mooncake_store.node")
ADOPT_BLOCKS_MAX = 16_384  # in one message, about a megabyte


class Registration:
    """One holder. `directory` must answer fast, `patient` may take long: for inventories."""

    def __init__(
        self,
        info: NodeInfo,
        directory: DirectoryClient,
        patient: DirectoryClient,
        blocks: Callable[[], Sequence[Block]],
    ) -> None:
        assert info.has_inventory, info
        self.info = info
        self._directory, self._patient, self._blocks = directory, patient, blocks
        self._is_known = False  # to the directory, as far as we know
        self._is_open = False  # ... and it has our inventory
        self._is_refused = False  # ... and found it impossible: next time it gets an empty one
        self.epoch = 0  # of the directory that it was registered with last

    def report(self) -> None:
        """Say that the holder lives; register where it must.

        RequestInvalid when a newer process has its name; other StoreErrors: try again later.
        """
        info = self.info
        if self._is_open and self._is_still_known():
            return
        if self._is_open:
            log.warning("node_id=%s registers again: the directory forgot it", info.node_id)
        elif self._is_known:  # an inventory was interrupted
            self._directory.deregister_node(info.node_id, info.incarnation)
        self._is_open = False
        # Before the inventory: whoever still sees the old epoch after it has marked a slot as being
        # written has done so before the slots are looked at (control.py).
        self.epoch = self._directory.register_node(info)
        self._is_known = True
        self._send_inventory()
        self._is_open = True

    def _is_still_known(self) -> bool:
        info = self.info
        try:
            return self._directory.node_report(info.node_id, info.incarnation, epoch=self.epoch)
        except EpochPassed:  # another leads, and somebody said there that we live
            return False
        except StoreUnavailable:
            if self._is_epoch_lost():
                return False
            raise

    def _is_epoch_lost(self) -> bool:
        """Does a directory lead whose epoch is smaller than the one that this holder knows?

        What etcd says is the latest there is. So its count was lost, with its data or by somebody's
        hand, and the directory of our epoch will never lead again.
        """
        try:
            return self._directory.is_elected and self._directory.leader().epoch < self.epoch
        except StoreUnavailable:  # nobody leads
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
                self._directory.node_report(
                    node_id, incarnation, epoch=self.epoch
                )  # a long one must not look dead
        except RequestInvalid as error:
            self._is_refused = True
            raise StoreError(f"the inventory of {node_id} was refused: {error}") from error
        self._is_refused = False
        if blocks:
            log.info("node_id=%s adopted %d of %d blocks", node_id, adopted, len(blocks))

    def close(self) -> None:
        """Deregister. Twice is harmless. StoreError: the directory finds out by itself."""
        if self._is_known:
            self._is_known = self._is_open = False
            self._directory.deregister_node(self.info.node_id, self.info.incarnation)
