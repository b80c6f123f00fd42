"""Slots that this client has reserved ahead: a put is then its bytes and one message.

A reserve has slots of one size on one node, all of one owner, which is not a request: its lease is
renewed while puts come. A slot goes through three hands:

    raw       granted, and nothing says so yet where it lies
    marked    its header says "writing": no reader takes it for the block that was there before,
              and a directory that begins from now on lets it rest (inventory.py)
    ready     marked, and the directory that granted it has answered since: no other one began
              before the mark was there, so the slot may be written without asking anybody

A put first marks the raw slots, and its commit confirms them. The answer brings as many raw slots
as the put used up, so two puts' worth of slots last for ever. A thread marks the raw slots that no
put marks in time, fills a reserve at first and gives back slots that are not used any more.
Commits of several threads at once go as one message.

A block that the node has already is found out by the commit, too late to save the writing of it:
so for a while after that all puts ask first (`take` gives nothing).

Not here: bytes (putter.py), how much may be reserved (directory/core/reservations.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_store.client.restorer import LEASE_MARGIN_S
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError, StoreUnavailable
from mooncake_store.records.blocks import STORED, THERE, Slot
from mooncake_store.records.membership import NodeInfo

log = logging.getLogger("mooncake_store.client")
LEASE_S = 60.0
BLOCKS_MAX = 64  # of a put; larger ones ask for their slots, which costs them little
SIZE_BYTES_MAX = 64 * 2**20  # of a block
IDLE_S = 3.0  # without a put, and a reserve is given back
STEP_S = 0.25  # so long raw slots may linger
# Then they are not marked any more but given back: a directory that began meanwhile may have given
# them to somebody else, and a node takes longer than this to notice and to say what it holds.
RAW_S_MAX = 0.5
ASK_FIRST_S = 5.0  # after a put of blocks that were there
SIZES_SEEN_MAX = 64
Use = tuple[int, int]  # slot, generation
Row = tuple[bytes, int, int, int]  # key, slot, generation, checksum


@dataclass(slots=True, eq=False)
class _Commit:
    rows: Sequence[Row]
    verdicts: Sequence[int] | None = None
    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class Reserve:
    """Its owner's lock guards it, but for `turn`: that of whoever asks the directory."""

    info: NodeInfo
    size_bytes: int
    owner: str
    epoch: int = 0  # 0: nothing was granted yet
    begin_s: float = 0.0
    until_s: float = 0.0  # of the lease, by CLOCK_BOOTTIME, counted from when it was asked for
    used_s: float = 0.0
    wished: int = 0  # slots, in whichever hand
    raw: list[tuple[Use, float]] = field(default_factory=list)  # and when they were asked for
    marking: int = 0  # raw ones that somebody is just marking
    marked: list[Use] = field(default_factory=list)
    ready: list[Use] = field(default_factory=list)
    late: list[Use] = field(default_factory=list)  # raw for too long: to be given back
    most: int = BLOCKS_MAX  # slots that the directory lets it have, as said last
    puts: int = 0  # under way, in slots taken from it
    is_dropped: bool = False
    waiting: list[_Commit] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=lambda: threading.Lock())

    @property
    def missing(self) -> int:
        """How many more to ask for."""
        there = len(self.raw) + self.marking + len(self.marked) + len(self.ready)
        return max(0, self.wished - there)

    @property
    def has_any(self) -> bool:
        return bool(self.raw or self.marking or self.marked or self.ready)

    def uses(self) -> list[Use]:
        return [*(use for use, _ in self.raw), *self.marked, *self.ready]


class Taken(NamedTuple):
    """For one put."""

    reserve: Reserve
    uses: list[Use]  # to be written and committed
    raw: list[Use]  # to be marked meanwhile
    late: list[Use]  # raw ones for which it was too late then
    mark_until_s: float

    def markable(self) -> list[Use]:
        """Asked right before they are marked, for the process may have stood still."""
        if boot_s() > self.mark_until_s:
            self.late[:], self.raw[:] = [*self.late, *self.raw], []
        return self.raw


class ReservedSlots:
    """Thread-safe. `mark(info, size_bytes, uses, lease_s, until_s)` writes their headers until
    then, by CLOCK_BOOTTIME; StoreError."""

    def __init__(
        self,
        directory: DirectoryClient,
        tenant: str,
        name: str,
        mark: Callable[[NodeInfo, int, Sequence[Use], float, float], None],
    ) -> None:
        self._directory, self._tenant, self._mark = directory, tenant, mark
        self._names = (f"{name}/ahead{number}" for number in itertools.count())
        self._lock = threading.Lock()
        self._reserves: dict[tuple[str, int], Reserve] = {}
        self._seen: dict[tuple[str, int], float] = {}  # when a put of such blocks came last
        self._ask_first_s = float("-inf")
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # ---- a put

    def take(self, info: NodeInfo, size_bytes: int, count: int, deadline_s: float) -> Taken | None:
        """Slots for a put of so many blocks, all of them or none; they are leased for longer than
        its deadline."""
        with self._lock:
            reserve = self._reserves.get((info.node_id, size_bytes))
            now_s = boot_s()
            if (
                reserve is None
                or len(reserve.ready) < count
                or reserve.info.incarnation != info.incarnation
                or reserve.until_s < now_s + deadline_s + LEASE_MARGIN_S
                or now_s < self._ask_first_s
            ):
                return None
            uses = reserve.ready[:count]
            del reserve.ready[:count]
            reserve.used_s, reserve.wished = now_s, max(reserve.wished, 2 * count)
            reserve.puts += 1
            raw, mark_until_s = self._take_raw(reserve, now_s)
            return Taken(reserve, uses, raw, [], mark_until_s)

    def _take_raw(self, reserve: Reserve, now_s: float) -> tuple[list[Use], float]:
        """Raw slots to be marked, and until when, by CLOCK_BOOTTIME.

        A slot that is too old for a mark may be another client's by now: it is left.
        """
        limit_s = min(reserve.begin_s or RAW_S_MAX, RAW_S_MAX)
        in_time = [entry for entry in reserve.raw if entry[1] >= now_s - limit_s]
        if len(in_time) < len(reserve.raw):
            reserve.late += [use for use, asked_s in reserve.raw if asked_s < now_s - limit_s]
        reserve.raw = []
        reserve.marking += len(in_time)
        until_s = min((asked_s for _, asked_s in in_time), default=now_s) + limit_s
        return [use for use, _ in in_time], until_s

    def commit(self, taken: Taken, rows: Sequence[Row]) -> Sequence[int]:
        """They are written, and what was to be marked is. The verdict on each: STORED, THERE or
        REFUSED (records/blocks.py). EpochPassed when nothing of it counts: it is `failed` then."""
        reserve, own = taken.reserve, _Commit(rows)
        with self._lock:
            reserve.marked += taken.raw
            reserve.late += taken.late
            reserve.marking -= len(taken.raw) + len(taken.late)
        verdicts = self._commit(reserve, own)
        if THERE in verdicts:
            with self._lock:
                self._ask_first_s = boot_s() + ASK_FIRST_S
        left = [row[1:3] for row, verdict in zip(rows, verdicts, strict=True) if verdict != STORED]
        self._abandon(reserve, left)
        self._ended(reserve)
        return verdicts

    def unmarked(self, taken: Taken) -> None:
        """Its marks may land late: the reserve is dropped, and its slots are quarantined after the
        last put into them."""
        self._drop(taken.reserve)

    def failed(self, taken: Taken) -> None:
        """What was taken will not be committed: the whole reserve is given up."""
        self._drop(taken.reserve)
        self._ended(taken.reserve)

    def _ended(self, reserve: Reserve) -> None:
        """A put is over. With the last one goes what a dropped reserve has left."""
        with self._lock:
            reserve.puts -= 1
        self._release_dropped(reserve)

    def _drop(self, reserve: Reserve, are_idle: bool = False) -> None:
        """Give all of it up. Its slots rest, unless nothing can be under way to any of them."""
        with self._lock:
            reserve.is_dropped = True
            key = reserve.info.node_id, reserve.size_bytes
            if self._reserves.get(key) is reserve:
                del self._reserves[key]
            uses = [*reserve.uses(), *reserve.late]
            reserve.raw, reserve.marked, reserve.ready, reserve.late = [], [], [], []
        if are_idle:
            self._abandon(reserve, uses)
        else:
            self._release_dropped(reserve)

    def _release_dropped(self, reserve: Reserve) -> None:
        """Its slots rest, but not while a put writes into some of them: that may go on for longer
        than a slot rests. Until then its lease protects them."""
        with self._lock:
            is_over = reserve.is_dropped and not reserve.puts and reserve.epoch
        if is_over:
            with contextlib.suppress(StoreError):
                self._directory.release_later(reserve.owner)

    def asked(self, info: NodeInfo, size_bytes: int, count: int) -> None:
        """A put asked for its slots: have some ahead for the next ones, from the second on."""
        if not 0 < count <= BLOCKS_MAX or size_bytes > SIZE_BYTES_MAX:
            return
        key, now_s = (info.node_id, size_bytes), boot_s()
        with self._lock:
            last_s = self._seen.pop(key, float("-inf"))
            self._seen[key] = now_s
            if len(self._seen) > SIZES_SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            if now_s > last_s + IDLE_S or now_s < self._ask_first_s or self._is_closed:
                return
            reserve = self._reserves.get(key)
            if reserve is None or reserve.info.incarnation != info.incarnation:
                reserve = self._reserves[key] = Reserve(info, size_bytes, next(self._names))
            reserve.used_s, reserve.wished = now_s, max(reserve.wished, 2 * count)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reserve", daemon=True)
                self._thread.start()
        self._wake.set()

    # ---- the directory

    def _commit(self, reserve: Reserve, own: _Commit) -> Sequence[int]:
        """With whatever other threads have to commit on this reserve."""
        with self._lock:
            reserve.waiting.append(own)
        with reserve.turn:
            if own.verdicts is None and own.error is None:
                self._send(reserve)
        if own.error is not None:
            raise own.error
        assert own.verdicts is not None
        return own.verdicts

    def _send(self, reserve: Reserve) -> None:
        with self._lock:
            batch, reserve.waiting = reserve.waiting, []
            wished = 0 if reserve.is_dropped else reserve.missing
            epoch, had_any = reserve.epoch, reserve.has_any
            confirmed, reserve.marked = reserve.marked, []
        rows = [row for each in batch for row in each.rows]
        asked_s = boot_s()
        try:
            answer = self._directory.commit_reserved(
                reserve.info.node_id,
                rows,
                reserve.owner,
                reserve.size_bytes,
                wished,
                LEASE_S,
                epoch,
                self._tenant,
            )
        except StoreError as error:
            for each in batch:
                each.error = error
            return
        except BaseException:
            for each in batch:
                each.error = StoreUnavailable("whoever sent the commit was interrupted")
            raise
        with self._lock:
            reserve.epoch, reserve.begin_s = answer.epoch, answer.begin_s
            reserve.until_s, reserve.most = asked_s + LEASE_S, answer.most
            if not reserve.is_dropped:
                reserve.ready += confirmed
                reserve.raw += [(use, asked_s) for use in answer.slots]
        if had_any and not answer.is_held:
            self._drop(reserve)
        else:
            self._release_dropped(reserve)  # meanwhile, so nobody will use what came
        verdicts = iter(answer.verdicts)
        for each in batch:
            each.verdicts = list(itertools.islice(verdicts, len(each.rows)))

    def _abandon(self, reserve: Reserve, uses: Sequence[Use]) -> None:
        slots = [Slot(reserve.info.node_id, *use) for use in uses]
        if slots:
            with contextlib.suppress(StoreError):
                self._directory.abandon(slots, reserve.owner)

    # ---- in the background

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(STEP_S if self._reserves else None)
            self._wake.clear()
            with self._lock:
                reserves = list(self._reserves.values())
            for reserve in reserves if not self._is_closed else ():
                try:
                    self._look_after(reserve)
                except StoreUnavailable:
                    self._drop(reserve)
                except StoreError as error:
                    log.warning("reserving on node_id=%s: %s", reserve.info.node_id, error)
                    self._drop(reserve)
                except Exception:  # edge: puts go on without
                    log.exception("reserving on node_id=%s failed", reserve.info.node_id)
                    self._drop(reserve)

    def _look_after(self, reserve: Reserve) -> None:
        now_s = boot_s()
        if now_s > reserve.used_s + IDLE_S:
            self._drop(reserve, are_idle=True)
            return
        with self._lock:
            surplus = max(0, len(reserve.uses()) - reserve.most)
            given_back = [*reserve.late, *reserve.ready[:surplus]]
            reserve.late = []
            del reserve.ready[:surplus]
        self._abandon(reserve, given_back)
        if reserve.missing or reserve.until_s < now_s + LEASE_S / 2:
            self._commit(reserve, _Commit(()))
        with self._lock:
            raw, until_s = self._take_raw(reserve, boot_s())
        if raw:
            self._mark(reserve.info, reserve.size_bytes, raw, LEASE_S, until_s)
            with self._lock:
                reserve.marked += raw
                reserve.marking -= len(raw)
            self._commit(reserve, _Commit(()))

    def close(self) -> None:
        """Gives everything back. Nobody puts any more."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()
        for reserve in list(self._reserves.values()):
            self._drop(reserve, are_idle=True)
