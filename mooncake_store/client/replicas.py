"""Adds, drops and moves copies of blocks; drains a node onto others.

A node that should get a copy pulls the block from a node that has one (control verb `fetch`). No
byte passes through this process. Copies are dropped only after the new copies are complete, and the
last copy of a block is never dropped.

Not here: pulling (fetcher.py), which node should get a copy (directory/core/nodes.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mooncake_store.client.restorer import LEASE_MARGIN_S, Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import EpochPassed, NodeUnknown, RequestInvalid
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from mooncake_store.wire.node_protocol import BLOCKS_MAX

log = logging.getLogger("mooncake_store.client")
DRAIN_BLOCKS = 256  # blocks moved per batch
EPOCHS_MAX = 8  # attempts of one pull, if each ends with EpochPassed
EPOCH_WAIT_S = 0.25  # pause between two attempts; a node registers with its next report (1 s)


class Replicas:
    def __init__(self, directory: DirectoryClient, restorer: Restorer) -> None:
        self._directory = directory
        self._restorer = restorer

    def change(
        self,
        keys: Sequence[bytes],
        add: Sequence[str],
        drop: Sequence[str],
        owner: str,
        deadline_s: float,
        source: str = "",
    ) -> list[bool]:
        """True: the block is on every node of `add` and on none of `drop`. False: no node has the
        block, a node of `add` lacks it, or `drop` has its last copy or a leased one."""
        until_s = time.monotonic() + deadline_s
        infos = {info.node_id: info for info in self._directory.nodes()}
        for node_id in (*add, *drop):
            if node_id not in infos:
                raise NodeUnknown(
                    f"storage node {node_id} is not registered; known: {', '.join(sorted(infos))}"
                )
        for node_id in add:
            if not infos[node_id].control or infos[node_id].is_ssd:
                raise RequestInvalid(
                    f"storage node {node_id} cannot pull blocks: name a node with DRAM and a "
                    "control socket (blocks reach its SSD by spilling)"
                )
        for start in range(0, len(keys), BLOCKS_MAX):
            for node_id in add:
                part = keys[start : start + BLOCKS_MAX]
                self._pull(part, infos[node_id], owner, until_s, source)
        done = []
        found = self._directory.lookup(keys, owner, 0.0, prefix_only=False)
        for key, copies in zip(keys, found, strict=True):
            holders = {copy.node_id for copy in copies}
            is_done = bool(holders) and holders.issuperset(add)
            to_drop = holders.intersection(drop) if is_done else set()
            if to_drop and holders == to_drop:
                is_done = False  # the last copy
            elif to_drop:
                removed = [self._directory.remove([key], node_id)[0] for node_id in sorted(to_drop)]
                is_done = all(removed)
            done.append(is_done)
        return done

    def _pull(
        self, keys: Sequence[bytes], target: NodeInfo, owner: str, until_s: float, source: str = ""
    ) -> None:
        """Make `target` pull the blocks that it lacks, from `source` where possible."""
        for _ in range(EPOCHS_MAX):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                self._pull_leased(keys, target, owner, left_s, source)
                return
            except EpochPassed as error:  # the target registers with its next report
                log.info("pull on node_id=%s will be retried: %s", target.node_id, error)
                time.sleep(min(EPOCH_WAIT_S, left_s))

    def _pull_leased(
        self, keys: Sequence[bytes], target: NodeInfo, owner: str, left_s: float, source: str
    ) -> None:
        """Raises EpochPassed if the leading directory changes, or if `target` has not registered
        with it yet."""
        # Read the epoch first, so that no lease below is of an earlier epoch.
        epoch = self._directory.stats().epoch
        found = self._directory.lookup(keys, owner, left_s + LEASE_MARGIN_S, prefix_only=False)
        try:
            wanted = [
                (key, _copy_on(source, copies))
                for key, copies in zip(keys, found, strict=True)
                if copies and target.node_id not in {copy.node_id for copy in copies}
            ]
            if wanted:
                chosen, copies = zip(*wanted, strict=True)
                with self._restorer.client(target) as client:
                    client.fetch(chosen, copies, left_s, epoch)
        finally:
            self._directory.release_later(owner)

    def drain(
        self,
        node_id: str,
        owner: str,
        on_progress: Callable[[int, int], None],
        deadline_s: float = 600.0,
    ) -> int:
        """Let the directory place no new blocks on the node, and copy the blocks that no other node
        has. Returns how many blocks still have no other copy, at most DRAIN_BLOCKS. If 0, the node
        can be stopped without loss. Before each batch, calls on_progress(blocks moved so far,
        blocks in the batch)."""
        until_s = time.monotonic() + deadline_s
        self._directory.drain(node_id, True)
        infos = {info.node_id: info for info in self._directory.nodes()}
        excluded = [name for name, info in infos.items() if not info.control or info.is_ssd]
        moved, is_moving = 0, True
        while is_moving and time.monotonic() < until_s:
            only_here = self._directory.blocks_on(node_id, DRAIN_BLOCKS, only_here=True)
            on_progress(moved, len(only_here))
            chosen = [key for key, _ in only_here]
            targets = self._directory.place(chosen, [*excluded, node_id])
            by_target: dict[str, list[bytes]] = {}
            for key, target in zip(chosen, targets, strict=True):
                by_target.setdefault(target, []).append(key)
            for target, part in by_target.items():
                if target:
                    self._pull(part, infos[target], owner, until_s)
            remaining = {key for key, _ in self._directory.blocks_on(node_id, DRAIN_BLOCKS, True)}
            evacuated = sum(key not in remaining for key in chosen)
            moved, is_moving = moved + evacuated, evacuated > 0
        return len(self._directory.blocks_on(node_id, DRAIN_BLOCKS, only_here=True))


def _copy_on(node_id: str, copies: Sequence[Copy]) -> Copy:
    """The copy on this node, in DRAM if there is one; else the first copy."""
    on_node = (copy for copy in copies if copy.node_id.removesuffix(SSD_SUFFIX) == node_id)
    return next(on_node, copies[0])
