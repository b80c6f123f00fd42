"""Storage node: the process that owns a memory segment and optionally an SSD tier.

python -m mooncake_store.node --node-id s0 --directory ipc:///tmp/directory --segment-bytes N \\
    --segment-path /dev/shm/mooncake-s0 [--ssd-path FOLDER --ssd-bytes N]

Workers of this node map the segment. Workers of other nodes read it one-sided, served by the C++
thread of the NIXL agent. The KV in the segment outlives workers. The tasks of the Python code:
1. Report to the directory every second, for the segment ("s0") and for the SSD ("s0/ssd"). If the
   directory does not list one of them, register it and send its inventory (registration.py). The
   node exits if a newer process has registered under its name.
2. Copy cold blocks to the SSD (spiller.py).
3. Answer requests on the control socket (control.py).
4. Maintain the index replica that readers of this host map (index_writer.py).
5. Serve plain TCP for clients without NIXL, if configured (tcp_server.py).

If the disk is full or broken, at start or later, the node serves from DRAM and retries each minute.
A fault of the SSD that an operator must correct (SsdRefused) prevents the start of the node.

Not here: options and signals (__main__.py), the choice of slots for blocks (directory/).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import RequestInvalid, SsdRefused, StoreError
from mooncake_store.keys.curve import with_key_of
from mooncake_store.layout import STATE_READY, geometry
from mooncake_store.memory.index_table import is_wanted, table_path
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.memory.slot_memory import Block, SlotMemory
from mooncake_store.node.agents import OpenAgents, open_agents
from mooncake_store.node.control import NodeControl, NodeVerbs
from mooncake_store.node.index_writer import IndexWriter
from mooncake_store.node.metrics import NodeCollector, ReaderCollector, timed
from mooncake_store.node.puller import Puller
from mooncake_store.node.registration import Registration
from mooncake_store.node.spiller import Spiller
from mooncake_store.process.metrics_page import LOOPBACK, Latencies, MetricsPage
from mooncake_store.records.membership import SSD_SUFFIX, UNIT_BYTES, NodeInfo
from mooncake_store.ssd.entries import SsdShape
from mooncake_store.ssd.ssd_tier import RETRY_S, SsdTier
from mooncake_store.transports.host_topology import topology_json
from mooncake_store.transports.nixl_agent import NixlUnavailable
from mooncake_store.transports.tcp_server import TcpServer
from mooncake_store.transports.transport import TransferCounters
from mooncake_store.wire.addresses import ELECTED
from mooncake_store.wire.node_protocol import NodeStats

log = logging.getLogger("mooncake_store.node")


@dataclass(frozen=True)
class NodeOptions:
    """Options of one storage node, set by an operator."""

    node_id: str
    segment_path: str  # paths of one or more files, joined by ":"
    segment_bytes: int  # of all files together
    segment_numa: tuple[int, ...] = ()  # NUMA node per file; empty: no binding
    unit_bytes: int = UNIT_BYTES  # size of an allocation unit; a power of two
    is_mapped_only: bool = False  # whether to run without NIXL
    ssd_folder: str = ""  # folder of the SSD tier; "" without an SSD
    ssd_bytes: int = 0  # size of the block file, a multiple of unit_bytes; 0 without an SSD
    ssd_io: str = "nixl"  # "nixl" | "threads": how blocks are moved
    must_reset_ssd: bool = False  # whether to discard the blocks in ssd_folder
    control: str = ""  # address of the control socket; "": no control socket
    data: str = ""  # HOST:PORT of the segment's plain TCP server; "": no TCP server
    advertised: str = ""  # "CONTROL,DATA", both as clients reach them; "": the bound addresses
    rack: str = ""  # operator's label; nodes with the same label have a short network path
    directory: str = ""  # address of the directory, or etcd://... of elected directories
    events: str = ""  # address of the event stream; "": unused, or known from the election in etcd
    has_other_hosts: bool = False  # whether other hosts can reach the directory
    metrics_port: int = 0  # 0: no Prometheus page
    metrics_address: str = LOOPBACK


class Clients(NamedTuple):
    """Separate connections to the directory, so that no task waits for another task's reply."""

    reports: DirectoryClient
    inventories: DirectoryClient  # with a timeout that suits large inventories
    background: DirectoryClient  # for spilling and the control socket


class StorageNode:
    """A storage node. It serves from construction to close(). Call report() every second."""

    def __init__(self, options: NodeOptions, clients: Clients, leave: Callable[[], None]) -> None:
        """`leave` must end the process; it is called when a client sends the request `leave`."""
        self.options = options
        self._clients = clients
        self._closers: list[Callable[[], None]] = []  # called in reverse order by close()
        self._incarnation = secrets.token_hex(8)
        self._registrations: list[Registration] = []
        self._tier: SsdTier | None = None
        self._tier_retry_s = 0.0  # monotonic time of the next attempt to open the tier
        self._is_unanswered = False  # whether the last report failed
        self._index: IndexWriter | None = None
        try:
            self._open(leave)
        except BaseException:
            self.close()
            raise

    def _open(self, leave: Callable[[], None]) -> None:
        options, clients = self.options, self._clients
        self._segment = Segment.create(
            options.segment_path, options.segment_bytes, options.segment_numa
        )
        log.info("node_id=%s segment pages: %s", options.node_id, self._segment.pages)
        self._closers.append(self._segment.close)
        shape = geometry(options.segment_bytes, options.unit_bytes)
        self._memory = SlotMemory(self._segment.view, shape)
        self._closers.append(self._close_tier)
        self._open_tier()
        self.info = self._describe()
        self._spiller = Spiller(
            options.node_id, self._incarnation, clients.background, self._memory, lambda: self._tier
        )
        self._puller = Puller(self.info, self._memory, clients.background)
        self._closers.append(self._puller.close)
        self._verbs = NodeVerbs(
            self.info,
            self._memory,
            clients.background,
            lambda: self._tier,
            self._puller,
            self.stats,
            leave,
            self._epoch,
        )
        self._registrations.append(
            Registration(self.info, clients.reports, clients.inventories, self._memory.blocks)
        )
        self._closers.append(self._deregister)
        if self._tier is not None:
            self._join_ssd(self._tier)
        latencies = Latencies(
            "mooncake_node_request_seconds",
            "Seconds from a request on the control socket to its answer.",
        )
        if self._control is not None:
            self._control.serve(timed(self._verbs.answer, latencies))
        if options.metrics_port:
            collectors = (
                NodeCollector(self.stats, self._served),
                latencies,
                ReaderCollector(lambda: self._puller.nodes),
            )
            page = MetricsPage(options.metrics_port, collectors, options.metrics_address)
            self._closers.append(page.close)
        if self.info.index_path:
            self._index = IndexWriter(self.info, options.directory, options.events)
            self._closers.append(self._index.close)
        if options.ssd_folder:
            self._spiller.start()
            self._closers.append(self._spiller.close)

    def _describe(self) -> NodeInfo:
        """Open the sockets and agents of this node, and describe how clients reach them."""
        options, segment = self.options, self._segment
        agents = self._open_agents()
        self._data = self._open_data()
        self._control: NodeControl | None = None
        if options.control:
            self._control = NodeControl(options.control)
            self._closers.append(self._control.close)
        bound = f"{self._control.address if self._control else ''}," + (
            self._data.address if self._data else ""
        )
        control, _, data = (options.advertised or bound).partition(",")
        return NodeInfo(
            node_id=options.node_id,
            incarnation=self._incarnation,
            host_id=host_id(options.segment_path),
            segment_path=options.segment_path,
            segment_bytes=options.segment_bytes,
            agent_name=agents.name,
            agent_metadata=agents.metadata,
            base_address=segment.address,
            unit_bytes=options.unit_bytes,
            control=with_key_of(self._control.address, control) if self._control else "",
            data_address=data,
            rack=options.rack,
            topology=topology_json(),
            has_inventory=True,
            nics=agents.nics,
            is_agent_local=agents.is_local,
            index_path=self._index_path(),
        )

    def _index_path(self) -> str:
        options = self.options
        is_followed = bool(options.events) or options.directory.startswith(ELECTED)
        if not is_followed or not is_wanted():
            return ""
        return table_path(options.segment_path, options.directory)

    def _open_agents(self) -> OpenAgents:
        """Open the NIXL agents for the segment; an empty OpenAgents without NIXL."""
        options = self.options
        if options.is_mapped_only:
            return OpenAgents()
        # NIXL peers reject an agent name that they know, so each incarnation needs a new one.
        name = f"{options.node_id}#{self._incarnation}"
        segment = self._segment.address, options.segment_bytes
        try:
            agents = open_agents(name, *segment, options.has_other_hosts)
        except NixlUnavailable as error:
            if not options.data:
                raise
            log.warning("node_id=%s serves other hosts by plain TCP: %s", options.node_id, error)
            return OpenAgents()
        self._closers.append(agents.close)
        return agents

    def _open_data(self) -> TcpServer | None:
        if not self.options.data:
            return None
        host, _, port = self.options.data.rpartition(":")
        server = TcpServer(
            self._segment.view,
            host.strip("[]"),
            int(port),
            self._incarnation.encode(),
            is_advertised=bool(self.options.advertised.partition(",")[2]),
        )
        self._closers.append(server.close)
        return server

    # ---- the SSD

    def _open_tier(self) -> None:
        """Open the SSD tier if configured. SsdRefused: the options must change."""
        options = self.options
        if not options.ssd_folder:
            return
        shape = SsdShape(options.unit_bytes, options.ssd_bytes)
        try:
            self._tier = SsdTier(
                options.ssd_folder,
                options.node_id,
                shape,
                self._segment.view,
                options.must_reset_ssd,
                options.ssd_io,
            )
        except OSError as error:
            self._tier_retry_s = time.monotonic() + RETRY_S
            log.warning(
                "node_id=%s serves without its SSD in %s, next attempt in %g s: %s",
                options.node_id,
                options.ssd_folder,
                RETRY_S,
                error,
            )
        else:
            blocks = len(self._tier.manifest.table)
            log.info("node_id=%s SSD: %s, %d blocks", options.node_id, self._tier.state, blocks)

    def _retry_tier(self) -> None:
        """Open the SSD tier of a node that serves from DRAM, and register it."""
        try:
            self._open_tier()
        except SsdRefused as error:
            self._tier_retry_s = time.monotonic() + RETRY_S
            log.error("node_id=%s serves without its SSD: %s", self.options.node_id, error)
        if self._tier is not None:
            self._join_ssd(self._tier)

    def _join_ssd(self, tier: SsdTier) -> None:
        info = self.info
        ssd = NodeInfo(
            node_id=info.node_id + SSD_SUFFIX,
            incarnation=info.incarnation,
            host_id=info.host_id,
            segment_path=tier.path,
            segment_bytes=self.options.ssd_bytes,
            agent_name="",
            agent_metadata=b"",
            base_address=0,
            unit_bytes=info.unit_bytes,
            tier="ssd",
            control=info.control,
            rack=info.rack,
            has_inventory=True,
        )

        def blocks() -> list[Block]:
            return [(*entry[:5], STATE_READY) for entry in tier.manifest.table.entries()]

        clients = self._clients
        self._registrations.append(Registration(ssd, clients.reports, clients.inventories, blocks))

    def _close_tier(self) -> None:
        if self._tier is not None:
            self._tier.close()

    # ---- every second

    def report(self) -> bool:
        """Report to the directory, and register if necessary. True if the directory has answered.
        RequestInvalid: the directory rejects this node, which a newer process may have replaced."""
        is_wished = self.options.ssd_folder and self._tier is None
        if is_wished and time.monotonic() >= self._tier_retry_s:
            self._retry_tier()
        try:
            for registration in self._registrations:
                registration.report()
        except RequestInvalid:
            raise
        except StoreError as error:
            # Warn once per outage.
            level = logging.DEBUG if self._is_unanswered else logging.WARNING
            log.log(level, "node_id=%s cannot report: %s", self.info.node_id, error)
            self._is_unanswered = True
            return False
        if self._is_unanswered:
            log.info("node_id=%s reports to the directory again", self.info.node_id)
            self._is_unanswered = False
        return True

    def stats(self) -> NodeStats:
        info, tier = self.info, self._tier
        wished = "not available" if self.options.ssd_folder else ""
        return NodeStats(
            node_id=info.node_id,
            incarnation=info.incarnation,
            segment_bytes=info.segment_bytes,
            segment_pages=self._segment.pages,
            unit_bytes=info.unit_bytes,
            requests_waiting=self._control.waiting if self._control else 0,
            ssd=tier.state if tier else wished,
            ssd_bytes=self.options.ssd_bytes,
            ssd_blocks=len(tier.manifest.table) if tier else 0,
            restores_missed=self._verbs.restores_missed,
            fetched_blocks=self._puller.blocks,
            index_blocks=self._index.blocks if self._index else 0,
            **asdict(self._spiller.counters),
            **(asdict(tier.counters) if tier else {}),
        )

    def _epoch(self) -> int:
        """The epoch of the directory that this node registered with; 0 before the first time."""
        return self._registrations[0].epoch if self._registrations else 0

    def _served(self) -> dict[str, TransferCounters]:
        """Counters of the plain TCP server. This process takes no part in one-sided transfers."""
        return {"tcp": self._data.counters} if self._data else {}

    def _deregister(self) -> None:
        try:
            for registration in self._registrations:
                registration.close()
        except StoreError as error:  # the directory removes a node that sends no reports
            log.warning("node_id=%s not deregistered: %s", self.options.node_id, error)

    def close(self) -> None:
        """Deregister, stop all threads, close agents and SSD, and unlink the segment. Idempotent.
        Blocks on the SSD remain for the next start."""
        while self._closers:
            self._closers.pop()()
