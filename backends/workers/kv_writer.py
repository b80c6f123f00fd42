"""Engine pages -> store, layer by layer, while the next layer is computed.

The engine thread says "this layer of these blocks is in the pages"; a thread of the writer copies
it into slots of the worker's own node, tells the decode worker about it, and commits each block
once it is whole. Blocks that the index cannot hold (the partial last one, or one that another
request is just writing) travel as ephemeral objects of the request.

Not here: the way back (kv_loader.py), which blocks are missing (prefill_worker.py).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.errors import Overloaded, ServingError, WorkerUnavailable
from backends.workers.protocol import BlockRef, LayersReady, WorkerOutbox
from mooncake_store.block_keys import tail_key
from mooncake_store.client.store import Store, checksum
from mooncake_store.errors import StoreError
from mooncake_store.layout import KvLayout
from mooncake_store.records.blocks import Slot

log = logging.getLogger(__name__)


def object_key(request_id: str, index: int) -> bytes:
    """The key of block `index` of a request that travels as an ephemeral object."""
    return tail_key(f"{request_id}/{index}")


@dataclass(slots=True)
class BlockPut:
    """The blocks of one request that must reach the store, and how far they got."""

    request_id: str
    kv_tokens: int
    pages: Sequence[int]  # pages[i] holds block i
    keys: Sequence[bytes]  # of the full blocks
    first_block: int  # blocks before it are in the store already
    decode_inbox: str = ""
    reserve_tokens: int = 0
    tenant: str = ""  # whose quota its blocks in the index count for
    slots: dict[int, Slot] = field(default_factory=dict)
    slot_keys: dict[int, bytes] = field(default_factory=dict)
    refs: dict[int, BlockRef] = field(default_factory=dict)
    error: Exception | None = None
    is_ended: bool = False  # its pages are another's now, or soon: nothing more is written for it


class KvWriter:
    """Puts blocks of one engine into one node, in a thread of its own, in order."""

    def __init__(
        self, store: Store, layout: KvLayout, pool: np.ndarray, outbox: WorkerOutbox, lease_s: float
    ) -> None:
        self._store = store
        self._layout = layout
        self._pool = pool
        self._outbox = outbox
        self._lease_s = lease_s
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=5.0)

    def layer_done(self, put: BlockPut, blocks: Sequence[int], layer: int) -> None:
        """Called from the engine thread: `layer` of `blocks` is in the pages. Never blocks."""
        self._tasks.put(lambda: self._guard(put, lambda: self._copy_layer(put, blocks, layer)))

    def blocks_done(self, put: BlockPut, blocks: Sequence[int]) -> None:
        """All layers of `blocks` were announced: make them readable for everybody."""
        self._tasks.put(lambda: self._guard(put, lambda: self._commit(put, blocks)))

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` in the writer's thread after everything that was put before."""
        self._tasks.put(action)

    def put_whole(self, put: BlockPut, blocks: Sequence[int], is_handover: bool = False) -> None:
        """All layers at once: blocks that decode has filled, or of engines that show no layers.

        A hand-over must arrive: what the index does not take travels as an object of the request.
        """
        self._tasks.put(lambda: self._guard(put, lambda: self._put_whole(put, blocks, is_handover)))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # edge: the writer must outlive any one request
            log.exception("a write to the store failed")

    def _guard(self, put: BlockPut, action: Callable[[], None]) -> None:
        """The first error of a request ends its writing; the worker finds it in `put.error`."""
        if put.is_ended or put.error is not None:
            return
        try:
            action()
        except ServingError as error:
            put.error = error
        except StoreError as error:
            put.error = WorkerUnavailable(f"store: {error}")
        except Exception as error:  # edge: what was written of it is not known any more
            log.exception("a write of %s failed", put.request_id)
            put.error = WorkerUnavailable(f"its KV was not written: {error!r}")
        if put.error is not None:
            self._store.release(put.request_id)

    def _page(self, put: BlockPut, block: int) -> np.ndarray:
        start = put.pages[block] * self._layout.block_bytes
        return self._pool[start : start + self._layout.block_bytes]

    def _ensure_slots(self, put: BlockPut, blocks: Sequence[int], may_use_objects: bool) -> None:
        missing = [block for block in blocks if block not in put.slots]
        by_key = [block for block in missing if block < len(put.keys)]
        objects = [block for block in missing if block >= len(put.keys)]
        if by_key:
            wanted = self._store.allocate(
                [put.keys[block] for block in by_key], put.request_id, self._lease_s,
                tenant=put.tenant,
            )  # fmt: skip
            for block, slot in zip(by_key, wanted.slots, strict=True):
                if slot is not None:
                    put.slots[block], put.slot_keys[block] = slot, put.keys[block]
                elif may_use_objects:  # others write it, or the quota is full: carry our own
                    objects.append(block)
        if objects:
            keys = [object_key(put.request_id, block) for block in objects]
            wanted = self._store.allocate(keys, put.request_id, self._lease_s, ephemeral=True)
            for block, key, slot in zip(objects, keys, wanted.slots, strict=True):
                if slot is None:
                    raise Overloaded(
                        "store_full",
                        f"the storage node has no room for {len(objects)} blocks of this request: "
                        "all of its slots are in use",
                        1.0,
                    )
                put.slots[block], put.slot_keys[block] = slot, key

    def _copy_layer(self, put: BlockPut, blocks: Sequence[int], layer: int) -> None:
        self._ensure_slots(put, blocks, may_use_objects=True)
        start = self._layout.layer_offset_bytes(layer)
        span = slice(start, start + self._layout.layer_bytes)
        sums, refs = [], []
        for block in blocks:
            slot = put.slots[block]
            source = self._page(put, block)[span]
            np.copyto(self._store.slot_view(slot)[span], source)
            if put.decode_inbox:
                sums.append(checksum(source))
                refs.append(BlockRef(block, slot.node_id, slot.slot, slot.generation, 0))
        if refs:
            self._tell(put, layer, refs, sums)

    def _put_whole(self, put: BlockPut, blocks: Sequence[int], is_handover: bool) -> None:
        self._ensure_slots(put, blocks, may_use_objects=is_handover)
        for block in blocks:
            if block in put.slots:
                np.copyto(
                    self._store.slot_view(put.slots[block])[: self._layout.block_bytes],
                    self._page(put, block),
                )
        self._commit(put, [block for block in blocks if block in put.slots])
        if is_handover and put.decode_inbox:
            self._tell(put, -1, [put.refs[block] for block in blocks], [])

    def _commit(self, put: BlockPut, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        sums = [checksum(self._page(put, block)) for block in blocks]
        triples = [
            (put.slot_keys[block], put.slots[block], value)
            for block, value in zip(blocks, sums, strict=True)
        ]
        accepted = self._store.commit(triples, put.request_id, self._lease_s)
        for block, value, is_ready in zip(blocks, sums, accepted, strict=True):
            if not is_ready:
                raise StoreError(f"slot {put.slots[block]} was taken away while it was written")
            slot = put.slots[block]
            put.refs[block] = BlockRef(block, slot.node_id, slot.slot, slot.generation, value)

    def tell_cached(self, put: BlockPut) -> None:
        """Announce the blocks that were in the store from the start."""
        refs = [put.refs[block] for block in sorted(put.refs)]
        if put.decode_inbox and refs:
            self._tell(put, -1, refs, [])

    def _tell(self, put: BlockPut, layer: int, refs: list[BlockRef], sums: list[int]) -> None:
        self._outbox.send(
            put.decode_inbox,
            LayersReady(put.request_id, put.kv_tokens, put.reserve_tokens, layer, refs, sums),
        )
