"""Chooses the pair of network cards for each part of a transfer, and cools down failing pairs.

A *path* is a pair of cards: one of this host, one of a storage node's host. The spans of a call are
cut into *parts* of about equal size. A path takes the next part as soon as it has room. So in a
large call a path that is twice as fast carries twice as much. When a path fails, only its parts in
flight move again.

A part is *overdue* when it has waited ALLOWANCE_S longer than four parts of its size recently took
on its path (allowance_s). An overdue part is abandoned only if both conditions hold:

- Another path to the same node has completed a transfer since the part was posted. Otherwise the
  node is frozen or overloaded, and its other paths would not be faster.
- The path has no RDMA. An RDMA card may write into this host's memory at any later time. So a part
  over RDMA is in flight until its connection fails, within seconds, or until the call's deadline.

The path is then in *cool-down*: it gets no parts until a small transfer over it, the probe, has
succeeded. The first probe comes after COOL_DOWN_S. Each failed probe doubles the pause before the
next, up to COOL_DOWN_S_MAX.

The waiting time of a part is the time that this process has spent polling. If the process itself
was paused, all bytes may have arrived unread. So one poll counts as at most LOOK_S.

Not here: threads, agents, clocks (nic_transport.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PART_BYTES_MIN = 256 * 1024  # below this size a second path costs more than it saves
PART_BYTES_MAX = 4 * 1024**2
PARTS_PER_PATH_MAX = 2  # in flight, of one call: one moves and one waits, so no path is idle
ALLOWANCE_S, ALLOWANCE_S_MIN = 1.5, 0.25  # TCP retries a connection after 1 s, so allow for more
UNKNOWN_BYTES_PER_S = 50e6  # assumed until a path has moved a part; the rate of a slow card
SLOWER_MAX = 4.0  # a part this many times slower than recent ones is not stuck
LOOK_S = 0.05  # the most waiting time that one poll counts
COOL_DOWN_S, COOL_DOWN_S_MAX = 0.5, 4.0  # pause before the first probe; longest pause
_SMOOTHING = 0.2


class Piece(NamedTuple):
    span: int  # index of the span
    start_bytes: int  # offset in the span
    length_bytes: int


def cut(lengths_bytes: Sequence[int], part_bytes: int) -> list[list[Piece]]:
    """Cut these spans into parts of at most `part_bytes`. Every byte is in one part, in order. Only
    spans larger than a part are cut, so that pieces of equal spans stay equal."""
    assert part_bytes > 0
    parts: list[list[Piece]] = []
    left_bytes = 0
    for index, length_bytes in enumerate(lengths_bytes):
        start_bytes = 0
        while start_bytes < length_bytes:
            piece_bytes = min(length_bytes - start_bytes, part_bytes)
            if not parts or piece_bytes > left_bytes:
                parts.append([])
                left_bytes = part_bytes
            parts[-1].append(Piece(index, start_bytes, piece_bytes))
            left_bytes -= piece_bytes
            start_bytes += piece_bytes
    return parts


def part_bytes_for(total_bytes: int, paths: int) -> int:
    """Size of a call's parts: PARTS_PER_PATH_MAX parts for each path, if this size is between
    PART_BYTES_MIN and PART_BYTES_MAX. A large call has more parts, so that a fast path takes more
    of them."""
    share_bytes = -(-total_bytes // (max(1, paths) * PARTS_PER_PATH_MAX))
    return max(PART_BYTES_MIN, min(PART_BYTES_MAX, share_bytes))


@dataclass(slots=True)
class NicCounters:
    """Totals of one card of this host, over all its paths."""

    read_bytes: int = 0
    write_bytes: int = 0
    failures: int = 0  # connections that broke or could not be made
    abandoned: int = 0  # overdue parts that were abandoned
    cooling_down: int = 0  # paths of this card in cool-down now
    cool_downs: int = 0  # cool-downs started


@dataclass(slots=True)
class NicPath:
    """One pair of cards, as seen by this process. MultiNicTransport calls it under its `lock`."""

    peer: str  # node and card of the other end
    counters: NicCounters  # of the local card, which has other paths too
    has_rdma: bool = False  # True: parts of this path are never abandoned
    moved_bytes: int = 0  # of completed parts
    under_way_bytes: int = 0  # of parts in flight; >= 0
    bytes_per_s: float = 0.0  # smoothed rate of recent parts, waiting included; 0: no part yet
    answered_s: float = float("-inf")  # when a transfer over this path last completed
    timed_out_s: float = float("-inf")  # when a call last left a part in flight at its deadline
    is_cooling_down: bool = False
    probe_s: float = 0.0  # when the next probe is due, during cool-down
    pause_s: float = COOL_DOWN_S  # before the next probe; doubles after a failed one
    is_forgotten: bool = False  # its node is gone; a call that began earlier may still use it

    def began(self, part_bytes: int) -> None:
        self.under_way_bytes += part_bytes

    def ended(self, part_bytes: int) -> None:
        self.under_way_bytes -= part_bytes
        assert self.under_way_bytes >= 0, self

    def moved(self, part_bytes: int, is_read: bool, seconds: float, now_s: float) -> None:
        self.answered_s = now_s
        self.moved_bytes += part_bytes
        if is_read:
            self.counters.read_bytes += part_bytes
        else:
            self.counters.write_bytes += part_bytes
        if part_bytes >= PART_BYTES_MIN // 4 and seconds > 0:
            rate = part_bytes / seconds
            before = self.bytes_per_s or rate
            self.bytes_per_s = before + _SMOOTHING * (rate - before)

    def failed(self, now_s: float) -> None:
        self.counters.failures += 1
        self._cool_down(now_s)

    def timed_out(self, now_s: float) -> None:
        self.timed_out_s = now_s

    def abandoned(self, now_s: float) -> None:
        self.counters.abandoned += 1
        self._cool_down(now_s)

    def _cool_down(self, now_s: float) -> None:
        if not self.is_cooling_down:
            self.is_cooling_down, self.pause_s = True, COOL_DOWN_S
            self.probe_s = now_s + self.pause_s
            self.counters.cool_downs += 1
            self.counters.cooling_down += not self.is_forgotten  # nothing decrements it after that

    def probe_failed(self, now_s: float) -> None:
        self.pause_s = min(2 * self.pause_s, COOL_DOWN_S_MAX)
        self.probe_s = now_s + self.pause_s

    def probe_worked(self, now_s: float) -> None:
        self.answered_s = now_s
        self._end_cool_down()

    def forget(self) -> None:
        self._end_cool_down()
        self.is_forgotten = True

    def _end_cool_down(self) -> None:
        if self.is_cooling_down:
            self.is_cooling_down = False
            self.counters.cooling_down -= not self.is_forgotten

    def allowance_s(self, part_bytes: int, left_s: float) -> float:
        """Seconds that a part posted now may wait before it is overdue. `left_s`: time until the
        call's deadline. The result is at most half of `left_s`, so that the other half is left to
        move the part again, but never less than ALLOWANCE_S_MIN."""
        rate = self.bytes_per_s or UNKNOWN_BYTES_PER_S
        wished_s = ALLOWANCE_S + SLOWER_MAX * part_bytes / rate
        return max(ALLOWANCE_S_MIN, min(wished_s, left_s / 2))


def next_path(
    paths: Sequence[NicPath], parts_under_way: Sequence[int], is_last_resort: bool = False
) -> int | None:
    """The index of the path for the next part; None: every path has enough parts.

    `parts_under_way`: parts of this call in flight, by path. Order of preference: fewest parts of
    this call; no timeout since the last completed transfer; fewest bytes in flight over all calls;
    fewest bytes moved so far. Recent rates do not count, because a card that was slow for a moment
    would get no parts, and never show that it is fast again. A path in cool-down is chosen only
    with `is_last_resort`.
    """
    free = [
        at
        for at, path in enumerate(paths)
        if parts_under_way[at] < PARTS_PER_PATH_MAX and (is_last_resort or not path.is_cooling_down)
    ]
    if not free:
        return None
    return min(
        free,
        key=lambda at: (
            parts_under_way[at],
            paths[at].timed_out_s > paths[at].answered_s,
            paths[at].under_way_bytes,
            paths[at].moved_bytes,
            at,
        ),
    )


def may_abandon(path: NicPath, others: Sequence[NicPath], posted_s: float) -> bool:
    """True if a part posted at `posted_s` may be moved over one of the other paths."""
    return not path.has_rdma and any(
        not other.is_cooling_down and other.answered_s > posted_s for other in others
    )
