"""Engine pages -> store, layer by layer, while the next layer is computed.

The engine thread says "this layer of these blocks is in the pages"; a thread of the writer copies
it into slots of the worker's own node, tells the decode worker about it, and commits each block
once it is whole. Blocks that the index cannot hold (the partial last one, or one that another
request is just writing) travel as ephemeral objects of the request.

Where pages hold a part of the layers, the workers of a group write one block together: one of them
allocates the slots and tells the others, each writes its own layers, and who has the digests of all
of them commits the block.

Not here: the way back (kv_loader.py), which blocks are missing (prefill_worker.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.engine.batching.layer_passes import Windows
from backends.errors import Overloaded, ServingError, WorkerUnavailable
from backends.workers.protocol import BlockRef, LayersReady, WorkerOutbox
from mooncake_store.block_keys import tail_key
from mooncake_store.client.store import Store
from mooncake_store.errors import StoreError
from mooncake_store.layout import PageLayout, blocks_touched
from mooncake_store.memory.digests import block_checksum, pack_digests
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
    digests: dict[int, dict[int, int]] = field(default_factory=dict)  # block -> layer -> its digest
    is_owner: bool = True  # its leases are this worker's business; False: of another of its group
    error: Exception | None = None
    windows: Windows | None = None  # instead of whole pages
    in_place: set[int] = field(default_factory=set)  # blocks that the engine puts into their slots
    is_ended: bool = False  # its pages are another's now, or soon: nothing more is written for it

    def unstored_blocks(self) -> list[int]:
        """Of all its blocks those that the own node did not have from the start."""
        assert self.windows is not None, f"{self.request_id} has whole pages"
        return [block for block in range(len(self.windows.numbers)) if block not in self.refs]


class KvWriter:
    """Puts blocks of one engine into the store, in a thread of its own, in order."""

    def __init__(
        self,
        store: Store,
        pages: PageLayout,
        pool: np.ndarray,
        outbox: WorkerOutbox,
        lease_s: float,
        deadline_s: float,
        export_pages: Callable[[Sequence[int]], None],
    ) -> None:
        """`deadline_s`: of one write into a node of another host. `export_pages`: brings pages of
        `pool` up to date, where the engine computes in other memory (interface.py)."""
        self._store = store
        self._pages = pages
        self._pool = pool
        self._outbox = outbox
        self._lease_s = lease_s
        self._deadline_s = deadline_s
        self._export_pages = export_pages
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
        """The digests of all layers of `blocks` are known: make them readable for everybody."""
        self._tasks.put(lambda: self._guard(put, lambda: self._commit(put, blocks)))

    def allocate(self, put: BlockPut, blocks: Sequence[int]) -> None:
        """Slots for `blocks`, in `put.slots`."""
        ensure = functools.partial(self._ensure_slots, put, blocks, may_use_objects=True)
        self._tasks.put(lambda: self._guard(put, ensure))

    def allocate_now(self, put: BlockPut, blocks: Sequence[int], may_use_objects: bool) -> None:
        """The same, as far as there is room, in the caller's thread: before anything is written of
        it. Raises StoreError."""
        with contextlib.suppress(Overloaded):
            self._ensure_slots(put, blocks, may_use_objects)

    def add_digests(self, put: BlockPut, digests: Mapping[int, Mapping[int, int]]) -> None:
        """block -> layer -> digest, of layers that other workers have written."""

        def add() -> None:
            for block, of_layers in digests.items():
                put.digests.setdefault(block, {}).update(of_layers)

        self._tasks.put(lambda: self._guard(put, add))

    def begin_again(self, put: BlockPut) -> None:
        """What was written of it is given up: it will be computed anew."""
        self._tasks.put(lambda: self._guard(put, lambda: self._give_up(put)))

    def _give_up(self, put: BlockPut) -> None:
        if put.slots:
            self._store.abandon(list(put.slots.values()), put.request_id)
        for known in (put.slots, put.slot_keys, put.refs, put.digests):
            known.clear()

    def free_unfilled(self, put: BlockPut) -> None:
        """In the writer's thread: what is not committed of it by now never will be. Where nothing
        can be on its way there, its slots are free at once, instead of resting as those of a writer
        that vanished; so prompts that are stopped by the dozen leave room for others."""
        unfilled = [slot for block, slot in put.slots.items() if block not in put.refs]
        is_alone = put.is_owner and self._pages.is_whole
        if unfilled and is_alone and not put.in_place and put.error is None:
            with contextlib.suppress(StoreError):  # then they rest
                self._store.abandon(unfilled, put.request_id)

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
        except ServingError as error:  # before anything of it was on its way
            try:
                self.free_unfilled(put)
            finally:
                put.error = error
        except StoreError as error:
            put.error = WorkerUnavailable(f"store: {error}")
        except Exception as error:  # edge: what was written of it is not known any more
            of_request = {"request_id": put.request_id}
            log.exception("a write of %s failed", put.request_id, extra=of_request)
            put.error = WorkerUnavailable(f"its KV was not written: {error!r}")
        if put.error is not None and put.is_owner and not put.in_place:
            self._store.release(put.request_id)

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
        sums = [of_block[0] for of_block in self._write(put, blocks, range(layer, layer + 1))]
        if put.decode_inbox:
            slots = [(block, put.slots[block]) for block in blocks]
            refs = [BlockRef(block, *slot[:3], checksum=0) for block, slot in slots]
            self._tell(put, layer, refs, sums)

    def _write(self, put: BlockPut, blocks: Sequence[int], layers: range) -> list[tuple[int, ...]]:
        """These layers of the pages into their slots: the digests of what was written."""
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
                raise StoreError(f"slot {put.slots[block]} was taken away before it was written")
            put.digests.setdefault(block, {}).update(zip(layers, digests, strict=True))
            found.append(digests)
        return found

    def _page_offset_bytes(self, put: BlockPut, block: int, layers: range) -> int:
        if put.windows is None:
            return self._pages.page_offset_bytes(put.pages[block])
        assert len(layers) == 1, f"{layers} of block {block} are not in its window at once"
        return put.windows.page_offset_bytes(block, layers.start)

    def _put_whole(self, put: BlockPut, blocks: Sequence[int], is_handover: bool) -> None:
        self._ensure_slots(put, blocks, may_use_objects=is_handover)
        given = [block for block in blocks if block in put.slots]
        self._export_pages([put.pages[block] for block in given])
        self._write(put, given, self._pages.layers.indices)
        self._commit(put, given)
        if is_handover and put.decode_inbox:
            self._tell(put, -1, [put.refs[block] for block in blocks], [])

    def save(self, put: BlockPut) -> list[BlockRef]:
        """In the writer's thread: all KV of a request is in the store, leased to it. What the own
        node has already is not written again. Raises ServingError or StoreError."""
        found = self._store.lookup(put.keys, put.request_id, self._lease_s) if put.keys else []
        refs = []
        for block, copies in enumerate(found):
            own = [copy for copy in copies if copy.node_id == self._store.node_id]
            if not own:
                break
            refs.append(BlockRef(block, *own[0][:4]))
        blocks = blocks_touched(put.kv_tokens, self._pages.block.block_tokens)
        rest = range(len(refs), blocks)
        try:
            self._put_whole(put, rest, is_handover=True)
        except ServingError:  # before anything of it was on its way
            self.free_unfilled(put)
            raise
        return refs + [put.refs[block] for block in rest]

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
                raise StoreError(f"slot {slot} was taken away while it was written")
            put.refs[block] = BlockRef(block, *slot[:3], block_checksum(pack_digests(of_block)))
            del put.digests[block]

    def _digests_of(self, put: BlockPut, block: int) -> list[int]:
        """Of all its layers, whoever wrote them."""
        known, layers = put.digests.get(block, {}), range(self._pages.block.layers)
        if missing := [layer for layer in layers if layer not in known]:
            raise StoreError(f"nobody said that layers {missing} of block {block} are written")
        return [known[layer] for layer in layers]

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
