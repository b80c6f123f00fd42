"""Pinned pages in any order of the ranks' reports."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backends.engine.connected.block_pages import Move, Orders
from backends.engine.vllm.scheduler import PinnedPages


class CountedPages:
    def __init__(self) -> None:
        self.users: dict[int, int] = {}

    def pin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.users[block_id] = self.users.get(block_id, 0) + 1

    def unpin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.users[block_id] -= 1
            if not self.users[block_id]:
                del self.users[block_id]


def save(llm_id: str, *block_ids: int) -> Move:
    return Move(f"of {llm_id}", llm_id, 0, list(block_ids), [])


def test_pages_stay_pinned_until_the_slowest_rank_has_saved_them() -> None:
    counted = CountedPages()
    pinned = PinnedPages(counted, ranks=2)
    pinned.add(Orders([], [save("x", 1, 2), save("y", 3)], []))
    pinned.add(Orders([], [save("x", 4)], []))
    pinned.ended({0: {"x": 2, "y": 1}})
    assert set(counted.users) == {1, 2, 3, 4}
    pinned.ended({1: {"x": 1}})
    assert set(counted.users) == {3, 4}
    pinned.ended({1: {"x": 1, "y": 1}})
    assert not counted.users
    assert not pinned


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_reports_unpins_every_page_once(seed: int) -> None:
    chance, ranks = random.Random(seed), 3
    counted = CountedPages()
    pinned = PinnedPages(counted, ranks)
    left: list[dict[str, int]] = [{} for _ in range(ranks)]
    ordered = 0
    while ordered < 60 or any(any(each.values()) for each in left):
        if ordered < 60 and chance.random() < 0.5:
            llm_id = chance.choice("abc")
            pinned.add(Orders([], [save(llm_id, ordered)], []))
            ordered += 1
            for each in left:
                each[llm_id] = each.get(llm_id, 0) + 1
            continue
        report = {}
        for rank, each in enumerate(left):
            ended = {name: chance.randint(0, count) for name, count in each.items()}
            ended = {name: count for name, count in ended.items() if count}
            for name, count in ended.items():
                each[name] -= count
            if ended:
                report[rank] = ended
        pinned.ended(report)
        open_saves = {name for each in left for name, count in each.items() if count}
        assert bool(counted.users) == bool(open_saves)
    assert not pinned
