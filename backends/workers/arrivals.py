"""Early hand-overs: pages that a decode worker reserves before the request itself arrives.

An arrival is expected from the first announced layer until its request is submitted. If the request
never comes (client disconnected, prefill failed), the arrival expires after `ttl_s`. Stopped and
finished requests are remembered for `ttl_s`, so that late messages reserve no pages for them. The
decode worker's lock guards the state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from backends.workers.protocol import BlockRef


@dataclass(slots=True)
class Arrival:
    """The pages of one request, and which of its KV has been read into them."""

    pages: list[int]  # pages[i] is for block i; empty until the request is admitted
    layers_of: dict[int, set[int]] = field(default_factory=dict)  # block -> layers in its page
    # Block -> (node, slot, generation) from which its layers were read.
    identity: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    is_loading: bool = False  # the loader is reading an announced layer into the pages
    since_s: float | None = None  # time of the first LayersReady; None: the request came before it
    read_bytes: dict[str, int] = field(default_factory=dict)  # transport -> bytes

    def note(self, ref: BlockRef, layers: Sequence[int]) -> None:
        """Record read layers. If the block's slot has changed, layers read before do not count."""
        slot = (ref.node_id, ref.slot, ref.generation)
        if self.identity.get(ref.index, slot) != slot:
            self.layers_of[ref.index] = set()
        self.identity[ref.index] = slot
        self.layers_of.setdefault(ref.index, set()).update(layers)

    def whole_blocks(self, layers: int) -> int:
        return sum(len(here) == layers for here in self.layers_of.values())

    def has_whole(self, ref: BlockRef, layers: int) -> bool:
        slot = (ref.node_id, ref.slot, ref.generation)
        same = self.identity.get(ref.index) == slot
        return same and len(self.layers_of.get(ref.index, ())) == layers


class Arrivals:
    REFUSED_MAX = 10_000  # most remembered requests; a further one replaces the oldest

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._arrivals: dict[str, Arrival] = {}
        self._refused: dict[str, float] = {}  # request -> time of `refuse`, oldest first

    def __len__(self) -> int:
        return len(self._arrivals)

    def get(self, request_id: str) -> Arrival | None:
        return self._arrivals.get(request_id)

    def expect(self, request_id: str, now_s: float) -> None:
        self._arrivals[request_id] = Arrival([], since_s=now_s)

    def give_pages(self, request_id: str, pages: list[int]) -> None:
        """Set the pages of an arrival. Creates the arrival if its request was never announced."""
        self._arrivals.setdefault(request_id, Arrival([])).pages = pages

    def pop(self, request_id: str) -> Arrival | None:
        return self._arrivals.pop(request_id, None)

    def refuse(self, request_id: str, now_s: float) -> None:
        """Record that the request was stopped or has ended. `reap` then removes its arrival."""
        self._refused.pop(request_id, None)
        self._refused[request_id] = now_s
        if len(self._refused) > self.REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def is_refused(self, request_id: str) -> bool:
        return request_id in self._refused

    def reap(self, now_s: float, submitted: Collection[str]) -> list[tuple[str, list[int]]]:
        """Remove expected arrivals that expired or were refused. Returns their (request, pages)."""
        while self._refused:
            oldest = next(iter(self._refused))
            if now_s - self._refused[oldest] <= self._ttl_s:
                break
            del self._refused[oldest]
        reaped = []
        for request_id, arrival in list(self._arrivals.items()):
            if arrival.since_s is None:
                continue
            is_over = now_s - arrival.since_s > self._ttl_s or request_id in self._refused
            if is_over and request_id not in submitted and not arrival.is_loading:
                del self._arrivals[request_id]
                reaped.append((request_id, arrival.pages))
        return reaped
