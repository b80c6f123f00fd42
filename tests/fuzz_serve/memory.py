"""Segments of storage nodes, and bytes that move between them one-sided.

A segment is real memory with the real headers, slots and checksums; only the mapping is not: a
process of the same host gets the very array. Like the kernel's, it outlives its owner for those who
hold it. A transfer copies in pieces, at different times, from what is there just then; it may be
late, and then it writes after its deadline; a bit of it may fall over; and nobody asks the node.

Not here: which slot is whose (the directory), checking what came
(mooncake_store/client/block_reader.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.segment_file import SegmentRefused
from mooncake_store.memory.slot_memory import SlotHeader
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.transport import LocalSpan, TransferBatch, Transport
from tests.fuzz_serve.green import in_process, loop, monotonic, sleep
from tests.fuzz_serve.loop import Process
from tests.fuzz_serve.network import Network

LATE_S_MAX = 8.0  # how long after its deadline a transfer may still write
STALL_S_MAX = 9.5  # how long a transfer may stand still and yet come before its deadline
STALLED = ("user", "s")  # names of processes whose transfers do: users and storage nodes


class Memories:
    """All segments of a simulation, and what befalls transfers."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.owners: dict[str, Process] = {}  # by path, while it lives
        self.views: dict[str, np.ndarray] = {}
        self.late_share = 0.0
        self.bad_share = 0.0  # of transfers: a bit falls over on the way
        self.stall_share = 0.0  # of transfers of users and nodes
        self.on_stall: Callable[[float], None] = lambda _: None  # with its seconds

    def create(self, path: str, size_bytes: int, process: Process) -> GreenSegment:
        self.owners[path] = process
        self.views[path] = np.zeros(size_bytes, np.uint8)
        process.on_end.append(lambda: self._ended(path, process))
        return GreenSegment(self, path, process)

    def _ended(self, path: str, process: Process) -> None:
        if self.owners.get(path) is process:
            del self.owners[path], self.views[path]

    def flip(self) -> None:
        """One bit of the memory of some node falls over."""
        rng = loop().rng
        path = rng.choice(sorted(self.views)) if self.views else ""
        if path:
            view = self.views[path]
            view[rng.randrange(view.nbytes)] ^= 1 << rng.randrange(8)
            loop().seen["bits that fell over"] += 1


class GreenSegment:
    """In place of memory.segment.Segment."""

    memories: Memories  # set by the stage

    def __init__(self, memories: Memories, path: str, owner: Process) -> None:
        self.path, self.owner = path, owner
        self._view: np.ndarray | None = memories.views[path]
        self.size_bytes = self._view.nbytes
        self.address = 0
        self.pages = "4 KiB"

    @classmethod
    def create(cls, path: str, size_bytes: int, numa_nodes: Any = ()) -> GreenSegment:
        process = in_process()
        assert process is not None
        return cls.memories.create(path, size_bytes, process)

    @classmethod
    def open(cls, path: str, size_bytes: int | None = None) -> GreenSegment:
        here, owner = in_process(), cls.memories.owners.get(path)
        if owner is None or here is None or owner.host != here.host:
            raise SegmentRefused(f"no process owns segment {path}")
        return cls(cls.memories, path, owner)

    @property
    def view(self) -> np.ndarray:
        assert self._view is not None
        return self._view

    def view_if_open(self) -> np.ndarray | None:
        return self._view

    def is_owner_alive(self) -> bool:
        return self._view is not None and self.owner.is_alive

    def close(self) -> None:
        self._view = None


class GreenAgent:
    """In place of nixl_agent.NodeAgent: what a node offers its segment by."""

    def __init__(self, name: str, address: int, size_bytes: int, *_: object) -> None:
        self.name, self.metadata = name, b"agent"

    def close(self) -> None: ...


class GreenNixl(Transport):
    """In place of NixlTransport: one-sided reads and writes of any node."""

    name = "nixl"
    memories: Memories  # set by the stage

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, list[LocalSpan]] = {}
        self._numbers = 0

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        return bool(node.agent_name)

    def make_lanes(self, count: int) -> None: ...

    def disconnect(self, node_id: str) -> bool:
        return True

    def close(self) -> None: ...

    def pending_targets(self) -> list[LocalSpan]:
        return [span for spans in self._late.values() for span in spans]

    def _transfer(self, batch: TransferBatch) -> None:
        memories, network, world = self.memories, self.memories.network, loop()
        process, rng = in_process(), world.rng
        assert process is not None
        path = batch.node.segment_path
        owner = memories.owners.get(path)
        if owner is None:
            sleep(network.delay_s(process.host, "elsewhere"))
            raise TransferFailed(f"node {batch.node.node_id} is dead")
        view, left_s = memories.views[path], batch.until_s - monotonic()
        is_cut = network.is_cut(owner.host, process.host)
        is_cut |= network.is_cut(process.host, owner.host)
        if is_cut or rng.random() < memories.late_share:
            self._be_late(batch, process, owner, view, max(left_s, 0.0))
        if process.name.startswith(STALLED) and rng.random() < memories.stall_share:
            self._stall(batch, min(STALL_S_MAX * rng.random(), left_s))
        if not batch.is_read and process.name.startswith("user"):  # the only ones never frozen
            _check_marks(batch, view)
        world.seen["one-sided transfers"] += 1
        for pair in zip(batch.remote, batch.local, strict=True):
            half = rng.random() < 0.5
            self._copy(batch, [pair], view, slice(0, 2 if half else 1), 2)
            sleep(network.delay_s(process.host, owner.host))
            self._copy(batch, [pair], view, slice(2 if half else 1, 2), 2)
            if not owner.is_alive:
                raise TransferFailed(f"node {batch.node.node_id} died")
            if monotonic() > batch.until_s:
                raise TransferTimeout(f"node {batch.node.node_id} is slow")

    def _stall(self, batch: TransferBatch, seconds: float) -> None:
        """Nothing is copied meanwhile. By the deadline, the transfer is given up."""
        loop().seen["transfers that stood still"] += 1
        self.memories.on_stall(seconds)
        sleep(max(seconds, 0.0))
        if monotonic() >= batch.until_s:
            raise TransferTimeout(f"node {batch.node.node_id} is slow")

    def _be_late(
        self,
        batch: TransferBatch,
        process: Process,
        owner: Process,
        view: np.ndarray,
        left_s: float,
    ) -> None:
        """Not by the deadline: at some time after it, whoever owns the memory by then."""
        world = loop()
        self._numbers += 1
        number = self._numbers
        self._late[number] = list(batch.local)
        world.seen["transfers that were late"] += 1

        def arrive(_: Any) -> None:
            del self._late[number]
            if process.is_alive and owner.is_alive:
                pairs = list(zip(batch.remote, batch.local, strict=True))
                self._copy(batch, pairs, view, slice(0, 2), 2)

        world.at(world.now_s + left_s + world.rng.random() * LATE_S_MAX, arrive)
        sleep(left_s)
        raise TransferTimeout(f"node {batch.node.node_id} does not answer")

    def _copy(
        self, batch: TransferBatch, pairs: Any, view: np.ndarray, part: slice, parts: int
    ) -> None:
        """So many parts of each span, of `parts`."""
        rng = loop().rng
        for there, (buffer, here) in pairs:
            low = there.length_bytes * part.start // parts
            high = there.length_bytes * part.stop // parts
            if low == high:
                continue
            far = view[there.offset_bytes + low : there.offset_bytes + high]
            near = buffer[here.offset_bytes + low : here.offset_bytes + high]
            target, source = (near, far) if batch.is_read else (far, near)
            target[:] = source
            if self.memories.bad_share and rng.random() < self.memories.bad_share:
                target[rng.randrange(len(target))] ^= 1 << rng.randrange(8)
                loop().seen["bits that fell over"] += 1


def _check_marks(batch: TransferBatch, view: np.ndarray) -> None:
    """No mark that comes by its deadline lands on a finished block of a later use of the slot."""
    headers_bytes = geometry(batch.node.segment_bytes, batch.node.unit_bytes).units * HEADER_BYTES
    for there, (buffer, here) in zip(batch.remote, batch.local, strict=True):
        for at in range(0, there.length_bytes, HEADER_BYTES):
            start = there.offset_bytes + at
            if start >= headers_bytes:
                break
            old = SlotHeader.unpack(view[start : start + HEADER_BYTES].tobytes())
            low = here.offset_bytes + at
            new = SlotHeader.unpack(buffer[low : low + HEADER_BYTES].tobytes())
            if old is None or new is None or old.generation <= new.generation:
                continue
            if (old.state, new.state) == (STATE_READY, STATE_WRITING):
                loop().fail(f"a late mark lands on a finished block: {old}")
