"""Registered holders: liveness, registration, and the placement of new blocks.

A holder is the DRAM or the SSD of a storage node. Placement chooses a node for a writer that names
none. It uses weights, so that many writers do not all choose the emptiest node. The weight of a
node is the free share of its memory, at least FULL_WEIGHT. The weight of a new node grows to this
value within slow_start_s. Without the slow start, a new node would receive most new blocks, and all
reads of them, at once (Mooncake issue 3688).

Not here: the copies of a node that left (directory.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.holder import Holder
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.errors import (
    LayoutMismatch,
    NodeNotAttached,
    NodeUnknown,
    RequestInvalid,
    StoreFull,
)
from mooncake_store.layout import Geometry, geometry
from mooncake_store.records.membership import UNIT_BYTES, NodeInfo

# Maximum length of node_id and of incarnation in characters, and of agent_metadata in bytes (NIXL's
# metadata takes about 450 bytes).
INFO_BYTES_MAX = 65_536
FULL_WEIGHT = 0.05  # weight of a full node, which accepts new blocks by evicting others
NEW_WEIGHT = 0.01  # lower limit of the slow-start factor: a new node receives some blocks at once


def weight(holder: Holder, now_s: float, slow_start_s: float) -> float:
    """Placement weight in [0, 1]; 0 for a holder that takes no blocks, and for every SSD."""
    if not holder.is_open or holder.is_draining or holder.info.is_ssd or not holder.pool.units:
        return 0.0
    free = holder.pool.free_units / holder.pool.units
    age = (now_s - holder.registered_s) / slow_start_s
    return max(free, FULL_WEIGHT) * min(1.0, max(NEW_WEIGHT, age))


class NodeTable:
    """node_id -> Holder; the SSD of node "s0" has the node_id "s0/ssd"."""

    def __init__(self, config: DirectoryConfig) -> None:
        self._config = config
        self._holders: dict[str, Holder] = {}
        self._replaced: dict[str, str] = {}  # replaced incarnation -> node_id; at most nodes_max

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders.values())

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, node_id: str) -> Holder | None:
        return self._holders.get(node_id)

    def registered(self, node_id: str) -> Holder:
        holder = self._holders.get(node_id)
        if holder is None:
            raise NodeUnknown(
                f"storage node {node_id} is not registered; known: "
                f"{', '.join(sorted(self._holders)) or 'none'}. The node may be starting: retry."
            )
        return holder

    def attached(self, node_id: str) -> Holder:
        holder = self.registered(node_id)
        if not holder.is_attached:
            raise NodeNotAttached(
                f"no worker has attached to storage node {node_id} since the node or the directory "
                "started; attach to the node again"
            )
        return holder

    def alive(self, node_id: str, incarnation: str, now_s: float) -> bool:
        """Record the time of a node's report. False: this incarnation is not registered."""
        holder = self._holders.get(node_id)
        if holder is None or holder.info.incarnation != incarnation:
            return False
        holder.seen_s = now_s
        return True

    def refuse_misfit(self, info: NodeInfo) -> None:
        """Raise RequestInvalid or StoreFull if this node may not register."""
        names_bytes = max(map(len, (info.node_id, info.incarnation, info.agent_metadata)))
        if not info.node_id or info.segment_bytes <= 0 or names_bytes > INFO_BYTES_MAX:
            raise RequestInvalid(
                f"storage node {info.node_id[:64]!r} with {info.segment_bytes} bytes: a node needs "
                f"a name, memory, and at most {INFO_BYTES_MAX} characters or bytes per field"
            )
        is_unit = info.unit_bytes >= UNIT_BYTES and info.unit_bytes & (info.unit_bytes - 1) == 0
        if not is_unit or info.tier not in ("dram", "ssd"):
            raise RequestInvalid(
                f"storage node {info.node_id}: unit_bytes is {info.unit_bytes} and tier is "
                f"{info.tier!r}; unit_bytes must be a power of two >= {UNIT_BYTES}, and tier dram "
                "or ssd"
            )
        if self._replaced.get(info.incarnation) == info.node_id:
            # Two live processes with one node id would otherwise replace each other forever.
            raise RequestInvalid(
                f"a newer process registered as storage node {info.node_id}; stop one of the two, "
                "or give them different node ids"
            )
        if info.node_id not in self._holders and len(self) >= self._config.nodes_max:
            raise StoreFull(f"nodes_max ({self._config.nodes_max}) storage nodes are registered")

    def put(self, info: NodeInfo, now_s: float) -> None:
        assert info.node_id not in self._holders
        shape = geometry(info.segment_bytes, info.unit_bytes, has_headers=not info.is_ssd)
        pool = SlotPool(shape.units, info.unit_bytes)
        policy, is_open = self._config.eviction, not info.has_inventory
        self._holders[info.node_id] = Holder(info, now_s, shape, pool, now_s, policy, is_open)

    def take(self, node_id: str, is_replaced: bool = False) -> Holder:
        """Remove the node and return its holder; the caller must remove the copies. `is_replaced`:
        remember the incarnation. While it is remembered, it cannot register again."""
        holder = self._holders.pop(node_id)
        if is_replaced:
            while len(self._replaced) >= self._config.nodes_max:
                del self._replaced[next(iter(self._replaced))]
            self._replaced[holder.info.incarnation] = node_id
        return holder

    def silent(self, now_s: float) -> list[str]:
        """The nodes whose last report is older than node_ttl_s."""
        ttl_s = self._config.node_ttl_s
        return [name for name, node in self._holders.items() if now_s - node.seen_s > ttl_s]

    def attach(self, node_id: str, fingerprint: str, block_bytes: int) -> Geometry:
        """Mark the node as attached; the first call records the fingerprint and the block size.
        Returns the geometry of its slots. Raises LayoutMismatch if not even one block fits."""
        holder = self.registered(node_id)
        if holder.pool.units < holder.pool.units_for(block_bytes):
            raise LayoutMismatch(
                f"storage node {node_id} has {holder.info.segment_bytes} bytes, less than one "
                f"block of {block_bytes} bytes and its header; give it a larger segment"
            )
        holder.is_attached = True
        if not holder.fingerprint:
            holder.fingerprint, holder.block_bytes = fingerprint, block_bytes
        return holder.geometry

    def placed(self, key: bytes, now_s: float, excluded: set[str]) -> str:
        """The node for the prompt that starts with block `key`, by weighted rendezvous hashing. A
        key maps to the same node while the weights are similar, so two writers of one prefix rarely
        store it on two nodes. "": each node takes no blocks or is in `excluded`."""
        best, best_score = "", float("-inf")
        for node_id, holder in self._holders.items():
            if node_id in excluded:
                continue
            share = weight(holder, now_s, self._config.slow_start_s)
            if share <= 0.0:
                continue
            digest = blake2b(key + node_id.encode(), digest_size=8).digest()
            uniform = (int.from_bytes(digest, "little") + 1) / 2**64  # (0, 1]
            score = uniform ** (1.0 / share)
            if score > best_score:
                best, best_score = node_id, score
        return best

    def check(self) -> None:
        assert len(self) <= self._config.nodes_max >= len(self._replaced)
        for node_id, holder in self._holders.items():
            assert holder.info.node_id == node_id
