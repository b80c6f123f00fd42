"""Drains a host while the deployment serves: its requests, and the blocks that only it holds.

    1. The host's workers accept no new requests.
    2. The requests at these workers finish. A request that takes too long is moved: the worker
       fails the request, and the frontend resumes it on another worker.
    3. Blocks whose only copies are on nodes of the host are copied to nodes of other hosts.
       The target nodes pull the blocks; no bytes pass through this process. A block on SSD is
       first loaded into DRAM, so the host's nodes accept blocks until step 4.
    4. The host's storage nodes accept no new blocks. Blocks written since step 3 are copied too.

After these steps the host can be stopped without loss. A restarted worker accepts requests again.
The directory keeps the drain flag of a storage node until `undo`, until the node registers again,
or until another directory becomes the leader. Streams of the host's own frontend are not moved,
because a stream is bound to its connection.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from backends.cluster.deployment import Deployment
from backends.workers.protocol import DrainWorker, WorkerOutbox, encode, open_outbox
from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.records.membership import SSD_SUFFIX, WorkerInfo

LOOK_S = 1.0  # pause between two reads of the worker reports, because a read returns all blocks
MOVED_AT_ONCE = 256  # limit of the blocks in one copy call
COPY_S_MAX = 30.0  # timeout of one copy call
ASK_S_MAX = 1.0  # timeout of a call to the directory in `move_requests`
SNAPSHOT_S_MAX = 30.0  # timeout of other calls, because a snapshot may have millions of blocks


@dataclass(frozen=True, slots=True)
class Left:
    """The remaining requests and blocks of a host."""

    requests: int  # requests at the host's workers
    blocks: int  # blocks without a copy on another host

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.blocks


def move_requests(directory: str, workers: Collection[str], secret: str) -> None:
    """Make these workers fail their requests at once, so that frontends resume the requests on
    other workers. Does nothing if the directory does not return the workers' addresses within
    ASK_S_MAX. Frontends then resume the requests when the workers have exited."""
    with (
        contextlib.suppress(StoreError),
        DirectoryClient(directory, ASK_S_MAX) as client,
        contextlib.closing(WorkerOutbox(encode, secret)) as outbox,
    ):
        for worker in client.workers():
            if worker.worker_id in workers:
                outbox.send(worker.inbox, DrainWorker(is_on=True, moves=True))


class HostDrain:
    def __init__(self, deployment: Deployment, host: str, directory: str) -> None:
        self.host = host
        # The only storage node of an elastic host has the host's name.
        is_elastic = host not in deployment.hosts
        self._nodes = {host} if is_elastic else {n.name for n in deployment.nodes_of(host)}
        self._models = {worker.model for worker in deployment.workers if worker.host == host}
        self._pools = tuple(f"{pool.name}_{host}_" for pool in deployment.pools)
        self._store = StoreClient(directory)
        self._store.directory.timeout_s = SNAPSHOT_S_MAX
        self._outbox = open_outbox()

    def close(self) -> None:
        self._outbox.close()
        self._store.close()

    @property
    def is_known(self) -> bool:
        """True if a node or worker of this host is registered in the directory."""
        snapshot = self._store.directory.snapshot()
        nodes = {info.node_id for info in snapshot.nodes}
        return bool(nodes & self._nodes or self._workers(snapshot.workers))

    def undo(self) -> None:
        self._drain_workers(False)
        self._drain_nodes(False)

    def run(
        self, requests_s_max: float, deadline_s: float, on_progress: Callable[[str], None]
    ) -> Left:
        """Drain the host for about `deadline_s` at most, and return what remains. After
        `requests_s_max`, unfinished requests are moved."""
        began_s = time.monotonic()
        give_up_s = began_s + deadline_s
        while True:
            is_late = time.monotonic() > began_s + requests_s_max
            self._drain_workers(True, moves=is_late)  # repeated, because a message may be lost
            requests = self.requests()
            if not requests or time.monotonic() > give_up_s:
                break
            on_progress(f"{requests} requests at workers of {self.host}" + ", moved now" * is_late)
            time.sleep(LOOK_S)
        self._copy_lonely(give_up_s, on_progress)
        self._drain_nodes(True)
        blocks = self._copy_lonely(give_up_s, on_progress)
        return Left(self.requests(), blocks)

    def _drain_workers(self, is_on: bool, moves: bool = False) -> None:
        for worker in self._workers(self._store.directory.workers()):
            self._outbox.send(worker.inbox, DrainWorker(is_on, moves))

    def _drain_nodes(self, is_on: bool) -> None:
        for info in self._store.directory.nodes():
            if info.node_id.removesuffix(SSD_SUFFIX) in self._nodes:
                self._store.directory.drain(info.node_id, is_on)

    def requests(self) -> int:
        """The number of queued and running requests in the last reports of the host's workers."""
        snapshot = self._store.directory.snapshot()
        ours = {(each.worker_id, each.incarnation) for each in self._workers(snapshot.workers)}
        return sum(
            report.queue_requests + report.running
            for report in snapshot.reports
            if (report.worker_id, report.incarnation) in ours
        )

    def _workers(self, workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """The host's workers in the file, and all others with a name POOL_HOST_..., such as the
        worker of an elastic host."""
        return [
            worker
            for worker in workers
            if worker.worker_id in self._models or worker.worker_id.startswith(self._pools)
        ]

    def _lonely(self) -> list[bytes]:
        """Keys of blocks without a copy on another host, in DRAM or on SSD."""
        holders = self._store.directory.snapshot().holders
        return [
            key
            for key, names in holders
            if names and all(name.removesuffix(SSD_SUFFIX) in self._nodes for name in names)
        ]

    def _copy_lonely(self, give_up_s: float, on_progress: Callable[[str], None]) -> int:
        """Copy blocks to other hosts until none is left, no further block can be copied, or the
        time is over. Return the number of blocks that are left. A batch goes to one node, to keep
        prefixes together. After a pass without progress, a node is chosen for each block."""
        blocks, is_scattered = self._lonely(), False
        while blocks and time.monotonic() < give_up_s:
            on_progress(f"{len(blocks)} blocks are on {self.host} alone")
            self._copy(blocks, give_up_s, is_scattered)
            before, blocks = len(blocks), self._lonely()
            if len(blocks) >= before and is_scattered:
                break  # the other nodes are full, or cannot be reached
            is_scattered = len(blocks) >= before
        return len(blocks)

    def _copy(self, keys: list[bytes], give_up_s: float, is_scattered: bool) -> None:
        """Try to copy each block once. The directory chooses a node by the first block of a batch,
        or a node for each block if `is_scattered`."""
        directory = self._store.directory
        for start in range(0, len(keys), MOVED_AT_ONCE):
            left_s = min(COPY_S_MAX, give_up_s - time.monotonic())
            if left_s <= 0:
                return
            part = keys[start : start + MOVED_AT_ONCE]
            excluded = [
                info.node_id
                for info in directory.nodes()
                if info.node_id in self._nodes or not info.control or info.is_ssd
            ]
            placed = part if is_scattered else part[:1]
            targets = directory.place(placed, excluded)
            by_target: dict[str, list[bytes]] = {}
            for key, target in zip(
                part, targets if is_scattered else targets * len(part), strict=True
            ):
                by_target.setdefault(target, []).append(key)
            for target, chosen in by_target.items():
                if target:
                    self._store.change_replica(chosen, add=[target], deadline_s=left_s)
