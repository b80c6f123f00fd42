"""Where the blocks of a request are on this host while the engine's processes may copy them.

Blocks go through pages of the staging pool. Exception: a block in a slot of the local storage node
is copied directly out of the slot. The ranks map the node's segment as a *region*, one for each
incarnation of the node. Attaching a region takes long, because every page of it is locked. Until
then, or if it fails, blocks go through the pool. The region of a dead node is detached when no page
refers to it, because the next incarnation may need the memory.

A prompt's KV is saved directly into slots too, which are allocated before the prompt is submitted.
Without free slots, KV goes through the pool. So do tokens of decode, because a block has a key, and
so a slot, only when it is full.

A slot must belong to the request until its last copy has ended, so the leases end after that
(lifecycle/). The ranks check whether it did.

Not here: verifying (mooncake_store/client/in_place.py), the ranks' side (engine/connected/).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from backends.engine.connected.block_pages import POOL, REGIONS_MAX, SlotUse, place_of
from backends.engine.connected.channel import ChannelError, ConnectorHost
from backends.errors import KvMissing
from backends.workers.kv_loader import KvLoader
from mooncake_store.client.in_place import PlacedBlock
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.layout import HEADER_BYTES, PageLayout
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.records.membership import NodeInfo

log = logging.getLogger(__name__)
ATTACH_S_MAX = 3600.0  # no request waits for it; locking a terabyte of small pages takes minutes


class InSlot(NamedTuple):
    """The block of a page is in a leased slot, or will be saved there."""

    region: int
    incarnation: str  # of the local node
    copy: Copy | None  # None: the block will be computed, and saved there
    block: PlacedBlock


class AttachedSegment(NamedTuple):
    number: int
    attached: Future[None]

    @property
    def is_there(self) -> bool:
        return self.attached.done() and self.attached.exception() is None


class Regions:
    """The local node's segment as the engine's processes map it. Thread-safe."""

    def __init__(self, host: ConnectorHost, store: WorkerStore) -> None:
        self._host = host
        self._store = store
        self.lock = threading.Lock()  # guards `slots` and the regions
        self.slots: dict[int, InSlot] = {}  # by page
        self._regions: dict[str, AttachedSegment] = {}  # by incarnation of the node
        self._number = POOL

    def look(self) -> None:
        """Attach a new incarnation of the node, and detach unused ones. Called at every turn."""
        now = self._store.mapped_node
        try:
            with self.lock:
                for incarnation, region in list(self._regions.items()):
                    is_over = now is None or incarnation != now.incarnation
                    if is_over and region.attached.done() and not self._is_used(region):
                        del self._regions[incarnation]
                        self._host.detach(region.number)
                if now is not None and now.incarnation not in self._regions:
                    self._attach(now)
        except ChannelError as error:
            log.warning("the storage node's segment: %s", error)

    def _attach(self, info: NodeInfo) -> None:
        number = self._number = self._number + 1
        assert number < REGIONS_MAX, "a storage node restarted too often"
        attached = self._host.attach(number, info.segment_path, info.segment_bytes, ATTACH_S_MAX)
        self._regions[info.incarnation] = AttachedSegment(number, attached)

        def report(future: Future[None]) -> None:
            name = f"node_id={info.node_id}"
            if error := future.exception():
                log.warning("blocks of %s go through the staging pool: %s", name, error)
            else:
                log.info("%s is copied from and to directly", name)

        attached.add_done_callback(report)

    @property
    def is_open(self) -> bool:
        """True if a segment can be copied from directly."""
        with self.lock:
            return any(region.is_there for region in self._regions.values())

    def _is_used(self, region: AttachedSegment) -> bool:
        return any(slot.region == region.number for slot in self.slots.values())

    def place(
        self, incarnation: str, found: Mapping[int, tuple[Copy | None, PlacedBlock]]
    ) -> set[int]:
        """Record the slots of these pages. Returns the pages, or none without their region."""
        with self.lock:
            region = self._regions.get(incarnation)
            if region is None or not region.is_there:
                return set()
            for page, (copy, block) in found.items():
                assert page not in self.slots, page
                self.slots[page] = InSlot(region.number, incarnation, copy, block)
        return set(found)

    def check(self) -> None:
        with self.lock:
            numbers = {region.number for region in self._regions.values()}
            used = {slot.region for slot in self.slots.values()}
            assert used <= numbers, f"of the used regions {used} some were let go: {numbers}"


class PlacedLoader(KvLoader):
    """A KvLoader that leaves blocks of the local node in their slots, and knows these."""

    def __init__(
        self,
        store: WorkerStore,
        pages: PageLayout,
        pool: np.ndarray,
        deadline_s: float,
        regions: Regions,
    ) -> None:
        super().__init__(store, pages, pool, deadline_s)
        self._regions = regions
        self._slots = regions.slots

    def _read_whole(self, copies: Sequence[Copy], pages: Sequence[int]) -> list[bool]:
        self.forget(pages)
        here = self._leave(copies, pages)
        if rest := {p: copy for p, copy in zip(pages, copies, strict=True) if p not in here}:
            arrived = super()._read_whole(list(rest.values()), list(rest))
            here.update(page for page, is_here in zip(rest, arrived, strict=True) if is_here)
        return [page in here for page in pages]

    def load_copies(self, copies: Sequence[Copy], pages: Sequence[int]) -> int:
        arrived = super().load_copies(copies, pages)
        self.forget(pages[arrived:])  # these blocks will be computed
        return arrived

    def _leave(self, copies: Sequence[Copy], pages: Sequence[int]) -> set[int]:
        """The pages whose copies stay in slots, because the ranks can read these."""
        if not self._regions.is_open:
            return set()
        incarnation, blocks = self._store.verify_in_place(copies, self._deadline_s)
        if not any(blocks):
            return set()
        found = zip(pages, copies, blocks, strict=True)
        return self._regions.place(incarnation, {p: (copy, at) for p, copy, at in found if at})

    def save_into(self, slots: Mapping[int, Slot]) -> set[int]:
        """Let the engine save pages into slots (page -> slot). Returns the pages that it can."""
        incarnation, blocks = self._store.slots_in_place(list(slots.values()))
        found = zip(slots, blocks, strict=True)
        return self._regions.place(incarnation, {page: (None, at) for page, at in found if at})

    def is_in_slots(self, pages: Sequence[int]) -> bool:
        with self._regions.lock:
            return any(page in self._slots for page in pages)

    def places(self, pages: Sequence[int], whole: int) -> tuple[list[int], tuple[SlotUse, ...]]:
        """(place of each block, used slots) for a `Stage`. The first `whole` blocks are only read.
        The others get more tokens, so they are copied to the pool.

        Raises KvMissing if a block is gone, because its request came after its lease had ended.
        After a `Stage`, a missing block would end the engine.
        """
        with self._regions.lock:
            slots = {page: self._slots[page] for page in pages if page in self._slots}
        for page in pages[whole:]:
            if page in slots and (copy := slots[page].copy):
                (is_here,) = super()._read_whole([copy], [page])
                self.forget([page])
                del slots[page]
                if not is_here:
                    raise KvMissing("the last block that was handed over is gone")
        for slot in slots.values():
            if slot.copy and not self._store.is_in_place(slot.incarnation, slot.block):
                raise KvMissing("a block was given away in its slot before its request came")
        page_bytes = self._pages.page_bytes
        found, uses = [], []
        for index, page in enumerate(pages):
            if page in slots:
                region, _, _, block = slots[page]
                found.append(place_of(region, block.offset_bytes))
                head = place_of(region, block.headers_offset_bytes)
                uses.append(SlotUse(index, head, block.headers_bytes, block.first, HEADER_BYTES))
            else:
                found.append(place_of(POOL, page * page_bytes))
        return found, tuple(uses)

    def forget(self, pages: Sequence[int]) -> None:
        """The slots of these pages are not read any more. Pages of the pool are ignored."""
        with self._regions.lock:
            for page in pages:
                self._slots.pop(page, None)
