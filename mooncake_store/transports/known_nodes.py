"""The storage nodes that one process can reach: their transports, and which have failed.

The transport is chosen per node, by `mode`:

    auto    the local node by mapping its memory. Another node by NIXL if NIXL loads here and can
            reach the node; otherwise by mapping if the node is on this host, else by plain TCP
    mapped  every node of this host mapped; others cannot be read
    nixl    every node by NIXL, the local one too; NixlUnavailable if NIXL does not load
    tcp     every node by plain TCP, the local one too

The directory is queried rarely, for instance for an unknown node or after a failed transfer. With
NIXL, `host_data_network()` of host_topology.py names the network cards that have an agent (NIXL's
endpoint) of their own.

A node whose transfer failed is in cool-down: it is not used for BAD_NODE_S, so that a dead node
costs one deadline and not one per request. A new incarnation of the node is used at once.

Not here: moving bytes (block_reader.py), measuring rates (rates.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import Geometry, geometry
from mooncake_store.memory.buffers import ByteArray, address_of
from mooncake_store.memory.segment import host_id
from mooncake_store.native.library import library
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.host_topology import host_data_network
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.nic_transport import MultiNicTransport
from mooncake_store.transports.nixl_agent import NixlUnavailable
from mooncake_store.transports.nixl_transport import NixlTransport
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.paths.path_cost import CopyRoute, best_copies, distance, named_copy
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import ByteSpan, LocalSpan, Transport

log = logging.getLogger("mooncake_store.store")

BAD_NODE_S = 2.0
REFRESH_S = 0.02  # least time between two queries of the directory for unknown or failed nodes
MODES = ("auto", "mapped", "nixl", "tcp")
NODES_MAX = 4_096
# After this absence from the directory a node is disconnected, because no restart and no election
# takes so long.
GONE_S = 60.0


class NodeAccess(NamedTuple):
    """A node, the transport that reaches it, and the layout of its slots."""

    info: NodeInfo
    transport: Transport
    shape: Geometry


class Traffic:
    """Counts the bytes that this process requests from each node: those in flight, and the total of
    each of the NODES_MAX nodes that were used last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}  # in flight; nodes without transfers have no entry
        self._asked_bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def moving(self, node_id: str, moved_bytes: int) -> Iterator[None]:
        """Count `moved_bytes` as in flight until the context exits."""
        with self._lock:
            self._bytes[node_id] = self._bytes.get(node_id, 0) + moved_bytes
            self._asked_bytes[node_id] = self._asked_bytes.pop(node_id, 0) + moved_bytes
            if len(self._asked_bytes) > NODES_MAX:
                del self._asked_bytes[next(iter(self._asked_bytes))]
        try:
            yield
        finally:
            with self._lock:
                left_bytes = self._bytes.pop(node_id) - moved_bytes
                assert left_bytes >= 0, f"{node_id}: {left_bytes} bytes under way"
                if left_bytes:
                    self._bytes[node_id] = left_bytes

    def under_way_bytes(self, node_id: str) -> int:
        return self._bytes.get(node_id, 0)

    def asked_bytes(self) -> dict[str, int]:
        """node_id -> total of the bytes requested from this node."""
        with self._lock:
            return dict(self._asked_bytes)


class KnownNodes:
    def __init__(self, directory: DirectoryClient, own_id: str, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"transports is {mode!r}; use one of {', '.join(MODES)}")
        # Compile native.c now, so that no transfer's deadline has to include the seconds for it.
        library()
        self._directory = directory
        self._own_id = own_id
        self._mode = mode
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeInfo] = {}
        # node_id -> time.monotonic() when the directory was first seen without this node, or when
        # the last attempt to disconnect failed
        self._gone_s: dict[str, float] = {}
        self._asked_s = 0.0
        self._bad: dict[str, tuple[str, float]] = {}  # node_id -> (incarnation, until_s)
        self._host_id = host_id("/dev/shm/segment")  # used while the local node is not registered
        self.mapped = MappedTransport(before_close=lambda segment: self.unregister(segment.view))
        self.tcp = TcpTransport()
        self.nixl = self._nixl()
        self.traffic = Traffic()
        self.bytes_per_s: dict[str, float] = {}  # by node_id; last measured by rates.py
        self.refresh()

    def refresh(self) -> None:
        """Query the directory. Raises StoreUnavailable if it does not answer."""
        asked_s = time.monotonic()
        nodes = {info.node_id: info for info in self._directory.nodes()}
        listed = {(info.node_id, info.incarnation) for info in nodes.values()}
        with self._lock:
            self._gone_s |= dict.fromkeys(self._nodes, asked_s)
            self._gone_s = {name: s for name, s in self._gone_s.items() if name not in nodes}
            expired = [name for name, gone_s in self._gone_s.items() if asked_s - gone_s > GONE_S]
            self._nodes, self._asked_s = nodes, asked_s
            self._bad = {name: bad for name, bad in self._bad.items() if (name, bad[0]) in listed}
        for node_id in expired:
            self._disconnect_gone(node_id)

    def _disconnect_gone(self, node_id: str) -> None:
        """Disconnect from a node that is gone. Its mapped memory is unmapped by MappedTransport."""
        is_disconnected = self.tcp.disconnect(node_id)
        if self.nixl is not None:
            is_disconnected &= self.nixl.disconnect(node_id)
        with self._lock:
            if is_disconnected:
                self._gone_s.pop(node_id, None)
            # A NIXL agent is busy, perhaps connecting to a silent node. Try again after GONE_S.
            elif node_id in self._gone_s:
                self._gone_s[node_id] = time.monotonic()

    def all(self) -> list[NodeInfo]:
        with self._lock:
            return list(self._nodes.values())

    def find(self, node_id: str) -> NodeInfo | None:
        return self._find(node_id)[0]

    def usable(self, node_id: str) -> NodeInfo | None:
        """The node; None: the directory does not list it, or it is in cool-down."""
        info, is_bad = self._find(node_id)
        return None if is_bad else info

    def access(self, node_id: str) -> NodeAccess | None:
        """How to read and write a node; None: it is not usable, or no transport reaches it."""
        info = self.usable(node_id)
        return None if info is None else self.access_to(info)

    def access_to(self, info: NodeInfo) -> NodeAccess | None:
        transport = self.transport(info)
        if transport is None:
            return None
        return NodeAccess(info, transport, geometry(info.segment_bytes, info.unit_bytes))

    def _find(self, node_id: str) -> tuple[NodeInfo | None, bool]:
        """The node, and whether it is in cool-down. Queries the directory first if the node is
        unknown or in cool-down, at most every REFRESH_S."""
        for is_last in (False, True):
            with self._lock:
                info = self._nodes.get(node_id)
                now_s = time.monotonic()
                is_recent = now_s - self._asked_s < REFRESH_S
                is_bad = info is not None and self._is_bad(info, now_s)
            if is_last or is_recent or (info is not None and not is_bad):
                break
            self.refresh()
        return info, is_bad

    def mark_bad(self, info: NodeInfo) -> None:
        with self._lock:
            self._bad[info.node_id] = (info.incarnation, time.monotonic() + BAD_NODE_S)

    def transport(self, info: NodeInfo) -> Transport | None:
        """The transport that reaches this node in this mode; None: there is none."""
        if info.is_ssd:
            return None  # the storage node of this SSD first restores the blocks into DRAM
        has_nixl = self.nixl is not None and self.nixl.reaches(info, self.is_same_host(info))
        has_tcp = bool(info.data_address)
        if self._mode == "tcp":
            return self.tcp if has_tcp else None
        if self._mode == "nixl":
            return self.nixl if has_nixl else None
        if self._mode == "auto" and info.node_id != self._own_id and has_nixl:
            return self.nixl
        if self.is_same_host(info):
            return self.mapped
        return self.tcp if self._mode == "auto" and has_tcp else None

    def is_same_host(self, info: NodeInfo) -> bool:
        """True if the segment of this node can be mapped by this process."""
        local = self._local_node()
        return info.host_id == (local.host_id if local else self._host_id)

    def _local_node(self) -> NodeInfo | None:
        with self._lock:
            return self._nodes.get(self._own_id)

    def choose(
        self, found: Sequence[Sequence[Copy]], first: Sequence[str] = ()
    ) -> list[Copy | None]:
        """Choose one copy per block. Nodes in `first` are preferred, in that order. If none of them
        has a readable copy, the cheapest copy is chosen. None: no copy can be read now."""
        names = dict.fromkeys(copy.node_id for copies in found for copy in copies)
        holders = {name: self.usable(name) for name in names}  # may query the directory
        if not any(len(copies) > 1 for copies in found):  # nearly always: no block has two copies
            reached = {name for name, info in holders.items() if info and self._is_reached(info)}
            return [
                copies[0] if copies and copies[0].node_id in reached else None for copies in found
            ]
        routes = self.routes()
        named = [named_copy(copies, first, routes) for copies in found]
        if None not in named:
            return named
        others = [copies if copy is None else () for copies, copy in zip(found, named, strict=True)]
        return [a or b for a, b in zip(named, best_copies(others, routes), strict=True)]

    def routes(self) -> dict[str, CopyRoute]:
        """The route to each node that can be read now. A route gives the cost of a copy."""
        local, now_s = self._local_node(), time.monotonic()
        host, rack = (local.host_id, local.rack) if local else (self._host_id, "")
        with self._lock:
            nodes = [info for info in self._nodes.values() if not self._is_bad(info, now_s)]
        found = {}
        for info in nodes:
            if self._is_reached(info):
                found[info.node_id] = CopyRoute(
                    distance(info, self._own_id, host, rack),
                    self.bytes_per_s.get(info.node_id, 0.0),
                    self.traffic.under_way_bytes(info.node_id),
                    info.is_ssd,
                )
        return found

    def _is_reached(self, info: NodeInfo) -> bool:
        """True if a transport reaches this node, and for every SSD (its node restores blocks)."""
        return info.is_ssd or self.transport(info) is not None

    def _is_bad(self, info: NodeInfo, now_s: float) -> bool:
        incarnation, until_s = self._bad.get(info.node_id, ("", 0.0))
        return incarnation == info.incarnation and now_s < until_s

    @property
    def needs_registration(self) -> bool:
        return self.nixl is not None

    def register(self, buffer: ByteArray) -> None:
        if self.nixl is not None:
            self.nixl.register(buffer)

    def unregister(self, buffer: ByteArray) -> None:
        if self.nixl is not None:
            self.nixl.unregister(buffer)

    def transports(self) -> list[Transport]:
        found: list[Transport] = [self.mapped, self.tcp]
        return found if self.nixl is None else [*found, self.nixl]

    def nic_counters(self) -> dict[str, NicCounters]:
        """Counters by name of each network card that has a NIXL agent of its own."""
        return self.nixl.nic_counters() if isinstance(self.nixl, MultiNicTransport) else {}

    def pending_targets(self) -> list[LocalSpan]:
        return [span for transport in self.transports() for span in transport.pending_targets()]

    def pending_in(self, memory: ByteArray) -> list[ByteSpan]:
        """Parts of `memory` that a timed-out read may still write, as offsets from its start."""
        start = address_of(memory)
        late = []
        for target, span in self.pending_targets():
            offset = address_of(target) + span.offset_bytes - start
            if 0 <= offset < memory.nbytes:
                late.append(ByteSpan(offset, span.length_bytes))
        return late

    def close(self) -> None:
        for transport in self.transports():
            transport.close()

    def _nixl(self) -> NixlTransport | MultiNicTransport | None:
        """The transport over NIXL. None: the mode does not use NIXL, or the mode is `auto` and NIXL
        does not load."""
        if self._mode in ("mapped", "tcp"):
            return None
        network = host_data_network()
        try:
            if network.nics or network.is_closed:
                return MultiNicTransport(network, self.is_same_host)
            return NixlTransport()
        except NixlUnavailable as error:
            if self._mode == "nixl":
                raise
            log.warning("continuing without NIXL, by plain TCP to other hosts: %s", error)
            return None
