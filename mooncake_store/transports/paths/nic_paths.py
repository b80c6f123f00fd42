"""Over which pair of cards the next part of a transfer goes, and which pair rests.

A *path* is a pair of cards: one of this host, one of a storage node's. The spans of a call are cut
into *parts* of about equal size. A path takes the next part as soon as it has room, so a path that
is twice as fast carries twice as much, and when one is cut only its last parts move again.

A part is *overdue* when it has waited ALLOWANCE_S longer than four such parts took on its path
lately. It is *given up* only when

* another path to the same node has moved something since the part was posted: else the node is
  frozen or overloaded, and its other paths would fare no better;
* and the path has no RDMA: its card may write into this host's memory at any later moment, so
  such a part ends by itself (as its connection fails within seconds), or with the call's deadline.

The path then *rests*: it gets no parts until a small transfer over it, the probe, has worked.
Probes come after REST_S, then at twice the pause, at most every REST_S_MAX.

Waiting time is that which this process has spent looking: after a pause of the process itself all
bytes may be there, unread, so one look counts LOOK_S at most.

Not here: threads, agents, clocks (nic_transport.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PART_BYTES_MIN = 256 * 1024  # below, a second path costs more than it gives
PART_BYTES_MAX = 4 * 1024**2
PARTS_PER_PATH_MAX = 2  # of one call: one moves, one waits, so that the path never idles
ALLOWANCE_S, ALLOWANCE_S_MIN = 1.5, 0.25  # TCP asks again for a connection after 1 s
UNKNOWN_BYTES_PER_S = 50e6  # assumed until a path has moved a part; a slow card
SLOWER_MAX = 4.0  # so many times slower than lately is not stuck
LOOK_S = 0.05
REST_S, REST_S_MAX = 0.5, 4.0
_SMOOTHING = 0.2


class Piece(NamedTuple):
    """Some bytes of one span of a call."""

    span: int  # its position
    start_bytes: int  # in the span
    length_bytes: int


def cut(lengths_bytes: Sequence[int], part_bytes: int) -> list[list[Piece]]:
    """These spans in parts of at most `part_bytes`: every byte is in one part, in order.

    A span is cut only when it is larger than a part, so that equal spans stay equal.
    """
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
    """How large the parts of a call are: some for each path, so that a faster one takes more."""
    share_bytes = -(-total_bytes // (max(1, paths) * PARTS_PER_PATH_MAX))
    return max(PART_BYTES_MIN, min(PART_BYTES_MAX, share_bytes))


@dataclass(slots=True)
class NicCounters:
    """What went over one card of this host so far, whoever was at the other end."""

    read_bytes: int = 0
    write_bytes: int = 0
    failures: int = 0  # connections that broke or could not be made
    given_up: int = 0  # parts that were overdue
    resting: int = 0  # paths of this card that rest now
    rests: int = 0  # times that one began to


@dataclass(slots=True)
class NicPath:
    """One pair of cards, as this process knows it. Its owner has a lock."""

    peer: str  # node and card there
    counters: NicCounters  # of the card here, which has other paths too
    has_rdma: bool = False
    moved_bytes: int = 0
    under_way_bytes: int = 0
    bytes_per_s: float = 0.0  # of its parts lately, their waiting included; 0: none yet
    answered_s: float = float("-inf")  # when something came to an end over it
    is_resting: bool = False
    probe_s: float = 0.0  # when the next probe is due, while it rests
    rest_s: float = REST_S  # the pause after that
    is_forgotten: bool = False  # its node is gone; a call that began before may still use it

    def began(self, part_bytes: int) -> None:
        self.under_way_bytes += part_bytes

    def ended(self, part_bytes: int) -> None:
        """However it ended."""
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
        """Its connection broke, or could not be made."""
        self.counters.failures += 1
        self._rest(now_s)

    def gave_up(self, now_s: float) -> None:
        """A part was overdue."""
        self.counters.given_up += 1
        self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        if not self.is_resting:
            self.is_resting, self.rest_s = True, REST_S
            self.probe_s = now_s + self.rest_s
            self.counters.rests += 1
            self.counters.resting += not self.is_forgotten  # nobody would count it down again

    def probe_failed(self, now_s: float) -> None:
        self.rest_s = min(2 * self.rest_s, REST_S_MAX)
        self.probe_s = now_s + self.rest_s

    def probe_worked(self, now_s: float) -> None:
        self.answered_s = now_s
        self._rest_ends()

    def forget(self) -> None:
        """Its node is gone."""
        self._rest_ends()
        self.is_forgotten = True

    def _rest_ends(self) -> None:
        if self.is_resting:
            self.is_resting = False
            self.counters.resting -= not self.is_forgotten

    def allowance_s(self, part_bytes: int, left_s: float) -> float:
        """How long a part that was posted just now may wait; `left_s` of the call's deadline.

        Half of what is left at most, so that the other half is there to move it again.
        """
        rate = self.bytes_per_s or UNKNOWN_BYTES_PER_S
        wished_s = ALLOWANCE_S + SLOWER_MAX * part_bytes / rate
        return max(ALLOWANCE_S_MIN, min(wished_s, left_s / 2))


def next_path(
    paths: Sequence[NicPath], parts_under_way: Sequence[int], is_last_resort: bool = False
) -> int | None:
    """The position of the path for the next part; None: wait, all have enough.

    `parts_under_way`: of this call, on each path. The one with the least under way, of this call
    and of others; of equals the one that has moved least. How fast each was lately does not count:
    a card that was slow for a moment would get no parts, and never show that it is fast again.
    A path that rests is taken as `is_last_resort` only.
    """
    free = [
        at
        for at, path in enumerate(paths)
        if parts_under_way[at] < PARTS_PER_PATH_MAX and (is_last_resort or not path.is_resting)
    ]
    if not free:
        return None
    return min(
        free,
        key=lambda at: (parts_under_way[at], paths[at].under_way_bytes, paths[at].moved_bytes, at),
    )


def may_give_up(path: NicPath, others: Sequence[NicPath], posted_s: float) -> bool:
    """May an overdue part that was posted then be moved over one of the others?"""
    return not path.has_rdma and any(
        not other.is_resting and other.answered_s > posted_s for other in others
    )
