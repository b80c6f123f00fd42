"""Hand-overs that began before their request came: reserved places at a decode worker.

An arrival is expected from the first letter about it until its request is submitted. Requests that
never come (their client left, prefill failed) are reaped. Requests that were stopped, or are over,
are remembered for a while, so that letters still under way do not reserve anything for them again.
Not thread-safe: the decode worker's lock guards it.
"""

from __future__ import annotations

from collections.abc import Collection

from backends.workers.kv_loader import Arrival


class Arrivals:
    REFUSED_MAX = 10_000

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._arrivals: dict[str, Arrival] = {}
        self._since_s: dict[str, float] = {}  # announced and not submitted
        self._refused: dict[str, float] = {}  # request -> when it was stopped, in this order

    def __len__(self) -> int:
        return len(self._arrivals)

    def has(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def has_pages(self, request_id: str) -> bool:
        arrival = self._arrivals.get(request_id)
        return arrival is not None and bool(arrival.pages)

    def is_loading(self, request_id: str) -> bool:
        arrival = self._arrivals.get(request_id)
        return arrival is not None and arrival.is_loading

    def get(self, request_id: str) -> Arrival | None:
        return self._arrivals.get(request_id)

    def expect(self, request_id: str, now_s: float) -> None:
        self._arrivals[request_id] = Arrival(request_id, [])
        self._since_s[request_id] = now_s

    def give_pages(self, request_id: str, pages: list[int]) -> None:
        self._arrivals.setdefault(request_id, Arrival(request_id, [])).pages = pages

    def pop(self, request_id: str) -> Arrival:
        """The request is here: its arrival is its own now."""
        self._since_s.pop(request_id, None)
        return self._arrivals.pop(request_id)

    def discard(self, request_id: str) -> None:
        self._since_s.pop(request_id, None)
        self._arrivals.pop(request_id, None)

    def refuse(self, request_id: str, now_s: float) -> None:
        """It was stopped, or is over: give its place back soon, take no more letters."""
        self._refused.pop(request_id, None)
        self._refused[request_id] = now_s
        if len(self._refused) > self.REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def is_refused(self, request_id: str) -> bool:
        return request_id in self._refused

    def reap(self, now_s: float, submitted: Collection[str]) -> list[tuple[str, list[int]]]:
        """(request, its pages) of arrivals that nobody will claim; they are forgotten here."""
        while self._refused:  # the oldest first
            oldest = next(iter(self._refused))
            if now_s - self._refused[oldest] <= self._ttl_s:
                break
            del self._refused[oldest]
        reaped = []
        for request_id, since_s in list(self._since_s.items()):
            arrival = self._arrivals[request_id]
            is_over = now_s - since_s > self._ttl_s or request_id in self._refused
            if is_over and request_id not in submitted and not arrival.is_loading:
                self.discard(request_id)
                reaped.append((request_id, arrival.pages))
        return reaped
