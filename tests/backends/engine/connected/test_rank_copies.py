"""One rank: passes that raised, and the order in which requests give their pages back."""

from __future__ import annotations

import threading
from typing import Any

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import BlockPages, Move, Orders
from backends.engine.connected.rank_copies import RankCopies
from tests.backends.engine.connected.listening import WAIT_S


class Copies:
    """One rank's, whose executor does not ask get_finished after a pass that raised."""

    def __init__(self) -> None:
        self.said: list[m.ToWorker] = []
        self.heard = threading.Condition()
        self.copied: list[Any] = []
        self.copies = RankCopies(BlockPages(0, 1, 32, 4, 4), self, self.note)  # type: ignore[arg-type]

    def note(self, message: m.ToWorker) -> None:
        with self.heard:
            self.said.append(message)
            self.heard.notify_all()

    def wait_for(self, message: m.ToWorker) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: message in self.said, WAIT_S), self.said

    def record(self, stream: Any) -> None: ...

    def save(self, runs: Any, after: Any) -> None:
        self.copied += runs

    def close(self) -> None: ...


def test_moves_of_a_pass_that_never_was_end_before_the_fences() -> None:
    rank = Copies()
    rank.copies.start(Orders([], [Move("a", 1, 0, [0, 1], [0, 1])], []), None)
    rank.copies.on_message(m.Drain("a", 1))
    rank.copies.start(Orders([], [], [1]), None)
    rank.copies.after_forward(None)
    rank.wait_for(m.Drained("a", 0))
    rank.copies.close()
    assert rank.said == [m.Drained("a", 0)] and not rank.copied


def test_what_stands_behind_a_hole_is_not_saved() -> None:
    """Saved(tokens) speaks of all leading tokens."""
    rank = Copies()
    rank.copies.start(Orders([], [Move("a", 1, 0, [0], [0, 1])], []), None)
    second = Orders([], [Move("a", 1, 1, [1], [0, 32]), Move("b", 2, 0, [3], [96])], [])
    rank.copies.start(second, None)
    rank.copies.after_forward(None)
    rank.wait_for(m.Saved("b", 0, 4))
    assert rank.copies.finished([1]) == [1]
    rank.copies.on_message(m.Drain("a", 2))
    rank.wait_for(m.Drained("a", 0))
    rank.copies.close()
    assert not [each for each in rank.said if isinstance(each, m.Saved) and each.request_id == "a"]
    assert rank.copied == [(96, 96, 32)]
    assert not rank.copies._holed


class Slow:
    """A copier whose saves end when the test says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def record(self, stream: Any) -> None: ...
    def load(self, runs: Any, stream: Any) -> None: ...
    def save(self, runs: Any, after: Any) -> None:
        assert self.gate.wait(WAIT_S)

    def close(self) -> None: ...


def test_one_finished_request_a_call_and_in_the_same_order_on_every_rank() -> None:
    """Else two ranks may complete two in one step: of which an older executor ends one."""
    slow = Slow()
    ranks = [
        RankCopies(BlockPages(rank, 2, 32, 4, 4), slow, lambda message: None) for rank in range(2)
    ]
    ranks[1].start(Orders([], [Move("0", 0, 0, [0], [0])], []), None)
    ranks[1].after_forward(None)
    assert [rank.finished([2, 0, 1]) for rank in ranks] == [[0], []]
    assert [rank.finished([]) for rank in ranks] == [[1], []], "1 waits for 0 on every rank"
    slow.gate.set()
    ranks[1].close()  # after what was ordered
    assert [rank.finished([]) for rank in ranks] == [[2], [0]]
    assert [rank.finished([]) for rank in ranks] == [[], [1]]
    assert [rank.finished([]) for rank in ranks] == [[], [2]]
    ranks[0].close()
