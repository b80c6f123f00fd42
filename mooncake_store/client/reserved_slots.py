"""Slots that a client has reserved in advance, so that a put needs no request before it writes.

A *reserve* holds slots of one size on one node, all leased to one owner name. The lease is renewed
while puts arrive. A slot has three states, one after the other:

    raw       granted by the directory; its header does not show that yet
    marked    its header is "writing": readers no longer find the earlier block there, and a
              directory that starts later does not grant the slot (quarantine, inventory.py)
    ready     marked, and the directory that granted it has answered after the mark. So no other
              directory started before the mark, and the slot may be written without a request.

A put first marks the raw slots, then writes its blocks into ready slots and commits them. The
commit confirms the marks. Its reply grants new raw slots, up to twice the largest put so far. A
thread fills a new reserve, marks raw slots that no put marks in time, and releases unused slots.
Concurrent commits of several threads are sent as one message.

If the node has a block already, only the commit shows it, and the put has written the block in
vain. So for ASK_FIRST_S after such a commit, `take` returns None and every put calls `allocate`.

Not here: writing (putter.py), how much may be reserved (directory/core/reservations.py).
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
LEASE_S = 60.0  # of all slots of a reserve; each commit renews the lease
BLOCKS_MAX = 64  # larger puts reserve nothing, because a request for slots costs them little
SIZE_BYTES_MAX = 64 * 2**20  # larger blocks reserve nothing
IDLE_S = 3.0  # a reserve is released after so long without a put
STEP_S = 0.25  # the longest time that a raw slot waits for the thread
# A raw slot older than this is released instead of marked, because a new directory may have granted
# it to another owner. Younger slots are safe: a new directory grants a node's slots only after the
# node has reported its blocks, and that takes longer than RAW_S_MAX.
RAW_S_MAX = 0.5
ASK_FIRST_S = 5.0  # puts call `allocate` for so long after a put of a block that was stored already
SIZES_SEEN_MAX = 64  # remembered (node, block size) pairs
Use = tuple[int, int]  # slot, generation
Row = tuple[bytes, int, int, int]  # block key, slot, generation, checksum


@dataclass(slots=True, eq=False)
class _Commit:
    rows: Sequence[Row]  # blocks to commit; may be empty
    verdicts: Sequence[int] | None = None  # one per row; None until the reply
    error: StoreError | None = None  # the error of the message with this commit, if it failed


@dataclass(slots=True, eq=False)
class Reserve:
    """ReservedSlots._lock guards all fields but `turn`. The thread that commits holds `turn`."""

    info: NodeInfo  # the node of all slots
    size_bytes: int  # of each slot
    owner: str
    epoch: int = 0  # of the directory; 0: nothing has been granted yet
    begin_s: float = 0.0  # as in Allocation; 0: directories are not elected
    until_s: float = 0.0  # end of the lease by CLOCK_BOOTTIME, counted from the time of the request
    used_s: float = 0.0  # time of the last put, by CLOCK_BOOTTIME
    target_slots: int = 0  # slots to hold, in all three states together
    # (slot, time of the request that granted the slot, by CLOCK_BOOTTIME)
    raw: list[tuple[Use, float]] = field(default_factory=list)
    marking: int = 0  # raw slots that some thread is marking now
    marked: list[Use] = field(default_factory=list)
    ready: list[Use] = field(default_factory=list)
    late: list[Use] = field(default_factory=list)  # raw for longer than RAW_S_MAX; to be released
    slots_max: int = BLOCKS_MAX  # slots that the directory allows this reserve; from its last reply
    puts: int = 0  # puts in progress that took slots from this reserve
    is_dropped: bool = False  # True: no put takes slots from this reserve any more
    waiting: list[_Commit] = field(default_factory=list)  # commits for the next message
    turn: threading.Lock = field(default_factory=lambda: threading.Lock())

    @property
    def missing(self) -> int:
        return max(0, self.target_slots - len(self.uses()) - self.marking)

    def uses(self) -> list[Use]:
        return [*(use for use, _ in self.raw), *self.marked, *self.ready]


class Taken(NamedTuple):
    reserve: Reserve
    uses: list[Use]  # to be written and committed by this put
    raw: list[Use]  # to be marked by this put, for later puts
    late: list[Use]  # raw slots whose time for a mark has passed
    mark_until_s: float  # by CLOCK_BOOTTIME; later marks could hit another owner's slot

    def markable(self) -> list[Use]:
        """The raw slots that may still be marked. Call it directly before the marks are written,
        because the process may have been suspended since `take`."""
        if boot_s() > self.mark_until_s:
            self.late[:], self.raw[:] = [*self.late, *self.raw], []
        return self.raw


class ReservedSlots:
    """Thread-safe. `mark(info, size_bytes, uses, lease_s, until_s)` writes "writing" headers before
    `until_s` by CLOCK_BOOTTIME, or raises StoreError."""

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
        # (node_id, block size) -> CLOCK_BOOTTIME of the last put that used `allocate`
        self._seen: dict[tuple[str, int], float] = {}
        self._ask_first_s = float("-inf")
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def take(self, info: NodeInfo, size_bytes: int, count: int, deadline_s: float) -> Taken | None:
        """Slots for a put of `count` blocks, leased beyond `deadline_s`. None: call `allocate`."""
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
            reserve.used_s, reserve.target_slots = now_s, max(reserve.target_slots, 2 * count)
            reserve.puts += 1
            raw, mark_until_s = self._take_raw(reserve, now_s)
            return Taken(reserve, uses, raw, [], mark_until_s)

    def _take_raw(self, reserve: Reserve, now_s: float) -> tuple[list[Use], float]:
        """Raw slots to be marked, and the CLOCK_BOOTTIME until which marks may be written. Slots
        too old for a mark move to `late`, because another client may own them by now."""
        limit_s = min(reserve.begin_s or RAW_S_MAX, RAW_S_MAX)
        in_time = [entry for entry in reserve.raw if entry[1] >= now_s - limit_s]
        if len(in_time) < len(reserve.raw):
            reserve.late += [use for use, asked_s in reserve.raw if asked_s < now_s - limit_s]
        reserve.raw = []
        reserve.marking += len(in_time)
        until_s = min((asked_s for _, asked_s in in_time), default=now_s) + limit_s
        return [use for use, _ in in_time], until_s

    def commit(self, taken: Taken, rows: Sequence[Row]) -> Sequence[int]:
        """Commit the blocks written to `taken`, and confirm its marks. The verdict on each block is
        STORED, THERE or REFUSED (reservations.py). After a StoreError no block counts as stored,
        and the caller must call `drop_failed`."""
        reserve, commit = taken.reserve, _Commit(rows)
        with self._lock:
            reserve.marked += taken.raw
            reserve.late += taken.late
            reserve.marking -= len(taken.raw) + len(taken.late)
        verdicts = self._commit(reserve, commit)
        if THERE in verdicts:
            with self._lock:
                self._ask_first_s = boot_s() + ASK_FIRST_S
        left = [row[1:3] for row, verdict in zip(rows, verdicts, strict=True) if verdict != STORED]
        self._abandon(reserve, left)
        self._ended(reserve)
        return verdicts

    def drop_late_marks(self, taken: Taken) -> None:
        """Drop the reserve, because marks of `taken` may arrive late. Its slots are quarantined
        after the last put into them."""
        self._drop(taken.reserve)

    def drop_failed(self, taken: Taken) -> None:
        """Drop the whole reserve, because the put will not commit `taken`."""
        self._drop(taken.reserve)
        self._ended(taken.reserve)

    def _ended(self, reserve: Reserve) -> None:
        """Note the end of a put. After the last put of a dropped reserve, quarantine its slots."""
        with self._lock:
            reserve.puts -= 1
        self._release_dropped(reserve)

    def _drop(self, reserve: Reserve, are_idle: bool = False) -> None:
        """Give up the reserve. Its slots are freed if `are_idle` (no transfer can be in flight to
        any of them), else quarantined."""
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
        """Quarantine the slots of a dropped reserve after its last put. Until then the lease
        protects them, because a put may take longer than a quarantine."""
        with self._lock:
            is_unused = reserve.is_dropped and not reserve.puts and reserve.epoch
        if is_unused:
            with contextlib.suppress(StoreError):
                self._directory.release_later(reserve.owner)

    def note_allocate_put(self, info: NodeInfo, size_bytes: int, count: int) -> None:
        """Note a put that used `allocate`. Reserve slots if the last one was at most IDLE_S ago."""
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
            reserve.used_s, reserve.target_slots = now_s, max(reserve.target_slots, 2 * count)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reserve", daemon=True)
                self._thread.start()
        self._wake.set()

    def _commit(self, reserve: Reserve, commit: _Commit) -> Sequence[int]:
        """Commit, in one message with the commits of other threads that wait on this reserve."""
        with self._lock:
            reserve.waiting.append(commit)
        with reserve.turn:
            if commit.verdicts is None and commit.error is None:
                self._send(reserve)
        if commit.error is not None:
            raise commit.error
        assert commit.verdicts is not None
        return commit.verdicts

    def _send(self, reserve: Reserve) -> None:
        with self._lock:
            batch, reserve.waiting = reserve.waiting, []
            requested = 0 if reserve.is_dropped else reserve.missing
            epoch, had_any = reserve.epoch, bool(reserve.uses() or reserve.marking)
            confirmed, reserve.marked = reserve.marked, []
        rows = [row for each in batch for row in each.rows]
        asked_s = boot_s()
        try:
            answer = self._directory.commit_reserved(
                reserve.info.node_id,
                rows,
                reserve.owner,
                reserve.size_bytes,
                requested,
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
                each.error = StoreUnavailable("the thread that sent the commit was interrupted")
            raise
        with self._lock:
            reserve.epoch, reserve.begin_s = answer.epoch, answer.begin_s
            reserve.until_s, reserve.slots_max = asked_s + LEASE_S, answer.most
            if not reserve.is_dropped:
                reserve.ready += confirmed
                reserve.raw += [(use, asked_s) for use in answer.slots]
        if had_any and not answer.is_held:
            self._drop(reserve)
        else:
            # no effect, unless the reserve was dropped during the commit
            self._release_dropped(reserve)
        verdicts = iter(answer.verdicts)
        for each in batch:
            each.verdicts = list(itertools.islice(verdicts, len(each.rows)))

    def _abandon(self, reserve: Reserve, uses: Sequence[Use]) -> None:
        slots = [Slot(reserve.info.node_id, *use) for use in uses]
        if slots:
            with contextlib.suppress(StoreError):
                self._directory.abandon(slots, reserve.owner)

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(STEP_S if self._reserves else None)
            self._wake.clear()
            with self._lock:
                reserves = list(self._reserves.values())
            for reserve in reserves if not self._is_closed else ():
                try:
                    self._maintain(reserve)
                except StoreUnavailable:
                    self._drop(reserve)
                except StoreError as error:
                    log.warning("reserving on node_id=%s: %s", reserve.info.node_id, error)
                    self._drop(reserve)
                except Exception:  # Catch all: puts continue without reserved slots
                    log.exception("reserving on node_id=%s failed", reserve.info.node_id)
                    self._drop(reserve)

    def _maintain(self, reserve: Reserve) -> None:
        now_s = boot_s()
        if now_s > reserve.used_s + IDLE_S:
            self._drop(reserve, are_idle=True)
            return
        with self._lock:
            surplus = max(0, len(reserve.uses()) - reserve.slots_max)
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
        """Release all reserves. No put may be in progress or follow."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()
        for reserve in list(self._reserves.values()):
            self._drop(reserve, are_idle=True)
