"""Which keys are pinned, and until when: soft (goes last) with an expiry, hard (never goes).

A pin belongs to a key, so it holds for every copy of it, those that arrive later too. A soft pin
ends by itself; a hard one when it is taken back. How much of a holder may be hard-pinned is
bounded (config.hard_pin_fraction_max): a store in which nothing can move is no cache any more.

Not here: what a pin does to a copy (holder.py), walking over copies (copies.py).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from mooncake_store.directory.core.holder import Pin
from mooncake_store.errors import StoreFull

PINS_MAX = 1_000_000


class PinTable:
    def __init__(self) -> None:
        self._pins: dict[bytes, tuple[Pin, float]] = {}  # key -> (kind, until_s; inf for hard)
        self._heap: list[tuple[float, bytes]] = []  # soft ones; an entry may be out of date

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, key: bytes) -> Pin:
        return self._pins[key][0] if key in self._pins else Pin.NONE

    def refuse_too_many(self, more: int) -> None:
        if len(self._pins) + more > PINS_MAX:
            raise StoreFull(f"{len(self._pins)} keys are pinned; the limit is {PINS_MAX}")

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
        """Keys whose soft pin has ended; they are pinned no more."""
        ended = []
        while self._heap and self._heap[0][0] <= now_s:
            until_s, key = heappop(self._heap)
            if self._pins.get(key) == (Pin.SOFT, until_s):
                del self._pins[key]
                ended.append(key)
        return ended

    def items(self) -> list[tuple[bytes, Pin]]:
        return [(key, pin) for key, (pin, _) in self._pins.items()]

    def check(self) -> None:
        """Prove the invariants."""
        soft = {(until_s, key) for key, (pin, until_s) in self._pins.items() if pin is Pin.SOFT}
        assert soft <= set(self._heap), "a soft pin would never end"
        assert len(self._heap) <= 2 * len(self._pins) + 65, "the heap grows without bound"
        assert Pin.NONE not in {pin for pin, _ in self._pins.values()}
