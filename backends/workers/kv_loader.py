"""Reads KV from the store into engine pages and verifies it against checksums.

Methods report missing blocks in their result, never by an exception. A prefill worker loads the
cached prefix. A decode worker loads the handed-over KV: layers when they are announced, and the
remaining blocks when the request arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from backends.engine.batching.layer_passes import LayerRings
from backends.engine.batching.pages import PagePool
from backends.errors import StoreLost
from backends.workers.arrivals import Arrival
from backends.workers.protocol import BlockRef, LayersReady
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.layout import PageLayout
from mooncake_store.records.blocks import Copy


class KvLoader:
    """Reads blocks into the pages of one engine."""

    def __init__(
        self, store: WorkerStore, pages: PageLayout, pool: np.ndarray, deadline_s: float
    ) -> None:
        self._store = store
        self._pages = pages
        self._pool = pool
        self._deadline_s = deadline_s

    def load_copies(self, copies: Sequence[Copy], pages: Sequence[int]) -> int:
        """Read block i of `copies` into pages[i]; in a pipeline stage only the stage's layers.
        Returns the number of leading blocks that arrived."""
        if not copies:
            return 0
        arrived = self._read_whole(copies, pages[: len(copies)])
        return arrived.index(False) if False in arrived else len(arrived)

    def _read_whole(self, copies: Sequence[Copy], pages: Sequence[int]) -> list[bool]:
        """Read block i of `copies` into pages[i]. Returns for each block whether it arrived."""
        offsets = [self._pages.page_offset_bytes(page) for page in pages]
        return self._store.read(copies, self._pool, offsets, self._deadline_s)

    def load_layer(
        self,
        copies: Sequence[Copy],
        digests: Sequence[int],
        rings: LayerRings,
        layer: int,
        deadline_s: float,
    ) -> bool:
        """Read one layer of blocks 0, 1, ... into their ring buffers. True if all arrived."""
        offsets = [rings.page_offset_bytes(block, layer) for block in range(len(copies))]
        only = range(layer, layer + 1)
        return all(self._store.read(copies, self._pool, offsets, deadline_s, only, digests))

    @contextlib.contextmanager
    def _counting(self, arrival: Arrival) -> Iterator[None]:
        """Add the bytes that the `with` block reads to `arrival`. No other thread may read."""
        before = {name: counted.read_bytes for name, counted in self._store.counters().items()}
        yield
        for name, counted in self._store.counters().items():
            if moved := counted.read_bytes - before.get(name, 0):
                arrival.read_bytes[name] = arrival.read_bytes.get(name, 0) + moved

    def load_announced(self, arrival: Arrival, message: LayersReady) -> None:
        """Read what `message` announces. If a block does not arrive, `load_rest` reads it later."""
        late = self.pending_pages()
        refs = [
            ref
            for ref in message.blocks
            if ref.index < len(arrival.pages) and arrival.pages[ref.index] not in late
        ]
        if not refs:
            return
        copies = [self._copy(ref) for ref in refs]
        pages = [arrival.pages[ref.index] for ref in refs]
        with self._counting(arrival):
            if message.layer < 0:
                layers = self._pages.layers.indices
                arrived = self._read_whole(copies, pages)
            else:
                layers, announced = range(message.layer, message.layer + 1), message.blocks
                sums = dict(zip((ref.index for ref in announced), message.checksums, strict=False))
                digests = [sums[ref.index] for ref in refs]
                offsets = [self._pages.page_offset_bytes(page) for page in pages]
                arrived = self._store.read(
                    copies, self._pool, offsets, self._deadline_s, layers, digests
                )
        for ref, is_here in zip(refs, arrived, strict=True):
            if is_here:
                arrival.note(ref, layers)

    def _copy(self, ref: BlockRef) -> Copy:
        size_bytes = self._pages.block.block_bytes
        return Copy(ref.node_id, ref.slot, ref.generation, ref.checksum, size_bytes)

    def load_rest(self, arrival: Arrival, refs: Sequence[BlockRef]) -> list[int]:
        """Read all blocks that are not in their pages. Returns the indices of missing blocks.

        If an earlier read may still write some of the pages, it could overwrite verified KV. Then
        the blocks of these pages count as missing, and no block is read.
        """
        late = self.pending_pages()
        gone = [ref.index for ref in refs if arrival.pages[ref.index] in late]
        wanted = [ref for ref in refs if not arrival.has_whole(ref, len(self._pages.layers))]
        if gone or not wanted:
            return gone
        copies = [self._copy(ref) for ref in wanted]
        with self._counting(arrival):
            arrived = self._read_whole(copies, [arrival.pages[ref.index] for ref in wanted])
        return [ref.index for ref, is_here in zip(wanted, arrived, strict=True) if not is_here]

    def forget(self, pages: Sequence[int]) -> None:
        """Called with released pages. For subclasses that keep records of pages."""

    def refuse_late(self, pages: Sequence[int]) -> None:
        """Raise StoreLost if a read past its deadline could overwrite KV in these pages."""
        if late := self.pending_pages().intersection(pages):
            raise StoreLost(f"a read past its deadline may still write {len(late)} of the pages")

    def pending_pages(self) -> set[int]:
        """Pages that a transfer past its deadline may still write."""
        pages, page_bytes = set[int](), self._pages.page_bytes
        for span in self._store.pending_offsets(self._pool):
            last_byte = span.offset_bytes + span.length_bytes - 1
            pages.update(range(span.offset_bytes // page_bytes, last_byte // page_bytes + 1))
        return pages


class PageGuard:
    """Releases pages to the pool only when no transfer can write them any more.

    A transfer past its deadline may still write into its pages (NIXL cannot revoke access). Such
    pages wait until the store reports the end of the transfer. The worker's lock guards the state.
    """

    def __init__(
        self,
        pool: PagePool,
        pending_pages: Callable[[], set[int]],
        forget: Callable[[Sequence[int]], None] = lambda pages: None,
    ) -> None:
        """`pending_pages`, `forget`: as in KvLoader."""
        self._pool = pool
        self._forget = forget
        self._pending_pages = pending_pages
        self._waiting: list[int] = []  # released pages that a transfer may still write
        self._leaving: set[int] = set()  # pages of ended requests that are not released yet

    def leave(self, pages: Sequence[int]) -> None:
        """Record that the pages' request has ended. `release` follows after the last access."""
        self._leaving.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        self._leaving.difference_update(pages)
        self._forget(pages)
        self._waiting += pages
        self.settle()

    def settle(self) -> None:
        """Return released pages without pending transfers to the pool. Must be called regularly."""
        if self._waiting:
            pending = self._pending_pages()
            self._pool.release([page for page in self._waiting if page not in pending])
            self._waiting = [page for page in self._waiting if page in pending]

    @property
    def used_pages(self) -> int:
        self.settle()
        return self._pool.used_pages

    @property
    def held_pages(self) -> int:
        """Number of used pages without the pages of ended requests, which will soon be free."""
        return self.used_pages - len(self._leaving)

    def check(self) -> None:
        self._pool.check()
        assert self.held_pages >= 0, f"{len(self._leaving)} pages leave, fewer are used"
