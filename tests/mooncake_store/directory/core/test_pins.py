"""Pins: soft ones go last and end by themselves, hard ones never go, and not all can be hard."""

from __future__ import annotations

import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.holder import Pin
from mooncake_store.directory.core.leases import PINS_MAX, PinTable
from mooncake_store.errors import RequestInvalid, StoreFull
from tests.mooncake_store.makers import chain, directory_with, put


def there(directory: Directory, keys: list[bytes], now_s: float = 9.0) -> list[bytes]:
    found = directory.exist(b"".join(keys), now_s)
    return [key for key, is_there in zip(keys, found, strict=True) if is_there]


def test_a_soft_pinned_block_goes_after_all_others() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(4)
    put(directory, keys)
    assert directory.pin(keys[:2], "soft", 1_000.0, 0.0) == [True, True]
    put(directory, chain(2, "b"), now_s=1.0)
    assert there(directory, keys, 1.0) == keys[:2]
    put(directory, chain(3, "c"), now_s=2.0)
    assert len(there(directory, keys)) == 1, "when nothing else is left it goes too"


def test_a_soft_pin_ends_by_itself() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(4)
    put(directory, keys)
    directory.pin(keys[:1], "soft", 5.0, 0.0)
    assert directory.stats(4.9).pins == 1
    assert directory.stats(5.0).pins == 0
    put(directory, chain(4, "b"), now_s=6.0)
    assert there(directory, keys) == []


def test_a_hard_pinned_block_never_goes_until_it_is_unpinned() -> None:
    directory = directory_with("s0", slots=2)
    keys = chain(1)
    put(directory, keys)
    assert directory.pin(keys, "hard", 0.0, 0.0) == [True]
    for number in range(5):
        put(directory, chain(1, f"n{number}"), now_s=float(number))
    assert there(directory, keys, 5.0) == keys
    assert directory.pin(keys, "none", 0.0, 6.0) == [True]
    put(directory, chain(2, "c"), now_s=7.0)
    assert there(directory, keys) == []


def test_only_a_part_of_a_memory_can_be_pinned_hard_and_the_rest_is_soft() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(4)
    put(directory, keys)
    assert directory.pin(keys, "hard", 0.0, 0.0) == [True, True, False, False]
    directory.check()
    assert directory.stats(0.0).nodes[0].pinned_units == 2
    put(directory, chain(2, "b"), now_s=1.0)
    assert there(directory, keys) == keys[:2]


def test_a_soft_pin_becomes_a_hard_one_only_where_there_is_room() -> None:
    directory = directory_with("s0", slots=2)
    keys = chain(2)
    put(directory, keys)
    directory.pin(keys, "soft", 5.0, 0.0)
    assert directory.pin(keys, "hard", 0.0, 1.0) == [True, False]
    directory.check()
    directory.tick(4.0)
    directory.node_report("s0", "n1", 4.0)
    directory.tick(8.0)  # the time of the soft pins: a hard one has no end
    directory.check()
    assert directory.stats(8.0).pins == 2
    assert directory.pin(keys, "none", 0.0, 8.0) == [True, True]
    assert directory.stats(8.0).nodes[0].idle_blocks == 2


def test_a_pin_holds_for_a_copy_that_comes_later() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(1)
    directory.pin(keys, "hard", 0.0, 0.0)
    put(directory, keys)
    put(directory, chain(4, "b"), now_s=1.0)
    assert there(directory, keys) == keys


def test_removing_takes_a_pinned_block_and_leaves_the_pin() -> None:
    directory = directory_with("s0")
    keys = chain(1)
    put(directory, keys)
    directory.pin(keys, "hard", 0.0, 0.0)
    assert directory.remove(keys, 0.0) == [True]
    directory.check()
    assert directory.stats(0.0).nodes[0].pinned_units == 0
    assert directory.stats(0.0).pins == 1


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_pinning_what_is_in_use_takes_effect_when_it_is_idle(kind: str) -> None:
    directory = directory_with("s0", slots=2)
    keys = chain(1)
    put(directory, keys, is_released=False)
    directory.pin(keys, kind, 100.0, 0.0)
    directory.check()
    directory.release("writer", 0.0)
    directory.check()
    put(directory, chain(1, "b"), now_s=1.0)
    put(directory, chain(1, "c"), now_s=2.0)
    assert there(directory, keys) == keys


def test_a_pin_of_an_unknown_kind_or_without_an_end_is_refused() -> None:
    directory = directory_with("s0")
    with pytest.raises(RequestInvalid, match="none, soft, hard"):
        directory.pin(chain(1), "forever", 1.0, 0.0)
    with pytest.raises(RequestInvalid, match="ttl_s > 0"):
        directory.pin(chain(1), "soft", 0.0, 0.0)


def test_pins_are_bounded_and_leave_nothing_behind() -> None:
    table = PinTable()
    most = range(PINS_MAX)
    table.checked(most, "hard", 0.0)  # type: ignore[arg-type]
    with pytest.raises(StoreFull, match="the limit is"):
        table.checked(range(PINS_MAX + 1), "hard", 0.0)  # type: ignore[arg-type]
    for number in range(1_000):
        table.set(b"one".ljust(16), Pin.SOFT, float(number))
        table.check()
    keys = chain(500)
    for key in keys:
        table.set(key, Pin.SOFT, 5.0)
    for key in keys:
        table.set(key, Pin.NONE, 0.0)
        table.check()
    assert table.due(10_000.0) == [b"one".ljust(16)]
    assert len(table) == 0
