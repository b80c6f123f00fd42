"""Chooses among copies of a block by the current cost of each path.

The cost of a copy is the expected time until its last byte arrives, times a price for the distance.
The time is the bytes in flight from that node plus the block, divided by the node's rate. Until the
rate is measured, it is a typical rate of the distance. Time alone would send traffic across the
network whenever that is a little faster for this reader. But a byte from farther away uses more of
the shared network, so each step of distance has a higher price. With equal load and equal rates,
the order of cost is same node < same host < same rack < other.

Copies on SSDs come last on any path, because reading one takes a DRAM slot from another block.

Not here: bytes in flight and the list of nodes (known_nodes.py), measuring (rates.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo


class Distance(enum.IntEnum):
    SAME_NODE = 0
    SAME_HOST = 1
    SAME_RACK = 2
    OTHER = 3


PRICE = {  # factor on the transfer time, no unit; >= 1
    Distance.SAME_NODE: 1.0,
    Distance.SAME_HOST: 1.25,
    Distance.SAME_RACK: 1.5,
    Distance.OTHER: 2.0,
}
# Rough rates of nodes whose rate is not measured yet.
TYPICAL_BYTES_PER_S = {
    Distance.SAME_NODE: 8e9,
    Distance.SAME_HOST: 4e9,
    Distance.SAME_RACK: 2e9,
    Distance.OTHER: 1e9,
}


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """Distance and load of one node, as known to a reader."""

    distance: Distance
    bytes_per_s: float  # measured; 0: not yet
    under_way_bytes: int = 0  # requested from this node by this process and not arrived yet
    is_ssd: bool = False

    @property
    def per_byte_s(self) -> float:
        """The cost of one byte: seconds, times PRICE."""
        return PRICE[self.distance] / (self.bytes_per_s or TYPICAL_BYTES_PER_S[self.distance])

    def cost_s(self, size_bytes: int) -> float:
        """The cost (seconds, times PRICE) of all bytes in flight from this node and this block."""
        return (self.under_way_bytes + size_bytes) * self.per_byte_s


def distance(node: NodeInfo, own_id: str, host_id: str, rack: str) -> Distance:
    """The distance between a node and a process with local node `own_id`, on `host_id`, in
    `rack`."""
    if node.node_id.removesuffix(SSD_SUFFIX) == own_id:
        return Distance.SAME_NODE
    if node.host_id == host_id:
        return Distance.SAME_HOST
    if rack and node.rack == rack:
        return Distance.SAME_RACK
    return Distance.OTHER


def named_copy(
    copies: Sequence[Copy], node_ids: Sequence[str], routes: Mapping[str, CopyRoute]
) -> Copy | None:
    """The copy on the first of these nodes that has both a copy and a route. DRAM is preferred,
    because `copies` lists it before SSD, as lookup does."""
    for node_id in node_ids:
        for copy in copies:
            if copy.node_id.removesuffix(SSD_SUFFIX) == node_id and copy.node_id in routes:
                return copy
    return None


def best_copies(
    found: Sequence[Sequence[Copy]], routes: Mapping[str, CopyRoute]
) -> list[Copy | None]:
    """The cheapest copy of each block; None: no node with a copy has a route. A block assigned to a
    node raises that node's cost for the next block of the call. So two equal nodes that have all
    blocks of a prefix send half of them each."""
    if all(len(copies) < 2 for copies in found):  # nearly always: no block has two copies
        return [copies[0] if copies and copies[0].node_id in routes else None for copies in found]
    ends_s = {node_id: route.cost_s(0) for node_id, route in routes.items()}
    per_byte_s = {node_id: route.per_byte_s for node_id, route in routes.items()}
    chosen: list[Copy | None] = []
    for copies in found:
        best, best_cost = None, (True, float("inf"))
        for copy in copies:
            end_s = ends_s.get(copy.node_id)
            if end_s is not None:
                end_s += copy.size_bytes * per_byte_s[copy.node_id]
                cost = (routes[copy.node_id].is_ssd, end_s)
                if cost < best_cost:
                    best, best_cost = copy, cost
        if best is not None:
            ends_s[best.node_id] = best_cost[1]
        chosen.append(best)
    return chosen
