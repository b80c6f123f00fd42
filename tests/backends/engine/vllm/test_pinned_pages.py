"""Pages stay pinned until every rank has ended their save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from backends.engine.connected.block_pages import Move, Orders
from backends.engine.vllm.scheduler import PinnedPages


class CountedPages:
    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self.unpinned: list[list[int]] = []

    def pin(self, block_ids: Sequence[int]) -> None:
        self.users.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.unpinned.append(list(block_ids))
        self.users.subtract(block_ids)
        assert min(self.users.values()) >= 0, "a page was unpinned twice"

    @property
    def pinned(self) -> set[int]:
        return {page for page, users in self.users.items() if users}


def saves(*moves: tuple[str, list[int]]) -> Orders:
    return Orders([], [Move(name, name, 0, block_ids, [0]) for name, block_ids in moves], [])


def test_saves_of_a_request_are_unpinned_in_the_order_of_the_slowest_rank() -> None:
    pages = CountedPages()
    pinned = PinnedPages(pages, ranks=2)
    for block_ids in ([1, 2], [3], [4]):
        pinned.add(saves(("a", block_ids)))
    pinned.ended({0: {"a": 3}})
    assert not pages.unpinned
    pinned.ended({1: {"a": 2}})
    assert pages.unpinned == [[1, 2], [3]] and pages.pinned == {4}
    pinned.ended({1: {"a": 1}})
    assert not pages.pinned and not pinned._ended and not pinned._saves


def test_a_page_that_two_requests_save_is_pinned_for_both() -> None:
    pages = CountedPages()
    pinned = PinnedPages(pages, ranks=1)
    pinned.add(saves(("a", [1]), ("b", [1])))
    pinned.ended({0: {"a": 1}})
    assert pages.pinned == {1}
    pinned.ended({0: {"b": 1}})
    assert not pages.pinned


def test_a_save_that_ends_unordered_is_an_error() -> None:
    pinned = PinnedPages(CountedPages(), ranks=1)
    with pytest.raises(KeyError):
        pinned.ended({0: {"a": 1}})
