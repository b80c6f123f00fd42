"""Commits that cannot be right: an error that says so; late ones are only refused."""

from __future__ import annotations

import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import RequestInvalid
from mooncake_store.records.blocks import Slot
from tests.mooncake_store.makers import chain, directory_with


def allocated(directory: Directory, key: bytes) -> Slot:
    slot = directory.allocate("s0", [key], "w", 10.0, False, 0.0).slots[0]
    assert slot is not None
    return slot


def commit(directory: Directory, key: bytes, slot: Slot, owner: str, now_s: float) -> bool:
    block = (key, slot.slot, slot.generation, 99)
    return directory.commit("s0", [block], owner, 10.0, now_s)[0]


def test_a_second_commit_is_refused_by_name_and_changes_nothing() -> None:
    directory = directory_with("s0")
    (key,) = chain(1)
    slot = allocated(directory, key)
    assert commit(directory, key, slot, "w", 0.0)
    before = directory.snapshot(0.0)
    with pytest.raises(RequestInvalid, match="was committed already; a commit is final"):
        commit(directory, key, slot, "w", 0.0)
    assert directory.snapshot(0.0) == before
    directory.check()


def test_a_commit_without_an_allocation_is_refused_by_name() -> None:
    directory = directory_with("s0")
    (key,) = chain(1)
    with pytest.raises(RequestInvalid, match="was never allocated; allocate first"):
        directory.commit("s0", [(key, 0, 10**15, 5)], "w", 1.0, 0.0)
    assert directory.lookup([key], "r", 1.0, 0.0) == []
    directory.check()


def test_one_good_block_saves_the_others_from_an_error() -> None:
    directory = directory_with("s0")
    first, second = chain(2)
    slots = {key: allocated(directory, key) for key in (first, second)}
    assert commit(directory, first, slots[first], "w", 0.0)
    blocks = [(key, slot.slot, slot.generation, 99) for key, slot in slots.items()]
    assert directory.commit("s0", blocks, "w", 10.0, 0.0) == [False, True]
    directory.check()
