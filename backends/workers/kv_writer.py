"""Copies KV from engine pages to the store layer by layer, while the next layer is computed.

The engine thread reports that a layer of some blocks is in the pages. The writer's thread copies
the layer into slots of the local store node, notifies the decode worker, and commits each block
when all its layers are written. Some blocks cannot be in the directory's index: the partial last
block, a block that another request is writing, a block beyond the tenant's quota. Such a block is
an *ephemeral object*: only its exact key finds it, and it is freed with its last lease.

In a pipeline group, pages have only some of the layers, so the group's workers write each block
together. Stage 0 allocates the slots and sends them to the other stages. Each stage writes its own
layers and returns a digest (checksum) per layer. Stage 0 commits the block when it has all digests.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from backends.engine.batching.layer_passes import LayerRings
from backends.errors import Overloaded, ServingError, WorkerUnavailable
from backends.workers.lifecycle.events import On
from backends.workers.protocol import BlockRef, LayersReady, WorkerOutbox
from mooncake_store.block_keys import tail_key
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.errors import StoreError
from mooncake_store.layout import PageLayout, blocks_touched
from mooncake_store.memory.digests import block_checksum, pack_digests
from mooncake_store.records.blocks import Slot

log = logging.getLogger(__name__)
NOT_SAVED = "the KV of a preempted request was not saved"


class JobEvent(NamedTuple):
    """A mark in the writer's queue: an event of a job (lifecycle/events.py)."""

    job: Any
    event: On
    value: Any = None


def object_key(request_id: str, index: int) -> bytes:
    """The block key of block `index` of a request, if the block is stored as ephemeral object."""
    return tail_key(f"{request_id}/{index}")


@dataclass(slots=True)
class BlockPut:
    """The blocks of one request that must be written to the store, and their state."""

    request_id: str
    kv_tokens: int  # tokens whose KV the request has
    pages: Sequence[int]  # pages[i] holds block i
    keys: Sequence[bytes]  # block keys of the full blocks
    first_block: int  # first block to compute; the blocks before it were cached
    decode_inbox: str = ""  # inbox of the decode worker for LayersReady; "": send none
    reserve_tokens: int = 0  # tokens for which the decode worker reserves pages
    tenant: str = ""  # tenant whose quota the indexed blocks count against
    slots: dict[int, Slot] = field(default_factory=dict)  # block -> its allocated slot
    slot_keys: dict[int, bytes] = field(default_factory=dict)  # block -> block key of its slot
    refs: dict[int, BlockRef] = field(default_factory=dict)  # committed and cached blocks
    digests: dict[int, dict[int, int]] = field(default_factory=dict)  # block -> layer -> digest
    error: Exception | None = None  # first error; nothing is written after it
    has_late_write: bool = False  # True: a failed transfer may still write into the slots
    rings: LayerRings | None = None  # layer ring buffers of a layer-wise request, used as pages
    in_place: set[int] = field(default_factory=set)  # blocks that the engine itself writes to slots
    is_ended: bool = False  # True: the request has failed or left, so nothing more is written

    @property
    def stored_keys(self) -> list[bytes]:
        """Block keys of the blocks in `refs`, in order."""
        return [self.slot_keys.get(block) or self.keys[block] for block in sorted(self.refs)]

    def unstored_blocks(self) -> list[int]:
        """The blocks of a layer-wise request that the local node does not have yet."""
        assert self.rings is not None, f"{self.request_id} has whole pages"
        return [block for block in range(len(self.rings.numbers)) if block not in self.refs]


class KvWriter:
    """Writes the blocks of one engine into the store, in its own thread, one task at a time."""

    def __init__(
        self,
        store: WorkerStore,
        pages: PageLayout,
        pool: np.ndarray,
        outbox: WorkerOutbox,
        lease_s: float,
        deadline_s: float,
        export_pages: Callable[[Sequence[int]], None],
        on_mark: Callable[[Any], None] = lambda mark: None,
        on_error: Callable[[BlockPut], None] = lambda put: None,
    ) -> None:
        """`deadline_s`: time limit of one write into a node of another host.
        `export_pages`: copies pages from the engine's memory to `pool` (interface.py).
        `on_mark`, `on_error`: called in the writer's thread, the latter when `put.error` is set."""
        self._store = store
        self._pages = pages
        self._pool = pool
        self._outbox = outbox
        self._lease_s = lease_s
        self._deadline_s = deadline_s
        self._export_pages = export_pages
        self._on_mark = on_mark
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=5.0)

    def layer_done(self, put: BlockPut, blocks: Sequence[int], layer: int) -> None:
        """Queue the copy of `layer` of `blocks` from the pages to the store."""
        self._queue(put, lambda: self._copy_layer(put, blocks, layer))

    def blocks_done(self, put: BlockPut, blocks: Sequence[int]) -> None:
        """Queue the commit of `blocks`. Earlier tasks must provide the digests of all layers."""
        self._queue(put, lambda: self._commit(put, blocks))

    def allocate(self, put: BlockPut, blocks: Sequence[int]) -> None:
        """Queue the allocation of slots for `blocks`, into `put.slots`."""
        self._queue(put, lambda: self._ensure_slots(put, blocks, may_use_objects=True))

    def allocate_now(self, put: BlockPut, blocks: Sequence[int], may_use_objects: bool) -> None:
        """Allocate as many slots as the store has, in the caller's thread. Raises StoreError.

        Call this method before the first task for `put`, because tasks change `put` without a lock.
        """
        with contextlib.suppress(Overloaded):
            self._ensure_slots(put, blocks, may_use_objects)

    def add_digests(self, put: BlockPut, digests: Mapping[int, Mapping[int, int]]) -> None:
        """Queue digests (block -> layer -> digest) of layers that other workers have written."""

        def add() -> None:
            for block, of_layers in digests.items():
                put.digests.setdefault(block, {}).update(of_layers)

        self._queue(put, add)

    def begin_again(self, put: BlockPut) -> None:
        """Queue the release of all slots of `put`, because the request is computed again."""
        self._queue(put, lambda: self._give_up(put))

    def _give_up(self, put: BlockPut) -> None:
        if put.slots:
            self._store.abandon(list(put.slots.values()), put.request_id)
        for known in (put.slots, put.slot_keys, put.refs, put.digests):
            known.clear()

    def free_unfilled(self, put: BlockPut) -> None:
        """Free the slots of blocks that will never be committed. No other thread or process may
        write them.

        After a failed transfer, which may still write, this method does nothing: the directory
        quarantines the slots when their lease ends.
        """
        unfilled = [slot for block, slot in put.slots.items() if block not in put.refs]
        if unfilled and not put.has_late_write:
            with contextlib.suppress(StoreError):  # the slots are quarantined instead
                self._store.abandon(unfilled, put.request_id)

    def mark(self, mark: object) -> None:
        """Call `on_mark` with `mark` when all tasks that are queued now are done."""
        self._tasks.put(lambda: self._on_mark(mark))

    def put_whole(self, put: BlockPut, blocks: Sequence[int], is_handover: bool = False) -> None:
        """Queue the copy and commit of all layers of `blocks` at once.

        `is_handover`: blocks that the index does not take are stored as ephemeral objects of the
        request. Without `is_handover`, such blocks are skipped.
        """
        self._queue(put, lambda: self._put_whole(put, blocks, is_handover))

    def _queue(self, put: BlockPut, action: Callable[[], None]) -> None:
        self._tasks.put(lambda: self._guard(put, action))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # Catch all: a failed task must not end the writer's thread
            log.exception("a write to the store failed")

    def _guard(self, put: BlockPut, action: Callable[[], None]) -> None:
        """Run `action` unless the request's writing has ended. Keeps the first error in `put`."""
        if put.is_ended or put.error is not None:
            return
        try:
            action()
        except ServingError as error:  # raised before any transfer
            put.error = error
        except StoreError as error:
            put.has_late_write = True
            put.error = WorkerUnavailable(f"store: {error}")
        except Exception as error:  # Catch all: only this request fails
            put.has_late_write = True
            of_request = {"request_id": put.request_id}
            log.exception("a write of %s failed", put.request_id, extra=of_request)
            put.error = WorkerUnavailable(f"the request's KV was not written: {error!r}")
        if put.error is not None:
            self._on_error(put)

    def _ensure_slots(self, put: BlockPut, blocks: Sequence[int], may_use_objects: bool) -> None:
        missing = [block for block in blocks if block not in put.slots]
        by_key = [block for block in missing if block < len(put.keys)]
        objects = [block for block in missing if block >= len(put.keys)]
        if by_key:
            wanted = self._store.allocate(
                [put.keys[block] for block in by_key],
                put.request_id,
                self._lease_s,
                tenant=put.tenant,
            )
            for block, slot in zip(by_key, wanted.slots, strict=True):
                if slot is not None:
                    put.slots[block], put.slot_keys[block] = slot, put.keys[block]
                elif may_use_objects:  # another request writes the block, or the quota is exhausted
                    objects.append(block)
        if objects:
            keys = [object_key(put.request_id, block) for block in objects]
            wanted = self._store.allocate(keys, put.request_id, self._lease_s, ephemeral=True)
            for block, key, slot in zip(objects, keys, wanted.slots, strict=True):
                if slot is None:
                    raise Overloaded(
                        "store_full",
                        f"the storage node has no room for {len(objects)} blocks of this request: "
                        "all slots of the node are in use",
                        1.0,
                    )
                put.slots[block], put.slot_keys[block] = slot, key

    def _copy_layer(self, put: BlockPut, blocks: Sequence[int], layer: int) -> None:
        self._ensure_slots(put, blocks, may_use_objects=True)
        sums = [of_block[0] for of_block in self._write(put, blocks, range(layer, layer + 1))]
        if put.decode_inbox:
            slots = [(block, put.slots[block]) for block in blocks]
            refs = [BlockRef(block, *slot[:3], checksum=0) for block, slot in slots]
            self._notify(put, layer, refs, sums)

    def _write(self, put: BlockPut, blocks: Sequence[int], layers: range) -> list[tuple[int, ...]]:
        """Copy these layers from the pages into the slots. Returns the digests of each block."""
        copied = [block for block in blocks if block not in put.in_place]
        slots = [put.slots[block] for block in copied]
        offsets = [self._page_offset_bytes(put, block, layers) for block in copied]
        written = self._store.write(slots, self._pool, offsets, self._deadline_s, layers)
        of_blocks = dict(zip(copied, written, strict=True))
        if placed := [block for block in blocks if block in put.in_place]:
            there = self._store.digest([put.slots[block] for block in placed])
            of_blocks.update(zip(placed, there, strict=True))
        found = []
        for block in blocks:
            digests = of_blocks[block]
            if digests is None:
                raise StoreError(f"slot {put.slots[block]} was reclaimed before it was written")
            put.digests.setdefault(block, {}).update(zip(layers, digests, strict=True))
            found.append(digests)
        return found

    def _page_offset_bytes(self, put: BlockPut, block: int, layers: range) -> int:
        if put.rings is None:
            return self._pages.page_offset_bytes(put.pages[block])
        assert len(layers) == 1, (
            f"{layers} of block {block}: a ring buffer is read by single layers"
        )
        return put.rings.page_offset_bytes(block, layers.start)

    def _put_whole(self, put: BlockPut, blocks: Sequence[int], is_handover: bool) -> None:
        self._ensure_slots(put, blocks, may_use_objects=is_handover)
        given = [block for block in blocks if block in put.slots]
        self._export_pages([put.pages[block] for block in given])
        self._write(put, given, self._pages.layers.indices)
        self._commit(put, given)
        if is_handover and put.decode_inbox:
            self._notify(put, -1, [put.refs[block] for block in blocks], [])

    def save_soon(self, job: Any) -> None:
        """Queue `save` of a preempted job. `on_mark` then gets SAVED or SAVE_FAILED."""

        def save() -> None:
            try:
                job.saved = [] if job.is_leaving else self.save(job.saving)
                mark = JobEvent(job, On.SAVED)
            except (ServingError, StoreError) as error:
                mark = JobEvent(job, On.SAVE_FAILED, WorkerUnavailable(f"{NOT_SAVED}: {error}"))
            except Exception as error:  # Catch all: the pages are released in any case
                log.exception("saving %s failed", job.request_id)
                mark = JobEvent(job, On.SAVE_FAILED, WorkerUnavailable(f"{NOT_SAVED}: {error!r}"))
            self._on_mark(mark)

        self._tasks.put(save)

    def save(self, put: BlockPut) -> list[BlockRef]:
        """Write all KV of a request to the store, under its leases. Runs in the writer's thread.

        Leading blocks that the local node already has are not written again. Raises ServingError
        or StoreError.
        """
        found = self._store.lookup(put.keys, put.request_id, self._lease_s) if put.keys else []
        refs = []
        for block, copies in enumerate(found):
            local = [copy for copy in copies if copy.node_id == self._store.node_id]
            if not local:
                break
            refs.append(BlockRef(block, *local[0][:4]))
        blocks = blocks_touched(put.kv_tokens, self._pages.block.block_tokens)
        missing = range(len(refs), blocks)
        try:
            self._put_whole(put, missing, is_handover=True)
        except ServingError:  # raised before any transfer, so the slots can be freed now
            self.free_unfilled(put)
            raise
        return refs + [put.refs[block] for block in missing]

    def _commit(self, put: BlockPut, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        digests = [self._digests_of(put, block) for block in blocks]
        triples = [
            (put.slot_keys[block], put.slots[block], of_block)
            for block, of_block in zip(blocks, digests, strict=True)
        ]
        accepted = self._store.commit(triples, put.request_id, self._lease_s)
        for block, of_block, is_ready in zip(blocks, digests, accepted, strict=True):
            slot = put.slots[block]
            if not is_ready:
                raise StoreError(f"slot {slot} was reclaimed while it was written")
            put.refs[block] = BlockRef(block, *slot[:3], block_checksum(pack_digests(of_block)))
            del put.digests[block]

    def _digests_of(self, put: BlockPut, block: int) -> list[int]:
        """The digests of all layers of a block. Raises StoreError if one is missing."""
        known, layers = put.digests.get(block, {}), range(self._pages.block.layers)
        if missing := [layer for layer in layers if layer not in known]:
            raise StoreError(f"no worker reported layers {missing} of block {block} as written")
        return [known[layer] for layer in layers]

    def announce_cached(self, put: BlockPut) -> None:
        """Queue a message to the decode worker with the locations of the cached blocks."""

        def announce() -> None:
            refs = [put.refs[block] for block in sorted(put.refs)]
            if put.decode_inbox and refs:
                self._notify(put, -1, refs, [])

        self._tasks.put(announce)

    def _notify(self, put: BlockPut, layer: int, refs: list[BlockRef], sums: list[int]) -> None:
        self._outbox.send(
            put.decode_inbox,
            LayersReady(put.request_id, put.kv_tokens, put.reserve_tokens, layer, refs, sums),
        )
