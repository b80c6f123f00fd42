"""Hot-prefix replication: decayed hit counts per block, and copies where hits per copy are high.

Routing also spreads hot prefixes, because a fetch leaves a copy. A fetch is chosen only when the
workers on the nodes that have the prefix are too busy. This policy acts earlier. On each tick,
`suggest` looks at the hottest blocks, and suggests one more copy where the hits per existing copy
reach hot_hits_per_s. The frontend carries out one suggestion after another. A suggestion that was
not carried out is repeated after replicate_s_max. The store evicts cold copies.

**Counting.** A hit is a block that a routed request found at some node. Hits decay with a half-life
(forward_decay.py). Requests are noted in a list and counted on the tick, because no decision should
wait for the counting. With more than hot_keys_max keys, the coldest keys are dropped until half of
hot_keys_max is left.

**Chains.** A block without the blocks before it is useless for a prefix match. A suggestion thus
begins with the first missing block of the target. The source has the whole prefix.

**Limits.** Blocks per tick, blocks in flight in total and to one target, and copies per block are
bounded. A new node lacks every block and would be the target of every copy. The limit of blocks in
flight to a new node therefore grows from an eighth to the whole (conductor/load/worker.py).

**Turns.** Frontends that count the same hits would all suggest the same copy. A hash therefore
orders the frontends for each prefix. The first frontend suggests a copy at once. The second one
suggests the copy after TURN_S if it is still missing, and so on. This needs no messages, and also
works for a prefix that only one frontend receives.

Not here: copying (backends/frontend and mooncake_store), block locations (prefix_index).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from conductor.config import ConductorConfig
from conductor.estimates.forward_decay import ForwardDecay
from conductor.load.worker import budget, warm_up
from conductor.messages import HeatClass, HotPrefix, Replicate
from mooncake_store.prefix_index.prefix_index import PrefixIndex

NOTES_MAX = 1024  # requests noted between two ticks; a full list is counted at once
KEYS_CONSIDERED_MAX = 128  # hottest keys compared per tick
HEATS = (1, 2, 4, 8)  # lower bounds of the classes of HeatClass, in units of hot_hits_per_s
KEYS_SHOWN_MAX = 2048  # hottest keys that copies_by_heat counts, in at most 1 ms
PREFIXES_MAX = 256  # most recent prefixes, among which `hottest` chooses
TURN_S = 6.0  # longer than the 5 s after which the frontend abandons a copy


@dataclass(slots=True)
class _Heat:
    hits: float  # decayed number of hits x the current weight (forward_decay.py)
    parent: bytes | None  # block key of the previous block of the prefix; None for the first block


class Hotspots:
    """Counts hits per block, and suggests copies of the hottest prefixes on a tick."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._heats: dict[bytes, _Heat] = {}
        # Keys that were hot enough for another copy at their last hit. A tick compares only these,
        # because rates fall between hits. The dict serves as an ordered set.
        self._warm: dict[bytes, None] = {}
        rounding = 1 - 1e-9
        self._warm_hits = rounding * config.hot_hits_per_s * config.hot_half_life_s / math.log(2.0)
        self._decay = ForwardDecay(config.hot_half_life_s)
        self._notes: list[tuple[Sequence[bytes], int, float]] = []  # (keys, hits, time) not counted
        self._arriving: dict[tuple[str, bytes], float] = {}  # (target, key) -> deadline of the copy
        # Last block of each recent prefix, oldest first. The dict serves as an ordered set.
        self._latest: dict[bytes, None] = {}
        self._wanted_s: dict[bytes, float] = {}  # key of `_leaves` -> time since it needs a copy
        self._joined_s: dict[str, float] = {}  # target -> time when it joined; -inf: no warm-up

    def __len__(self) -> int:
        return len(self._heats)

    def note(self, block_keys: Sequence[bytes], blocks: int, now_s: float) -> None:
        """Note that the first `blocks` keys were hits. The next tick counts them."""
        if blocks > 0:
            self._notes.append((block_keys, blocks, now_s))
            if len(self._notes) >= NOTES_MAX:
                self._count()

    def arrived(self, keys: Iterable[bytes], node_id: str) -> None:
        """Note that the node has these blocks, so copies of them to the node are not in flight."""
        if self._arriving:
            for key in keys:
                self._arriving.pop((node_id, key), None)

    def node_down(self, node_id: str) -> None:
        self._arriving = {k: v for k, v in self._arriving.items() if k[0] != node_id}

    def suggest(
        self,
        index: PrefixIndex,
        targets: Iterable[str],
        now_s: float,
        turn: Callable[[bytes], int] = lambda key: 0,
    ) -> list[Replicate]:
        """Suggestions of copies, hottest prefix first. `targets`: nodes that may receive copies.
        `turn` returns how many other frontends suggest copies of the prefix with this first block
        key before this frontend does."""
        self._count()
        self._arriving = {k: v for k, v in self._arriving.items() if v > now_s}
        nodes, found = self._with_room(sorted(targets), now_s), []
        left = min(
            self._config.hot_blocks_per_tick_max,
            self._config.hot_blocks_in_flight_max - len(self._arriving),
        )
        leaves = self._leaves(index, now_s)
        self._wanted_s = {key: self._wanted_s.get(key, now_s) for _, key in leaves}
        for rate, key in leaves:
            if left <= 0:
                break
            if now_s < self._wanted_s[key] + TURN_S * turn(self._chain(key)[0]):
                continue
            suggestion = self._copy(index, nodes, key, rate, left)
            if suggestion is not None:
                found.append(suggestion)
                left -= len(suggestion.block_keys)
                until_s = now_s + self._config.replicate_s_max
                for copied in suggestion.block_keys:
                    self._arriving[(suggestion.target_node, copied)] = until_s
        return found

    def copies_by_heat(self, index: PrefixIndex, now_s: float) -> tuple[HeatClass, ...]:
        """Classes of the hottest KEYS_SHOWN_MAX blocks, by the hits counted until the last tick."""
        limit = self._config.hot_hits_per_s / self._per_s(now_s)
        hits = [(self._heats[key].hits / limit, key) for key in self._warm if key in self._heats]
        blocks, copies = dict.fromkeys(HEATS, 0), dict.fromkeys(HEATS, 0)
        for heat, key in heapq.nlargest(KEYS_SHOWN_MAX, hits):
            held = index.copies(key)
            if heat >= HEATS[0] and held:
                at_least = max(bound for bound in HEATS if heat >= bound)
                blocks[at_least] += 1
                copies[at_least] += held
        return tuple(HeatClass(heat, blocks[heat], copies[heat]) for heat in HEATS)

    def hottest(self, index: PrefixIndex, now_s: float, count_max: int) -> list[HotPrefix]:
        """The hottest of the recent prefixes, each with the blocks that nodes hold of it."""
        self._count()
        per_s = self._per_s(now_s)
        hits = {key: self._heats[key].hits for key in self._latest if key in self._heats}
        found = []
        for key in heapq.nlargest(count_max, hits, key=hits.__getitem__):
            chain = self._chain(key)
            held = {node: blocks for node, blocks in index.match(chain).items() if blocks}
            found.append(HotPrefix(key, len(chain), hits[key] * per_s, held))
        return found

    def _with_room(self, nodes: Sequence[str], now_s: float) -> dict[str, int]:
        """The number of blocks that may be in flight to each node. It grows for a new node."""
        config, whole = self._config, self._config.hot_target_blocks_max
        since_s = now_s if self._joined_s else -math.inf  # the first targets have no warm-up
        self._joined_s = {node: self._joined_s.get(node, since_s) for node in nodes}
        return {
            node: budget(whole, warm_up(at_s, now_s, config.slow_start_s))
            for node, at_s in self._joined_s.items()
        }

    def _leaves(self, index: PrefixIndex, now_s: float) -> list[tuple[float, bytes]]:
        """(hits per second, key) of blocks that need another copy, hottest first. A block is left
        out if the next block of its prefix is included, because both are copied together."""
        config, per_s = self._config, self._per_s(now_s)
        rates = {key: self._heats[key].hits * per_s for key in self._warm if key in self._heats}
        self._warm = {key: None for key, rate in rates.items() if rate >= config.hot_hits_per_s}
        hottest = heapq.nsmallest(KEYS_CONSIDERED_MAX, ((-rates[key], key) for key in self._warm))
        wanting: dict[bytes, float] = {}
        for minus_rate, key in hottest:
            copies = index.copies(key)
            if 0 < copies < config.hot_copies_max and -minus_rate >= config.hot_hits_per_s * copies:
                wanting[key] = -minus_rate
        inner = {self._heats[key].parent for key in wanting}
        return [(rate, key) for key, rate in wanting.items() if key not in inner]

    def _copy(
        self, index: PrefixIndex, nodes: Mapping[str, int], key: bytes, rate: float, left: int
    ) -> Replicate | None:
        """A suggestion to copy the prefix that ends with `key`, from a node that has all of it to
        the node that lacks the fewest blocks. None if no copy is needed or possible."""
        config, chain = self._config, self._chain(key)
        held = index.match(chain)
        sources = sorted(node for node, blocks in held.items() if blocks == len(chain))
        if not sources:
            return None  # no node has the whole prefix
        load = Counter(node for node, _ in self._arriving)
        have = {node: self._expected(node, chain, held.get(node, 0)) for node in nodes}
        copies = len({*sources, *(node for node in nodes if have[node] == len(chain))})
        if copies >= config.hot_copies_max or rate < config.hot_hits_per_s * copies:
            return None  # with the copies in flight, there are enough copies
        targets = [node for node in nodes if have[node] < len(chain) and load[node] < nodes[node]]
        if not targets:
            return None
        target = min(targets, key=lambda node: (-have[node], load[node], node))
        room = min(left, nodes[target] - load[target])
        missing = tuple(chain[have[target] :][:room])
        reason = f"{rate:.2f} hits/s on {copies} {'copy' if copies == 1 else 'copies'}"
        return Replicate(missing, sources[0], target, reason)

    def _expected(self, node_id: str, chain: Sequence[bytes], held: int) -> int:
        """Leading blocks of the prefix that the node has, including blocks in flight."""
        while held < len(chain) and (node_id, chain[held]) in self._arriving:
            held += 1
        return held

    def _chain(self, key: bytes) -> list[bytes]:
        """The block keys of the prefix that ends with this block, from its first counted block."""
        chain = [key]
        while (heat := self._heats.get(chain[-1])) is not None and heat.parent is not None:
            chain.append(heat.parent)
        return chain[::-1]

    def _count(self) -> None:
        for block_keys, blocks, at_s in self._notes:
            weight = self._weight(at_s)
            parent: bytes | None = None
            warm = weight * self._warm_hits
            for position in range(blocks):
                key = block_keys[position]
                heat = self._heats.get(key)
                if heat is None:
                    heat = self._heats[key] = _Heat(weight, parent)
                else:
                    heat.hits += weight
                if heat.hits >= warm:
                    self._warm[key] = None
                parent = key
            assert parent is not None  # a note has at least one block
            self._latest.pop(parent, None)
            self._latest[parent] = None
        self._notes.clear()
        for key in list(self._latest)[:-PREFIXES_MAX]:
            del self._latest[key]
        keys_max = self._config.hot_keys_max
        if len(self._heats) > keys_max:
            # A block is at least as hot as later blocks of its prefix, so these are dropped first.
            hotter = heapq.nlargest(keys_max // 2, self._heats.items(), key=lambda kv: kv[1].hits)
            self._heats = dict(hotter)

    def _weight(self, at_s: float) -> float:
        divisor = self._decay.rescaled(at_s)
        if divisor != 1.0:
            for heat in self._heats.values():
                heat.hits /= divisor
        return self._decay.weight(at_s)

    def _per_s(self, now_s: float) -> float:
        """The factor from `_Heat.hits` to hits per second: ln 2 / half-life / current weight."""
        return math.log(2.0) / self._config.hot_half_life_s / self._weight(now_s)

    def check(self) -> None:
        assert len(self._notes) < NOTES_MAX
        assert len(self._latest) <= PREFIXES_MAX
        assert len(self._arriving) <= self._config.hot_blocks_in_flight_max
        assert all(heat.hits >= 0 and math.isfinite(heat.hits) for heat in self._heats.values())
