"""What a storage node does when it is asked on its control socket.

`load` brings blocks of the SSD back into the segment: their slots were allocated by the client,
which commits them afterwards. The node writes their headers, because it is the one that knows when
the bytes are whole. A slot whose header has a newer generation than the client names was given to
somebody else meanwhile, and is left alone. `fetch` copies blocks of other nodes here (puller.py).

Not here: sockets and threads (node_control.py), the disk (ssd/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import RequestInvalid, StoreError
from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.node.puller import Puller
from mooncake_store.records.blocks import GENERATION_MAX
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from mooncake_store.ssd.records import Entry
from mooncake_store.ssd.ssd_tier import Job, Outcome, SsdTier
from mooncake_store.wire import node_protocol as control
from mooncake_store.wire.node_protocol import NodeStats, Restore

GONE = (Outcome.MISSING, Outcome.CORRUPT)  # the directory lists a copy that is not there


class NodeVerbs:
    """Answers requests; called from several threads."""

    def __init__(
        self,
        info: NodeInfo,
        memory: SlotMemory,
        directory: DirectoryClient,
        tier: Callable[[], SsdTier | None],
        puller: Puller,
        stats: Callable[[], NodeStats],
        leave: Callable[[], None],
    ) -> None:
        self._info, self._memory, self._directory = info, memory, directory
        self._tier, self._puller = tier, puller
        self._stats, self._leave = stats, leave
        self.restores_missed = 0

    def answer(self, request: control.AnyControl, came_s: float) -> object:
        """The reply to this request, which came at `came_s` (monotonic)."""
        if isinstance(request, control.Ping):
            return self._info.incarnation
        if isinstance(request, control.LoadBlocks):
            return self._load(request.blocks, came_s + request.deadline_s)
        if isinstance(request, control.AskNodeStats):
            return self._stats()
        if isinstance(request, control.Leave):
            self._leave()
            return None
        return self._fetch(request, came_s + request.deadline_s)

    def _fetch(self, request: control.Fetch, until_s: float) -> list[bool]:
        if len(request.keys) != len(request.copies):
            raise RequestInvalid(
                f"fetch has {len(request.keys)} keys and {len(request.copies)} copies: one each"
            )
        return self._puller.pull(request.keys, request.copies, until_s)

    def _load(self, blocks: list[Restore], until_s: float) -> list[bool]:
        tier = self._tier()
        for block in blocks:
            if not self._memory.shape.holds(block.slot, block.size_bytes):
                raise RequestInvalid(
                    f"slot {block.slot} with {block.size_bytes} bytes is outside the segment of "
                    f"{self._info.node_id} ({self._memory.shape.units} units)"
                )
        taken = [block for block in blocks if tier is not None and self._take(block)]
        outcomes = tier.load([self._job(block) for block in taken], until_s) if tier else []
        whole = set()
        for block, outcome in zip(taken, outcomes, strict=True):
            if outcome is Outcome.WHOLE:
                self._memory.write_header(block.slot, _header(block, STATE_READY))
                whole.add(block.slot)
            elif outcome in GONE:
                with contextlib.suppress(StoreError):  # the next reader finds it out again
                    self._directory.drop_copy(
                        block.key, self._info.node_id + SSD_SUFFIX, block.ssd_generation
                    )
        self.restores_missed += len(blocks) - len(whole)
        return [block.slot in whole for block in blocks]

    def _take(self, block: Restore) -> bool:
        """Mark the slot as being written, unless somebody newer has it."""
        there = self._memory.header(block.slot)
        if there is not None and block.generation < there.generation < GENERATION_MAX:
            return False
        self._memory.write_header(block.slot, _header(block, STATE_WRITING))
        return True

    def _job(self, block: Restore) -> Job:
        entry = Entry(
            block.key, block.ssd_slot, block.ssd_generation, block.checksum, block.size_bytes
        )
        return Job(entry, self._memory.shape.slot_offset_bytes(block.slot))


def _header(block: Restore, state: int) -> SlotHeader:
    return SlotHeader(state, block.generation, block.key, block.checksum, block.size_bytes)
