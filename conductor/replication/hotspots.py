"""Which prefixes are hot, and where one more copy of them would help.

Routing spreads hot prefixes by itself (a fetch leaves a copy behind), but only once a worker near
the only copy is already too busy. This policy acts a little earlier: every tick it looks at the
hottest blocks and suggests one more copy where hits per copy are above a limit. It only suggests;
the shell copies when it has nothing better to do, and a suggestion that was not carried out is
made again after replicate_s_max. Copies are never moved or removed here, so no suggestion can cost
the last one: forgetting cold copies is the store's eviction.

Counting. A hit is a block that a routed request found somewhere. Hits fade with a half-life
(forward_decay.py), so a count is one number and nothing has to be walked. Requests are noted in a
list and counted on the tick, off the path of a decision. Memory is bounded: beyond hot_keys_max
the colder half of the keys is forgotten.

Chains. A block without the blocks before it is useless to a prefix match, so what is suggested is
the rest of a whole prefix that the target lacks, in order, from a node that has all of it.

Limits: blocks suggested per tick, in flight in total, in flight to one target, copies per block. A
node that joins others lacks everything, so it would be everybody's first choice: its limit grows
from an eighth to the whole (conductor/load/worker.py).

Turns. Frontends that see the same hits would all suggest the same copy. So for each prefix they
have an order: the first suggests at once, the second when it still wants the copy `TURN_S` later,
and so on. Nobody has to be asked, and a prefix that only one of them sees is copied by that one.

Not here: copying (the shell and mooncake_store), which node has what (prefix_index).
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

NOTES_MAX = 1024  # requests noted between two ticks; more are counted at once
KEYS_CONSIDERED_MAX = 128  # hottest keys looked at per tick
HEATS = (1, 2, 4, 8)  # lower bounds of the classes that are shown, in units of hot_hits_per_s
KEYS_SHOWN_MAX = 2048  # hottest keys in these classes: nobody waits longer than 1 ms for them
PREFIXES_MAX = 256  # latest found ones, of which the hottest are shown
TURN_S = 6.0  # the shell gives up a copy after 5


@dataclass(slots=True)
class _Heat:
    hits: float  # in units of today's weight at the time of each hit
    parent: bytes | None  # the block before it in its prefix


class Hotspots:
    """Counts hits per block; on a tick, suggests copies of the hottest prefixes."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._heats: dict[bytes, _Heat] = {}
        # Those hot enough at their last hit for another copy: a tick looks at no others. Rates only
        # fall between hits, so none is missed. In order, as a set.
        self._warm: dict[bytes, None] = {}
        rounding = 1 - 1e-9
        self._warm_hits = rounding * config.hot_hits_per_s * config.hot_half_life_s / math.log(2.0)
        self._decay = ForwardDecay(config.hot_half_life_s)
        self._notes: list[tuple[Sequence[bytes], int, float]] = []
        self._arriving: dict[tuple[str, bytes], float] = {}  # (target, key) -> given up at
        # Ends of the prefixes that were found last: what is hot is among them. In order, as a set.
        self._latest: dict[bytes, None] = {}
        self._wanted_s: dict[bytes, float] = {}  # leaves that want a copy, and since when
        self._joined_s: dict[str, float] = {}  # when each target was first seen beside others

    def __len__(self) -> int:
        return len(self._heats)

    def note(self, block_keys: Sequence[bytes], blocks: int, now_s: float) -> None:
        """The first `blocks` keys were hits. Cheap: they are counted on the next tick."""
        if blocks > 0:
            self._notes.append((block_keys, blocks, now_s))
            if len(self._notes) >= NOTES_MAX:
                self._count()

    def arrived(self, key: bytes, node_id: str) -> None:
        """The block is on the node now, whoever copied it."""
        if self._arriving:
            self._arriving.pop((node_id, key), None)

    def arrived_many(self, keys: Iterable[bytes], node_id: str) -> None:
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
        """Copies worth making now, hottest prefix first. `targets`: nodes that may take copies;
        `turn`: how many frontends come before this one for the prefix that begins with this key."""
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
        """Of the hottest KEYS_SHOWN_MAX blocks that are hot, as they were at the last tick."""
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
        """Of the PREFIXES_MAX prefixes that were found last, whole or in part somewhere."""
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
        """How many blocks may be on their way to each node: a newcomer has a growing share."""
        config, whole = self._config, self._config.hot_target_blocks_max
        since_s = now_s if self._joined_s else -math.inf  # they all came together
        self._joined_s = {node: self._joined_s.get(node, since_s) for node in nodes}
        return {
            node: budget(whole, warm_up(at_s, now_s, config.slow_start_s))
            for node, at_s in self._joined_s.items()
        }

    def _leaves(self, index: PrefixIndex, now_s: float) -> list[tuple[float, bytes]]:
        """The deepest blocks that deserve another copy; those before them come along."""
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
        """The rest of this prefix, from a node that has it to the one that lacks least of it."""
        config, chain = self._config, self._chain(key)
        held = index.match(chain)
        sources = sorted(node for node, blocks in held.items() if blocks == len(chain))
        if not sources:
            return None  # it is not whole anywhere
        load = Counter(node for node, _ in self._arriving)
        have = {node: self._expected(node, chain, held.get(node, 0)) for node in nodes}
        copies = len({*sources, *(node for node in nodes if have[node] == len(chain))})
        if copies >= config.hot_copies_max or rate < config.hot_hits_per_s * copies:
            return None  # those that are on their way are enough
        targets = [node for node in nodes if have[node] < len(chain) and load[node] < nodes[node]]
        if not targets:
            return None
        target = min(targets, key=lambda node: (-have[node], load[node], node))
        room = min(left, nodes[target] - load[target])
        missing = tuple(chain[have[target] :][:room])
        reason = f"{rate:.2f} hits/s on {copies} {'copy' if copies == 1 else 'copies'}"
        return Replicate(missing, sources[0], target, reason)

    def _expected(self, node_id: str, chain: Sequence[bytes], held: int) -> int:
        """Leading blocks that the node has or is about to have."""
        while held < len(chain) and (node_id, chain[held]) in self._arriving:
            held += 1
        return held

    def _chain(self, key: bytes) -> list[bytes]:
        """The prefix that ends with this block, as far back as it is still counted."""
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
        if len(self._heats) > self._config.hot_keys_max:
            self._forget_colder_half()

    def _weight(self, at_s: float) -> float:
        divisor = self._decay.rescaled(at_s)
        if divisor != 1.0:
            for heat in self._heats.values():
                heat.hits /= divisor
        return self._decay.weight(at_s)

    def _per_s(self, now_s: float) -> float:
        """Multiplies a count into hits per second: ln 2 / half-life, at today's weight."""
        return math.log(2.0) / self._config.hot_half_life_s / self._weight(now_s)

    def _forget_colder_half(self) -> None:
        # A block is at least as hot as those after it, so chains lose their ends, not their roots.
        keep = heapq.nlargest(
            self._config.hot_keys_max // 2, self._heats.items(), key=lambda item: item[1].hits
        )
        self._heats = dict(keep)

    def check(self) -> None:
        """Prove the invariants."""
        assert len(self._notes) < NOTES_MAX
        assert len(self._latest) <= PREFIXES_MAX
        assert len(self._arriving) <= self._config.hot_blocks_in_flight_max
        assert all(heat.hits >= 0 and math.isfinite(heat.hits) for heat in self._heats.values())
