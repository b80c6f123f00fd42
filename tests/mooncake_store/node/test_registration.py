"""A holder under changing directories: known, asked anew, its inventory after the epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.election import Leader, NoLeader
from mooncake_store.errors import EpochPassed, StoreUnavailable
from mooncake_store.layout import STATE_READY
from mooncake_store.memory.slot_memory import Block
from mooncake_store.node.registration import Registration
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.makers import BLOCK_BYTES, node_info

INFO = replace(node_info("s0"), has_inventory=True)


class LookedAt:
    """A holder's memory, and which epoch the node was of whenever it was looked at."""

    def __init__(self) -> None:
        self.directory = InProcessDirectory()
        client = cast(DirectoryClient, self.directory)
        self.registration = Registration(INFO, client, client, self.blocks)
        self.epochs: list[int] = []

    def blocks(self) -> list[Block]:
        self.epochs.append(self.registration.epoch)
        return [(b"k" * 16, 0, 5, 77, BLOCK_BYTES, STATE_READY)]


def test_the_epoch_is_taken_over_before_the_memory_is_looked_at() -> None:
    looked = LookedAt()
    looked.registration.report()
    assert (looked.epochs, looked.registration.epoch) == ([1], 1)
    looked.registration.report()
    assert looked.epochs == [1], "nothing changed"
    looked.directory.directory = Directory(8)
    looked.registration.report()
    assert (looked.epochs, looked.registration.epoch) == ([1, 8], 8)
    (node,) = looked.directory.stats().nodes
    assert (node.adopted, node.is_open) == (1, True)


def test_a_directory_that_changes_within_an_inventory_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, later = LookedAt(), Directory(8)

    def change_leader(*arguments: Any, **named: Any) -> Any:
        monkeypatch.undo()
        looked.directory.directory = later
        later.register_node(INFO, 0.0)  # it is known there already, as of another report
        return looked.directory.__getattr__("adopt")(*arguments, **named)

    monkeypatch.setattr(looked.directory, "adopt", change_leader, raising=False)
    with pytest.raises(EpochPassed):
        looked.registration.report()
    assert not later.stats(later._copies.now_s).nodes[0].is_open, "half an inventory was believed"
    looked.registration.report()
    assert looked.epochs == [1, 8]
    (node,) = looked.directory.stats().nodes
    assert (node.adopted, node.is_open) == (1, True)


@pytest.mark.parametrize(
    ("led_by", "comes_back"), [(3, True), (7, False), (8, False), (None, False)]
)
def test_a_holder_of_a_later_epoch_follows_an_earlier_one_only_where_etcd_says_that_it_leads(
    led_by: int | None, comes_back: bool
) -> None:
    """Others answer in its name: an ex-leader on a machine that was paused, for instance."""
    looked = LookedAt()
    looked.directory.directory = Directory(7, begin_s=0.6)
    looked.registration.report()

    def leader() -> Leader:
        if led_by is None:
            raise NoLeader("nobody leads")
        return Leader("ipc:///a", "ipc:///b", epoch=led_by)

    vars(looked.directory).update(
        directory=Directory(3, begin_s=0.6), is_elected=True, leader=leader
    )
    if comes_back:
        looked.registration.report()
        (node,) = looked.directory.stats().nodes
        assert (node.adopted, node.is_open) == (1, True)
    else:
        with pytest.raises(StoreUnavailable, match="cannot lead any more"):
            looked.registration.report()
    assert looked.registration.epoch == (3 if comes_back else 7)
