"""A host emptied while everything goes on: its workers, and what only its storage nodes have.

    1. Its workers take no new requests.
    2. Requests that they have come to their end; those that take too long are moved: they fail
       there as if the worker had left, and their frontends go on with them elsewhere.
    3. Blocks whose only copies are on nodes of the host are copied to nodes of other hosts. Those
       pull them themselves, so no byte comes through here. What is on an SSD only is brought back
       into the node's DRAM for that, so its nodes take blocks until now.
    4. Its storage nodes take no new blocks, and what came meanwhile is copied too.

Afterwards the host may be stopped without loss. A worker that is started again takes requests; the
flag on storage nodes stays until `undo`, until they register again, or another directory leads.

What is at the host's frontend is bound to its clients' connections: it is not moved.
Not here: which keys that needs (operator.py).
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

LOOK_S = 1.0  # between two looks at reports, which come with a snapshot of all blocks
MOVED_AT_ONCE = 256  # blocks
COPY_S_MAX = 30.0  # for so many
ASK_S_MAX = 1.0
SNAPSHOT_S_MAX = 30.0  # one of millions of blocks


@dataclass(frozen=True, slots=True)
class Left:
    """What is still on the host."""

    requests: int  # at its workers
    blocks: int  # that no other host has

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.blocks


def move_requests(directory: str, workers: Collection[str], secret: str) -> None:
    """Requests at these workers go on elsewhere at once: their processes are about to end.

    As far as the directory says within ASK_S_MAX where they are; a request whose worker is not told
    goes on when that has ended.
    """
    with (
        contextlib.suppress(StoreError),
        DirectoryClient(directory, ASK_S_MAX) as client,
        contextlib.closing(WorkerOutbox(encode, secret)) as outbox,
    ):
        for worker in client.workers():
            if worker.worker_id in workers:
                outbox.send(worker.inbox, DrainWorker(is_on=True, moves=True))


class HostDrain:
    """Of one host of a deployment."""

    def __init__(self, deployment: Deployment, host: str, directory: str) -> None:
        self.host = host
        # An elastic host's own storage node is called like the host.
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
        """Does the directory know a node or a worker of this host?"""
        snapshot = self._store.directory.snapshot()
        nodes = {info.node_id for info in snapshot.nodes}
        return bool(nodes & self._nodes or self._workers(snapshot.workers))

    def undo(self) -> None:
        """Its workers and nodes take requests and blocks again."""
        self._tell_workers(False)
        self._tell_nodes(False)

    def run(
        self, requests_s_max: float, deadline_s: float, on_progress: Callable[[str], None]
    ) -> Left:
        """Empty it; what is left. Requests are moved after `requests_s_max`."""
        began_s = time.monotonic()
        give_up_s = began_s + deadline_s
        while True:
            is_late = time.monotonic() > began_s + requests_s_max
            self._tell_workers(True, moves=is_late)  # again: a message may be lost
            requests = self.requests()
            if not requests or time.monotonic() > give_up_s:
                break
            on_progress(f"{requests} requests are at its workers" + (", moved now" * is_late))
            time.sleep(LOOK_S)
        self._copy_lonely(give_up_s, on_progress)
        self._tell_nodes(True)
        blocks = self._copy_lonely(give_up_s, on_progress)
        return Left(self.requests(), blocks)

    def _tell_workers(self, is_on: bool, moves: bool = False) -> None:
        for worker in self._workers(self._store.directory.workers()):
            self._outbox.send(worker.inbox, DrainWorker(is_on, moves))

    def _tell_nodes(self, is_on: bool) -> None:
        for info in self._store.directory.nodes():
            if info.node_id.removesuffix(SSD_SUFFIX) in self._nodes:
                self._store.directory.drain(info.node_id, is_on)

    def requests(self) -> int:
        """At its workers, queued or running, as they reported last."""
        snapshot = self._store.directory.snapshot()
        ours = {(each.worker_id, each.incarnation) for each in self._workers(snapshot.workers)}
        return sum(
            report.queue_requests + report.running
            for report in snapshot.reports
            if (report.worker_id, report.incarnation) in ours
        )

    def _workers(self, workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """Those of the file, and those that an operator added under a like name."""
        return [
            worker
            for worker in workers
            if worker.worker_id in self._models or worker.worker_id.startswith(self._pools)
        ]

    def _lonely(self) -> list[bytes]:
        """Blocks that no node of another host has, in DRAM or on SSD."""
        holders = self._store.directory.snapshot().holders
        return [
            key
            for key, names in holders
            if names and all(name.removesuffix(SSD_SUFFIX) in self._nodes for name in names)
        ]

    def _copy_lonely(self, give_up_s: float, on_progress: Callable[[str], None]) -> int:
        """Until no block is on this host alone, or no more get away; how many still are.

        Batch by batch, because a prefix is of most use where all of it is; what does not fit so is
        scattered.
        """
        blocks, is_scattered = self._lonely(), False
        while blocks and time.monotonic() < give_up_s:
            on_progress(f"{len(blocks)} blocks are on {self.host} alone")
            self._copy(blocks, give_up_s, is_scattered)
            before, blocks = len(blocks), self._lonely()
            if len(blocks) >= before and is_scattered:
                break  # the other nodes have no room, or cannot be reached
            is_scattered = len(blocks) >= before
        return len(blocks)

    def _copy(self, keys: list[bytes], give_up_s: float, is_scattered: bool) -> None:
        """Each once, to where the directory would put the first of its batch, or it alone."""
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
            asked = part if is_scattered else part[:1]
            targets = directory.place(asked, excluded)
            by_target: dict[str, list[bytes]] = {}
            for key, target in zip(
                part, targets if is_scattered else targets * len(part), strict=True
            ):
                by_target.setdefault(target, []).append(key)
            for target, chosen in by_target.items():
                if target:
                    self._store.change_replica(chosen, add=[target], deadline_s=left_s)
