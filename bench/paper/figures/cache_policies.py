"""Which eviction order has the most hits? The arXiv report, Table 1.

One cache for all requests, in their order, without a clock: LRU, LFU, length-aware and the store's
default, `density`, at each of the table's capacities, in blocks of 512 tokens. The report's trace
is not published whole, so its hit rates are shown beside those of the two traces here. Targets:
ours has at least the hits of each of the three, at every capacity.

LFU counts uses of the blocks it holds, and among equals evicts the least recently used.
Length-aware evicts of those the block that is farthest from the start of its prompt, as the report
describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from loadtest.harness.result import Target
from loadtest.simulator.block_cache import BlockCache, Hits, play
from loadtest.simulator.hit_rate import requests_of
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions, SimulationRefused

TRACES = ("conversation", "synthetic")
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)  # None: unlimited
OURS = "density"
PAPER = {
    "lru": (0.30, 0.40, 0.48, 0.50, 0.51, 0.51),
    "lfu": (0.30, 0.35, 0.43, 0.49, 0.51, 0.51),
    "length-aware": (0.30, 0.35, 0.42, 0.48, 0.50, 0.51),
}

Found = Mapping[tuple[str, int | None, str], Hits]


class CountingOrder:
    """Idle blocks by their number of uses, then as `is_deep_first` selects. Lazy: an entry of the
    heap counts only if it is the block's latest."""

    def __init__(self, depths: Mapping[bytes, int], is_deep_first: bool) -> None:
        self._depths, self._is_deep_first = depths, is_deep_first
        self._uses: dict[bytes, int] = {}  # of all blocks held
        self._idle: dict[bytes, int] = {}  # block key -> its latest entry
        self._heap: list[tuple[int, int, int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, key: bytes) -> bool:
        return key in self._idle

    def add(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert key not in self._idle, f"{key.hex()} is idle already"
            self._added += 1
            uses = self._uses[key] = self._uses.get(key, 0) + 1
            depth = -self._depths[key] if self._is_deep_first else 0
            self._idle[key] = self._added
            heappush(self._heap, (uses, depth, self._added, key))

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._idle.pop(key, None)

    def take_coldest(self, count: int) -> list[bytes]:
        taken: list[bytes] = []
        while self._heap and len(taken) < count:
            *_, entry, key = heappop(self._heap)
            if self._idle.get(key) == entry:
                del self._idle[key], self._uses[key]
                taken.append(key)
        return taken

    def keys(self, limit: int | None = None) -> list[bytes]:
        entries = [entry for entry in self._heap if self._idle.get(entry[3]) == entry[2]]
        return [key for *_, key in sorted(entries)][:limit]

    def check(self) -> None:
        assert self._idle.keys() <= self._uses.keys()
        assert len(self.keys()) == len(self._idle)


class OrderedCache(BlockCache):
    """A BlockCache with an eviction order that the store does not have."""

    def __init__(self, blocks: int, order: CountingOrder) -> None:
        super().__init__(blocks, "lru")
        self._order = order


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every policy at every capacity on every trace."""
    if options.changes:
        raise SimulationRefused("--set: no conductor decides in cache-policies; leave it out")
    found: dict[tuple[str, int | None, str], Hits] = {}
    for trace in options.one_of(options.traces, TRACES, "trace"):
        requests = requests_of(options, trace)
        done = begin(trace, len(CAPACITIES) * (len(PAPER) + 1))
        for (blocks, policy), hits in played(requests, done).items():
            found[trace, blocks, policy] = hits
    return rows_of(found), targets_of(found, options.is_shortened)


def played(
    requests: Sequence[Sequence[bytes]], done: Callable[[], None]
) -> dict[tuple[int | None, str], Hits]:
    depths = {key: depth for keys in requests for depth, key in enumerate(keys)}
    found: dict[tuple[int | None, str], Hits] = {}
    for blocks in CAPACITIES:
        room = max(blocks or len(depths), max(map(len, requests)))
        for policy in (*PAPER, OURS):
            if policy in ("lru", OURS):
                cache = BlockCache(room, policy)
            else:
                cache = OrderedCache(room, CountingOrder(depths, policy == "length-aware"))
            found[blocks, policy] = play(cache, requests)
            cache.check()
            done()
    return found


def rows_of(found: Found) -> Rows:
    return [
        {
            "trace": trace,
            "blocks": blocks,
            "policy": policy,
            "hit_percent": round(hits.percent, 2),
            "paper_hit_percent": 100 * PAPER[policy][CAPACITIES.index(blocks)]
            if policy in PAPER
            else None,
        }
        for (trace, blocks, policy), hits in found.items()
    ]


def targets_of(found: Found, why_not: str = "") -> list[Target]:
    """The least lead of ours, in points, over all capacities."""
    targets = []
    for trace in TRACES:
        for policy in PAPER:
            more = [
                found[trace, blocks, OURS].percent - found[trace, blocks, policy].percent
                for blocks in CAPACITIES
                if (trace, blocks, OURS) in found and not why_not
            ]
            least = round(min(more), 4) if more else None
            why = "" if more else why_not or f"{trace} was not run"
            name = f"{trace}: {OURS} over {policy}, points, the least of all capacities"
            targets.append(Target(name, least, ">=", 0.0, why))
    return targets
