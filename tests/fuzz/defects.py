"""Defects planted on purpose, each a mistake somebody could make. The walk must catch every one.

Each replaces one method of the production code, and leaves what `check()` proves as it was, so it
is the promises of the walk that must notice.

Not here: the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mooncake_store.directory.core import inventory, reservations
from mooncake_store.directory.core.block_index import BlockIndex
from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.holder import Holder, SizeClass
from mooncake_store.directory.core.inventory import InventoryBlock
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.records.blocks import REFUSED, THERE
from mooncake_store.records.events import BlockRemoved, Event, EventLog


def a_leased_block_is_evicted(patch: pytest.MonkeyPatch) -> None:
    make_room = CopyTable._make_room

    def planted(table: CopyTable, size_class: SizeClass) -> bool:
        if make_room(table, size_class):
            return True
        for copy in table.of(size_class.holder):
            if copy.leases and copy.size_class is size_class:
                table.remove(copy)
                return True
        return False

    patch.setattr(CopyTable, "_make_room", planted)


def an_event_is_lost(patch: pytest.MonkeyPatch) -> None:
    append, extend = EventLog.append, EventLog.extend
    seen = [0]

    def is_kept(event: Event) -> bool:
        seen[0] += isinstance(event, BlockRemoved)
        return not isinstance(event, BlockRemoved) or seen[0] % 20 > 0

    patch.setattr(EventLog, "append", lambda log, event: is_kept(event) and append(log, event))
    patch.setattr(
        EventLog, "extend", lambda log, events: extend(log, [e for e in events if is_kept(e)])
    )


def a_commit_skips_the_generation(patch: pytest.MonkeyPatch) -> None:
    def planted(holder: Holder, key: bytes, owner: str, slot: int, generation: int) -> Any:
        copy, writer = holder.writing.get(key, (None, ""))
        return copy if copy is not None and writer == owner and copy.slot == slot else None

    patch.setattr(Holder, "writing_copy", planted)


def a_report_of_a_bad_copy_skips_the_generation(patch: pytest.MonkeyPatch) -> None:
    on = BlockIndex.on

    def drop_copy(self: Any, key: bytes, node_id: str, generation: int, now_s: float) -> bool:
        self._copies.advance(now_s)
        holder = self._nodes.get(node_id)
        copy = on(self._copies.blocks, key, holder) if holder else None
        if copy is not None:
            self._copies.reject(copy)
        return copy is not None

    patch.setattr("mooncake_store.directory.core.directory.Directory.drop_copy", drop_copy)


def a_bad_copys_slot_is_free_before_its_readers_are_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyTable, "reject", lambda copies, copy: copies.remove(copy))


def a_dead_writers_slot_does_not_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "quarantine", lambda pool, slot, until_s: pool.free(slot))


def an_inventory_believes_the_older_header(patch: pytest.MonkeyPatch) -> None:
    consistent = inventory.consistent

    def planted(blocks: list[InventoryBlock], pool: SlotPool) -> list[InventoryBlock]:
        upside_down = [block._replace(generation=-block.generation) for block in blocks]
        return [
            block._replace(generation=-block.generation) for block in consistent(upside_down, pool)
        ]

    patch.setattr(inventory, "consistent", planted)


def a_writer_of_before_the_restart_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    adopt = Directory.adopt

    def planted(
        self: Any, node_id: str, incarnation: str, blocks: Any, is_last: bool, now_s: float
    ) -> int:
        ready = [block for block in blocks if block[5] == 2]
        return adopt(self, node_id, incarnation, ready, is_last, now_s)

    patch.setattr(Directory, "adopt", planted)


def a_writer_of_before_the_restart_rests_too_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inventory, "writers_lease_s", lambda block, lease_s_max: 0.0)


def a_commit_of_an_earlier_epoch_is_carried_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "_refuse_epoch", lambda directory, epoch: None)


def a_block_is_spilled_twice(patch: pytest.MonkeyPatch) -> None:
    def planted(table: CopyTable, dram: Holder, ssd: Holder, blocks_max: int) -> Any:
        classes = dram.size_classes.values()
        keys = [key for each in classes for key in each.idle.keys(9)]
        free = [key for key in keys if key not in ssd.writing]
        return [table.blocks.on(key, dram) for key in free[:blocks_max]]

    patch.setattr(CopyTable, "_spillable", planted)


def a_renewal_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Any, owner: str, lease_s: float, now_s: float) -> bool:
        self._copies.advance(now_s)
        return owner in self._copies.leases

    patch.setattr("mooncake_store.directory.core.directory.Directory.renew", planted)


def a_lost_reservation_is_said_to_stand(patch: pytest.MonkeyPatch) -> None:
    commit = Directory.commit_reserved

    def planted(*arguments: Any) -> Any:
        return replace(commit(*arguments), is_held=True)

    patch.setattr(Directory, "commit_reserved", planted)


def a_block_that_another_owner_is_writing_passes_for_stored(patch: pytest.MonkeyPatch) -> None:
    commit = reservations.commit

    def planted(table: CopyTable, holder: Holder, blocks: Any, *rest: Any) -> list[int]:
        writing = set(holder.writing)
        verdicts = commit(table, holder, blocks, *rest)
        return [
            THERE if verdict == REFUSED and row[0] in writing else verdict
            for row, verdict in zip(blocks, verdicts, strict=True)
        ]

    patch.setattr(reservations, "commit", planted)


DEFECTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    a_leased_block_is_evicted,
    an_event_is_lost,
    a_commit_skips_the_generation,
    a_report_of_a_bad_copy_skips_the_generation,
    a_bad_copys_slot_is_free_before_its_readers_are_done,
    a_dead_writers_slot_does_not_rest,
    an_inventory_believes_the_older_header,
    a_writer_of_before_the_restart_is_forgotten,
    a_writer_of_before_the_restart_rests_too_short,
    a_commit_of_an_earlier_epoch_is_carried_out,
    a_block_is_spilled_twice,
    a_renewal_is_forgotten,
    a_lost_reservation_is_said_to_stand,
    a_block_that_another_owner_is_writing_passes_for_stored,
]
