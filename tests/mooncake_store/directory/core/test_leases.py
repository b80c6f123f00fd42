"""Leases: one deadline per owner, ended together, deepest block first."""

from __future__ import annotations

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.holder import CopyKind, CopyState, HeldCopy
from mooncake_store.directory.core.leases import LeaseTable
from tests.mooncake_store.makers import chain, holder


def copies(count: int) -> list[HeldCopy]:
    home = holder(slots=count)
    kind = CopyKind.COMMITTED
    made = home.hold_chain(home.size_class(1), chain(count), "w", range(count), 5, 4096, kind)
    for copy in made:
        copy.leases = 0
    return made


def test_a_release_gives_copies_back_from_the_end_of_the_chain() -> None:
    table = LeaseTable(DirectoryConfig())
    first, second, third = held = copies(3)
    table.hold("r", [(2, third)], 5.0)
    table.hold("r", [(0, first), (1, second)], 5.0)
    table.hold("r", [(0, third)], 5.0)  # seen as the start of something else: stays deep
    table.check()
    assert table.next_depth("r") == 3
    assert table.release("r") == [third, second, first]
    assert [copy.leases for copy in held] == [0, 0, 0]
    table.check()


def test_copies_that_are_gone_are_not_given_back() -> None:
    table = LeaseTable(DirectoryConfig())
    first, second = copies(2)
    table.hold("r", [(0, first), (1, second)], 5.0)
    second.state = CopyState.GONE
    assert table.release("r") == [first]
    assert table.release("r") == []


def test_owners_are_due_in_the_order_of_their_deadlines() -> None:
    table = LeaseTable(DirectoryConfig())
    for name, until_s in (("late", 9.0), ("early", 3.0), ("moved", 1.0)):
        table.hold(name, [(0, copies(1)[0])], until_s)
    assert table.renew("moved", 6.0)
    due = []
    for now_s in (0.0, 3.0, 5.9, 6.0, 9.0):
        while (owner := table.due(now_s)) is not None:
            table.release(owner)
            due.append((now_s, owner))
        table.check()
    assert due == [(3.0, "early"), (6.0, "moved"), (9.0, "late")]


def test_requests_that_come_and_go_leave_no_deadlines_behind() -> None:
    table = LeaseTable(DirectoryConfig())
    copy = copies(1)[0]
    for number in range(5_000):
        table.hold(f"r{number}", [(0, copy)], 1e9)
        if number >= 10:
            table.release(f"r{number - 10}")
    table.check()  # among others: the heap of deadlines is bounded by the live owners
    assert (table.owners, len(table), copy.leases) == (10, 10, 10)
