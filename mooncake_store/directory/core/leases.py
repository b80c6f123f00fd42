"""Leases of requests and pins of operators: both protect a copy from eviction.

An owner is usually one request in one process ("r17/prefill_0"). All leases of an owner share one
deadline. A new lease can only move the deadline later, and one release ends all leases of the
owner. So the heap of deadlines has an entry per owner, not per lease.

Each lease records the depth of its block: its position in the owner's prompt. `release` returns the
deepest copies first, because eviction should take the end of a prompt before its start (eviction/).

Not here: the state of a copy after its last lease (copies.py), the effect of a pin (holder.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import repeat

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.holder import CopyState, HeldCopy, Pin, leave_idle
from mooncake_store.errors import RequestInvalid, StoreFull

PINS_MAX = 1_000_000  # pinned keys


@dataclass(slots=True, eq=False)
class Owner:
    name: str
    until_s: float  # deadline of all its leases, by the directory's clock
    copies: dict[HeldCopy, int] = field(default_factory=dict)  # copy -> depth of its block
    next_depth: int = 0  # one more than the depth of the deepest block leased so far
    is_gone: bool = False  # released; a heap entry may remain


class LeaseTable:
    def __init__(self, config: DirectoryConfig) -> None:
        self._config = config
        self._owners: dict[str, Owner] = {}
        self._heap: list[tuple[float, int, Owner]] = []  # (time <= deadline, tie-breaker, owner)
        self._pushed = 0  # entries pushed to the heap so far; the tie-breaker
        self._leases = 0  # one per owner and copy

    def __len__(self) -> int:
        return self._leases

    @property
    def owners(self) -> int:
        return len(self._owners)

    def __contains__(self, owner: str) -> bool:
        return owner in self._owners

    def next_depth(self, owner: str) -> int:
        """One more than the depth of the deepest block that `owner` has leased; 0 without any."""
        known = self._owners.get(owner)
        return known.next_depth if known else 0

    def deadline_s(self, now_s: float, lease_s: float) -> float:
        return now_s + min(lease_s, self._config.lease_s_max)

    def refuse_too_many(self, owner: str, more: int) -> None:
        """Raise StoreFull if `more` leases of `owner` would exceed leases_max or owners_max."""
        config = self._config
        is_new = owner not in self._owners
        if self._leases + more > config.leases_max or self.owners + is_new > config.owners_max:
            raise StoreFull(
                f"{self.owners} owners hold {self._leases} leases; the limits are "
                f"{config.owners_max} and {config.leases_max}. Are finished requests released?"
            )

    def hold(self, owner: str, copies: Iterable[tuple[int, HeldCopy]], until_s: float) -> None:
        """Lease (depth, copy) pairs to `owner`. The first lease of a copy ends its idle state."""
        holding = self._extended(owner, until_s)
        held = holding.copies
        before = len(held)
        deepest = -1
        first: list[HeldCopy] = []
        for depth, copy in copies:
            if copy not in held:
                held[copy] = depth
                if not copy.leases:
                    first.append(copy)
                copy.leases += 1
            elif held[copy] < depth:
                held[copy] = depth
            if depth > deepest:
                deepest = depth
        leave_idle(first)
        holding.next_depth = max(holding.next_depth, deepest + 1)
        self._leases += len(held) - before

    def write_chain(
        self, owner: str, first: int, copies: Sequence[HeldCopy], until_s: float
    ) -> None:
        """Record the leases of new copies of consecutive blocks, whose lease counts are 1 already.
        `first`: depth of the first block."""
        if not copies:
            return
        holding = self._extended(owner, until_s)
        holding.copies.update(zip(copies, range(first, first + len(copies)), strict=False))
        holding.next_depth = max(holding.next_depth, first + len(copies))
        self._leases += len(copies)

    def copies(self) -> Iterable[HeldCopy]:
        """Every leased copy, once; removed copies may be included."""
        every = (copy for owner in self._owners.values() for copy in owner.copies)
        return dict.fromkeys(every)  # not a set, whose order depends on memory addresses

    def held(self, owner: str) -> list[HeldCopy]:
        known = self._owners.get(owner)
        return list(known.copies) if known else []

    def renew(self, owner: str, until_s: float) -> bool:
        """Move the owner's deadline to `until_s`, never earlier. False: the owner has no leases."""
        if owner not in self._owners:
            return False
        self._extended(owner, until_s)
        return True

    def drop_all(self, owner: str, copies: Sequence[HeldCopy]) -> None:
        """End the owner's leases of these copies. An owner without leases is forgotten."""
        if not copies:
            return
        holding = self._owners[owner]
        for copy in copies:
            del holding.copies[copy]
            copy.leases -= 1
        self._leases -= len(copies)
        if not holding.copies:
            self.release(owner)

    def release(self, owner: str) -> list[HeldCopy]:
        """End all leases of `owner`. Returns its copies that still exist, deepest first."""
        holding = self._owners.pop(owner, None)
        if holding is None:
            return []
        holding.is_gone = True
        self._leases -= len(holding.copies)
        ended = sorted(holding.copies, key=holding.copies.__getitem__, reverse=True)
        for copy in ended:
            copy.leases -= 1
        if len(self._heap) > 2 * len(self._owners) + 64:
            self._heap = [entry for entry in self._heap if not entry[2].is_gone]
            heapify(self._heap)
        gone = CopyState.GONE
        return [copy for copy in ended if copy.state is not gone]

    def due(self, now_s: float) -> str | None:
        """An owner whose deadline has passed, or None. Release the owner before the next call."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, owner = heappop(self._heap)
            if owner.is_gone:
                continue
            if owner.until_s <= now_s:
                return owner.name
            self._push(owner)
        return None

    def _extended(self, name: str, until_s: float) -> Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, until_s)
            self._push(owner)
        elif until_s > owner.until_s:
            owner.until_s = until_s  # due() renews the heap entry, which now is too early
        return owner

    def _push(self, owner: Owner) -> None:
        self._pushed += 1
        heappush(self._heap, (owner.until_s, self._pushed, owner))

    def counts(self) -> dict[HeldCopy, int]:
        found: dict[HeldCopy, int] = {}
        for owner in self._owners.values():
            for copy in owner.copies:
                found[copy] = found.get(copy, 0) + 1
        return found

    def check(self) -> None:
        counts = self.counts()
        assert sum(counts.values()) == self._leases, "the number of leases is wrong"
        assert all(copy.leases == count for copy, count in counts.items())
        live = [owner for _, _, owner in self._heap if not owner.is_gone]
        assert len(live) == len(set(live)) == len(self._owners), "a deadline is lost or duplicated"
        assert all(due_s <= owner.until_s for due_s, _, owner in self._heap)
        assert len(self._heap) <= 2 * len(self._owners) + 65, "the heap grows without bound"
        for owner in self._owners.values():
            assert all(depth < owner.next_depth for depth in owner.copies.values())


class PinTable:
    """Pinned keys: soft pins (evicted last, with an expiry) and hard pins (never evicted).

    A pin belongs to a block key, so it holds for every copy of the block, including later copies. A
    soft pin ends at its expiry, a hard pin when an operator removes it. On a holder whose
    hard-pinned memory reaches hard_pin_fraction_max, a further hard pin acts as soft (copies.py).
    """

    def __init__(self) -> None:
        self._pins: dict[bytes, tuple[Pin, float]] = {}  # key -> (kind, until_s; inf for hard)
        # (until_s, key) of soft pins; entries may be stale.
        self._heap: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, key: bytes) -> Pin:
        return self._pins[key][0] if key in self._pins else Pin.NONE

    def __contains__(self, key: bytes) -> bool:
        return key in self._pins

    def of(self, pin: Pin) -> Iterator[tuple[bytes, float]]:
        """(key, until_s) of all keys with this kind of pin."""
        return ((key, until_s) for key, (kind, until_s) in self._pins.items() if kind is pin)

    def restore(self, records: Iterable[tuple[Sequence[bytes], Pin, Sequence[float]]]) -> None:
        """Replay earlier changes of pins. A record is (keys, kind, until_s for all keys or per
        key). Call it before any key has a copy. A million pins take about a second."""
        for keys, pin, until_s in records:
            if pin is Pin.NONE:
                for key in keys:
                    self._pins.pop(key, None)
            elif pin is Pin.HARD:
                self._pins.update(dict.fromkeys(keys, (pin, float("inf"))))
            else:
                every = until_s if len(until_s) == len(keys) else repeat(until_s[0], len(keys))
                self._pins.update(zip(keys, zip(repeat(pin), every), strict=False))
        self._heap = [(t, k) for k, (kind, t) in self._pins.items() if kind is Pin.SOFT]
        heapify(self._heap)

    def checked(self, keys: Sequence[bytes], kind: str, ttl_s: float) -> Pin:
        """The pin of this name. Raises RequestInvalid or StoreFull if these keys cannot get it."""
        if kind not in {pin.value for pin in Pin}:
            raise RequestInvalid(f"a pin is one of none, soft, hard; got {kind!r}")
        pin = Pin(kind)
        if pin is Pin.SOFT and ttl_s <= 0:
            raise RequestInvalid("a soft pin needs ttl_s > 0")
        if pin is not Pin.NONE and len(self._pins) + len(keys) > PINS_MAX:
            raise StoreFull(f"{len(self._pins)} keys are pinned; the limit is {PINS_MAX}")
        return pin

    def set(self, key: bytes, pin: Pin, until_s: float) -> None:
        if pin is Pin.NONE:
            self._pins.pop(key, None)
        else:
            self._pins[key] = pin, until_s if pin is Pin.SOFT else float("inf")
        if pin is Pin.SOFT:
            heappush(self._heap, (until_s, key))
        if len(self._heap) > 2 * len(self._pins) + 64:
            self._heap = [(t, k) for k, (_, t) in self._pins.items() if t != float("inf")]
            heapify(self._heap)

    def due(self, now_s: float) -> list[bytes]:
        """Remove and return the keys whose soft pin has expired."""
        ended = []
        while self._heap and self._heap[0][0] <= now_s:
            until_s, key = heappop(self._heap)
            if self._pins.get(key) == (Pin.SOFT, until_s):
                del self._pins[key]
                ended.append(key)
        return ended

    def check(self) -> None:
        soft = {(until_s, key) for key, (pin, until_s) in self._pins.items() if pin is Pin.SOFT}
        assert soft <= set(self._heap), "a soft pin would never end"
        assert len(self._heap) <= 2 * len(self._pins) + 65, "the heap grows without bound"
        assert Pin.NONE not in {pin for pin, _ in self._pins.values()}
