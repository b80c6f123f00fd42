"""Store -> engine pages. Verified against checksums; what proves missing is named, not raised.

Prefill loads the cached prefix with it, decode everything that prefill handed over: layers as they
are announced, and the rest when the request itself arrives. Not here: the way out (kv_writer.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from backends.engine.batching.layer_passes import Windows
from backends.engine.batching.pages import PagePool
from backends.errors import StoreLost
from backends.workers.arrivals import Arrival
from backends.workers.protocol import BlockRef, LayersReady
from mooncake_store.client.store import Store
from mooncake_store.layout import PageLayout
from mooncake_store.records.blocks import Copy


class KvLoader:
    """Reads blocks into the pages of one engine."""

    def __init__(
        self, store: Store, pages: PageLayout, pool: np.ndarray, deadline_s: float
    ) -> None:
        self._store = store
        self._pages = pages
        self._pool = pool
        self._deadline_s = deadline_s

    def load_copies(self, copies: Sequence[Copy], pages: Sequence[int]) -> int:
        """Block i of `copies`, or the layers of it that pages hold, into pages[i]; returns how many
        leading blocks arrived."""
        if not copies:
            return 0
        arrived = self._read_whole(copies, pages[: len(copies)])
        return arrived.index(False) if False in arrived else len(arrived)

    def _read_whole(self, copies: Sequence[Copy], pages: Sequence[int]) -> list[bool]:
        """Block i of `copies` into pages[i]; which of them arrived."""
        offsets = [self._pages.page_offset_bytes(page) for page in pages]
        return self._store.read(copies, self._pool, offsets, self._deadline_s)

    def load_layer(
        self,
        copies: Sequence[Copy],
        digests: Sequence[int],
        windows: Windows,
        layer: int,
        deadline_s: float,
    ) -> bool:
        """One layer of all these blocks into their windows; False: not all of it arrived."""
        offsets = [windows.page_offset_bytes(block, layer) for block in range(len(copies))]
        only = range(layer, layer + 1)
        return all(self._store.read(copies, self._pool, offsets, deadline_s, only, digests))

    @contextlib.contextmanager
    def _counting(self, arrival: Arrival) -> Iterator[None]:
        """Attribute the bytes read meanwhile to `arrival`: decode loads in one thread only."""
        before = {name: counted.read_bytes for name, counted in self._store.counters().items()}
        yield
        for name, counted in self._store.counters().items():
            if moved := counted.read_bytes - before.get(name, 0):
                arrival.read_bytes[name] = arrival.read_bytes.get(name, 0) + moved

    def load_announced(self, arrival: Arrival, message: LayersReady) -> None:
        """One announced layer (or whole blocks); what does not arrive is read later, in full."""
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
        whole = message.layer < 0
        layers = self._pages.layers.indices if whole else range(message.layer, message.layer + 1)
        sums = dict(zip((ref.index for ref in message.blocks), message.checksums, strict=False))
        with self._counting(arrival):
            if whole:
                arrived = self._read_whole(copies, pages)
            else:
                offsets = [self._pages.page_offset_bytes(page) for page in pages]
                arrived = self._store.read(
                    copies,
                    self._pool,
                    offsets,
                    self._deadline_s,
                    layers,
                    [sums[ref.index] for ref in refs],
                )
        for ref, is_here in zip(refs, arrived, strict=True):
            if is_here:
                arrival.note(ref, layers)

    def _copy(self, ref: BlockRef) -> Copy:
        size_bytes = self._pages.block.block_bytes
        return Copy(ref.node_id, ref.slot, ref.generation, ref.checksum, size_bytes)

    def load_rest(self, arrival: Arrival, refs: Sequence[BlockRef]) -> list[int]:
        """Whatever was not announced; returns the indices of blocks that proved missing.

        A page that an earlier read may still write is as good as missing: what is verified in it
        now may be overwritten later, with bytes that another block has by then.
        """
        late = self.pending_pages()
        gone = [ref.index for ref in refs if arrival.pages[ref.index] in late]
        missing = [ref for ref in refs if not arrival.has_whole(ref, len(self._pages.layers))]
        if gone or not missing:
            return gone
        copies = [self._copy(ref) for ref in missing]
        with self._counting(arrival):
            arrived = self._read_whole(copies, [arrival.pages[ref.index] for ref in missing])
        return [ref.index for ref, is_here in zip(missing, arrived, strict=True) if not is_here]

    def forget(self, pages: Sequence[int]) -> None:
        """They are given back: what is known of blocks in them is void."""

    def refuse_late(self, pages: Sequence[int]) -> None:
        """StoreLost if a read that missed its deadline may still write into these pages:
        what is computed there now could be overwritten."""
        if late := self.pending_pages().intersection(pages):
            raise StoreLost(f"a read that is late may still write {len(late)} of its pages")

    def pending_pages(self) -> set[int]:
        """Pages that a transfer past its deadline may still write."""
        return {
            page
            for span in self._store.pending_offsets(self._pool)
            for page in range(
                span.offset_bytes // self._pages.page_bytes,
                (span.offset_bytes + span.length_bytes - 1) // self._pages.page_bytes + 1,
            )
        }


class PageGuard:
    """Pages of an engine that go back to the pool only when nothing can write them any more.

    A transfer that missed its deadline may still write into its pages later (NIXL cannot revoke
    access). Such pages wait here until the store says that the transfer is over. Not thread-safe:
    the worker's lock guards it, like the batching that takes pages from the same pool.
    """

    def __init__(
        self,
        pool: PagePool,
        pending_pages: Callable[[], set[int]],
        forget: Callable[[Sequence[int]], None] = lambda pages: None,
    ) -> None:
        """`pending_pages` names the pages that unresolved transfers may still write; `forget` is
        told of pages that their users give back."""
        self._pool = pool
        self._forget = forget
        self._pending_pages = pending_pages
        self._waiting: list[int] = []  # given back by their users, perhaps still written
        self._leaving: set[int] = set()

    def leave(self, pages: Sequence[int]) -> None:
        """Their request has ended; `release` follows, behind what is still done with them."""
        self._leaving.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        self._leaving.difference_update(pages)
        self._forget(pages)
        self._waiting += pages
        self.settle()

    def settle(self) -> None:
        """Return what is safe by now; the worker calls it at every turn."""
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
        """Those of requests, and those that may still be written: what will not be free at once."""
        return self.used_pages - len(self._leaving)

    def check(self) -> None:
        self._pool.check()
        assert self.held_pages >= 0, f"{len(self._leaving)} pages leave, fewer are used"
