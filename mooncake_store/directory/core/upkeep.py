"""The verbs of storage nodes and operators: inventory, spilling, draining, pins, quotas, placement.

A base of Directory, apart from it because requests never come here. Not here: the rules behind each
verb (inventory.py, spills.py, placement.py, pins.py, tenants.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from mooncake_store.directory.core import inventory, placement, spills
from mooncake_store.directory.core.holder import Claim, Pin
from mooncake_store.directory.core.spills import Spill
from mooncake_store.errors import NodeUnknown, RequestInvalid
from mooncake_store.layout import STATE_READY
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX

if TYPE_CHECKING:
    from mooncake_store.directory.core.copies import CopyTable
    from mooncake_store.directory.core.nodes import NodeTable

CLAIMS_MAX = 100_000_000


class Upkeep:
    """Mixed into Directory."""

    _nodes: NodeTable
    _copies: CopyTable

    def adopt(
        self,
        node_id: str,
        incarnation: str,
        blocks: Sequence[tuple[bytes, int, int, int, int, int]],
        is_last: bool,
        now_s: float,
    ) -> int:
        """(key, slot, generation, checksum, size_bytes, state) that this life of a node holds.

        In as many calls as it takes; with the last one the holder opens. How many blocks were
        adopted: 0 until then. NodeUnknown when another life of the node is registered.
        """
        table = self._copies
        table.advance(now_s)
        holder = self._nodes.registered(node_id)
        if holder.info.incarnation != incarnation:
            raise NodeUnknown(f"another life of storage node {node_id} is registered: register")
        if holder.is_open:
            raise RequestInvalid(
                f"storage node {node_id} is open: an inventory comes before the first allocation"
            )
        holder.inventory += [Claim(*block) for block in blocks]
        if len(holder.inventory) > min(holder.pool.units, CLAIMS_MAX):
            holder.inventory.clear()
            raise RequestInvalid(
                f"storage node {node_id} claims more blocks than its {holder.pool.units} units "
                "can hold; begin the inventory again"
            )
        if not is_last:
            return 0
        claims, holder.inventory = inventory.sound(holder.inventory, holder.pool), []
        table.outgrow(max((claim.generation for claim in claims), default=0))
        adopted = 0
        for claim in inventory.consistent(claims, holder.pool):
            if claim.state == STATE_READY:
                adopted += table.adopt(holder, *claim[:5])
            elif holder.pool.adopt(claim.slot, holder.pool.units_for(claim.size_bytes)):
                holder.pool.quarantine(claim.slot, now_s + table.config.quarantine_s)
        holder.is_open = True
        return adopted

    def take_spills(
        self, node_id: str, owner: str, blocks_max: int, lease_s: float, now_s: float
    ) -> list[Spill]:
        """Blocks of the DRAM of `node_id` to be copied to its SSD, and where to."""
        table = self._copies
        table.advance(now_s)
        dram = self._nodes.registered(node_id)
        ssd = self._nodes.registered(node_id + SSD_SUFFIX)
        if not ssd.is_open or ssd.is_draining:
            return []
        until_s = table.leases.deadline_s(now_s, lease_s)
        return spills.take(table, dram, ssd, owner, blocks_max, until_s)

    def drain(self, node_id: str, is_on: bool, now_s: float) -> None:
        """A draining node gets no new blocks; what it has stays readable."""
        self._copies.advance(now_s)
        self._nodes.registered(node_id).is_draining = is_on

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool, now_s: float
    ) -> list[tuple[bytes, Copy]]:
        """Ready blocks of a node; `only_here`: those that no other node of its tier has."""
        table = self._copies
        table.advance(now_s)
        holder = self._nodes.registered(node_id)

        def is_elsewhere(key: bytes) -> bool:
            others = (other for other in self._nodes if other is not holder)
            return any(
                other.info.tier == holder.info.tier and table.blocks.on(key, other) is not None
                for other in others
            )

        found = (
            (copy.key, copy.place)
            for copy in table.of(holder)
            if not copy.is_ephemeral and not (only_here and is_elsewhere(copy.key))
        )
        return list(islice(found, blocks_max))

    def place(self, keys: Sequence[bytes], excluded: Sequence[str], now_s: float) -> list[str]:
        """The node that each key (the first of a chain) should be put on; "" when none takes any.

        See placement.py: by free memory, and a new node fills slowly.
        """
        self._copies.advance(now_s)
        holders, without = list(self._nodes), set(excluded)
        slow_start_s = self._copies.config.slow_start_s
        return [placement.place(key, holders, now_s, slow_start_s, without) or "" for key in keys]

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float, now_s: float) -> list[bool]:
        """Pin these keys: "soft" for ttl_s, "hard" until "none" is asked for.

        False: a hard pin found no room under hard_pin_fraction_max on some holder; the key's
        other copies, present and future, are pinned.
        """
        table = self._copies
        table.advance(now_s)
        if kind not in {pin.value for pin in Pin}:
            raise RequestInvalid(f"a pin is none, soft or hard, not {kind!r}")
        pin = Pin(kind)
        if pin is Pin.SOFT and ttl_s <= 0:
            raise RequestInvalid("a soft pin needs ttl_s > 0: it ends by itself")
        table.pins.refuse_too_many(len(keys) if pin is not Pin.NONE else 0)
        done = []
        for key in keys:
            table.pins.set(key, pin, now_s + ttl_s)
            done.append(table.set_pin(key, pin))
        return done

    def set_quota(self, tenant: str, quota_bytes: int, now_s: float) -> None:
        """The most that `tenant` may store, over all holders; 0 takes the quota away."""
        self._copies.advance(now_s)
        self._copies.tenants.set_quota(tenant, quota_bytes)
