"""Control socket of a storage node: a ROUTER socket and a small thread pool.

One thread owns the ROUTER socket and only moves messages. A pool of THREADS threads carries out the
requests. At most REQUESTS_MAX requests are accepted and not yet answered. Further requests are
rejected at once, so that their clients can recompute the blocks without delay. ZeroMQ drops an
answer whose client is gone.

The verb `load` restores blocks from the SSD to the segment. The client has allocated the slots and
commits the blocks afterwards. The node writes the slot headers, because only the node detects when
the bytes are complete. If a header has a newer generation than the request, another writer owns the
slot, and the node does not change it. The verb `fetch` copies blocks of other nodes to this node.

Not here: the messages (wire/node_protocol.py), the disk (ssd/).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import get_args

import zmq

from mooncake_store.client.restorer import LEASE_MARGIN_S
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import EpochPassed, RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.layout import STATE_READY
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.node.puller import Puller
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from mooncake_store.ssd.entries import SsdEntry
from mooncake_store.ssd.ssd_tier import BlockJob, LoadOutcome, SsdTier
from mooncake_store.wire import node_protocol as protocol
from mooncake_store.wire.node_protocol import AnyControl, NodeStats, Restore
from mooncake_store.wire.request_reply import Responder, listening

THREADS = 4
REQUESTS_MAX = 256  # maximum number of requests accepted and not yet answered
GONE = (LoadOutcome.MISSING, LoadOutcome.CORRUPT)  # the directory must drop such an SSD copy


class NodeControl:
    """Receives requests from construction on, and answers them from serve() until close()."""

    def __init__(self, address: str) -> None:
        """Bind; with port 0, `self.address` has the real port. RequestInvalid: cannot bind."""
        self._responder: Responder[AnyControl] = Responder(get_args(AnyControl), "node")
        self._context = zmq.Context()
        try:
            self._socket, self.address = listening(self._context, zmq.ROUTER, address)
        except StoreError:
            self._context.destroy(linger=0)
            raise
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestInvalid(
                f"cannot listen at --control {address}: {error}; use ipc://PATH with a path of at "
                "most 107 bytes, or tcp://HOST:PORT with an address of this host"
            ) from error
        self._path = address.removeprefix("ipc://") if address.startswith("ipc:///") else ""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._answers: deque[list[bytes]] = deque()
        self.waiting = 0  # number of requests accepted and not yet answered
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def serve(self, answer: Callable[[AnyControl, float], object]) -> None:
        """Answer requests by `answer(request, monotonic time of arrival)`, in several threads."""
        self._answer = answer
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        while not self._is_closing:
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            while self._answers:
                self._send(self._answers.popleft())
            with contextlib.suppress(zmq.Again):
                while True:
                    self._accept(self._socket.recv_multipart(zmq.NOBLOCK))

    def _accept(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        with self._lock:
            is_full = self.waiting >= REQUESTS_MAX
            self.waiting += not is_full
        if is_full:
            busy = StoreUnavailable(f"{REQUESTS_MAX} requests wait at this node: recompute instead")
            self._send([sender, *self._responder.refusal(rest, busy)])
            return
        self._pool.submit(self._work, sender, rest, time.monotonic())

    def _work(self, sender: bytes, frames: list[bytes], arrived_s: float) -> None:
        answer = self._responder.reply(frames, lambda request: self._answer(request, arrived_s))
        self._answers.append([sender, *answer])
        with self._lock:
            self.waiting -= 1
        with contextlib.suppress(OSError):  # this NodeControl is closed now
            os.eventfd_write(self._wakeup, 1)

    def _send(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Finish and answer the requests that are being carried out; drop the rest. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._answers:  # one may be the answer to `leave`, after which the node exits
            self._send(self._answers.popleft())
        self._context.destroy(linger=200)
        os.close(self._wakeup)
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


@dataclass(eq=False)
class NodeVerbs:
    """Carries out requests; called from several threads."""

    _info: NodeInfo
    _memory: SlotMemory
    _directory: DirectoryClient
    _tier: Callable[[], SsdTier | None]  # the open SSD tier, if any
    _puller: Puller
    _stats: Callable[[], NodeStats]
    _leave: Callable[[], None]  # ends the process
    _epoch: Callable[[], int]  # epoch of the directory that this node last registered with
    restores_missed: int = 0  # blocks that `load` requests named and the node did not restore

    def answer(self, request: AnyControl, arrived_s: float) -> object:
        """The reply to a request that arrived at `arrived_s` (monotonic)."""
        if isinstance(request, protocol.Ping):
            return self._info.incarnation
        if isinstance(request, protocol.LoadBlocks):
            return self._load(request.blocks, arrived_s + request.deadline_s, request.epoch)
        if isinstance(request, protocol.AskNodeStats):
            return self._stats()
        if isinstance(request, protocol.Leave):
            self._leave()
            return None
        return self._fetch(request, arrived_s + request.deadline_s)

    def _refuse_epoch(self, epoch: int) -> None:
        if epoch not in (0, self._epoch()):
            raise EpochPassed(
                f"the directory of epoch {epoch} granted these slots or leases, but node "
                f"{self._info.node_id} has registered with epoch {self._epoch()}: allocate again"
            )

    def _fetch(self, request: protocol.Fetch, until_s: float) -> list[bool]:
        if len(request.keys) != len(request.copies):
            raise RequestInvalid(
                f"fetch has {len(request.keys)} keys and {len(request.copies)} copies, not one each"
            )
        self._refuse_epoch(request.epoch)
        return self._puller.pull(request.keys, request.copies, until_s)

    def _load(self, blocks: list[Restore], until_s: float, epoch: int) -> list[bool]:
        tier = self._tier()
        self._refuse_epoch(epoch)
        for block in blocks:
            if not self._memory.shape.holds(block.slot, block.size_bytes):
                raise RequestInvalid(
                    f"slot {block.slot} with {block.size_bytes} bytes exceeds the segment of "
                    f"{self._info.node_id} ({self._memory.shape.units} units)"
                )
        taken = [block for block in blocks if tier is not None and self._take(block, until_s)]
        self._refuse_epoch(epoch)  # if this raises nothing, later inventories have the headers
        outcomes = self._restore(tier, taken, until_s) if tier else []
        whole = set()
        for block, (outcome, layers) in zip(taken, outcomes, strict=True):
            if outcome is LoadOutcome.WHOLE:
                header = SlotHeader(
                    state=STATE_READY,
                    generation=block.generation,
                    key=block.key,
                    checksum=block.checksum,
                    length_bytes=block.size_bytes,
                    layers=layers,
                )
                self._memory.write_header(block.slot, header)
                whole.add(block.slot)
            elif outcome in GONE:
                with contextlib.suppress(StoreError):  # after an error, the next `load` retries
                    self._directory.drop_copy(
                        block.key, self._info.node_id + SSD_SUFFIX, block.ssd_generation
                    )
        self.restores_missed += len(blocks) - len(whole)
        return [block.slot in whole for block in blocks]

    def _take(self, block: Restore, until_s: float) -> bool:
        """Write a header with STATE_WRITING. False: the slot has a newer generation."""
        if self._memory.is_newer(block.slot, block.generation):
            return False
        lease_s = max(0.0, until_s - time.monotonic()) + LEASE_MARGIN_S
        header = SlotHeader.writing(block.generation, block.key, block.size_bytes, lease_s)
        self._memory.write_header(block.slot, header)
        return True

    def _restore(
        self, tier: SsdTier, taken: Sequence[Restore], until_s: float
    ) -> list[tuple[LoadOutcome, int]]:
        """Load payloads and digests into the segment: (outcome, number of layers) of each block."""
        jobs = [self._job(tier, block) for block in taken]
        slots = {job.memory_bytes: block.slot for job, block in zip(jobs, taken, strict=True)}

        def on_digests(job: BlockJob, digests: bytes) -> None:
            slot = slots[job.memory_bytes]
            self._memory.write_digests(slot, job.entry.size_bytes, digests)

        outcomes = tier.load(jobs, until_s, on_digests)
        return [(outcome, job.entry.layers) for outcome, job in zip(outcomes, jobs, strict=True)]

    def _job(self, tier: SsdTier, block: Restore) -> BlockJob:
        asked = SsdEntry(
            block.key, block.ssd_slot, block.ssd_generation, block.checksum, block.size_bytes
        )
        known = tier.manifest.table.find(block.ssd_slot)  # only the manifest has `layers`
        entry = asked if known is None else asked._replace(layers=known.layers)
        return BlockJob(entry, self._memory.shape.slot_offset_bytes(block.slot))
