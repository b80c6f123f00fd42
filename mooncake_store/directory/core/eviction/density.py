"""Two-queue eviction with ghost entries, ranked by hit density (LHD, Beckmann 2018).

Why not LRU: most blocks of a KV cache are never used again, and the next turn of a conversation
arrives after many new blocks. So when the cache is small, LRU evicts each conversation before its
next turn. A block that was used a second time is far more likely to be used again
(docs/decisions/0012 has the numbers). How long a block is worth its memory is measured while
serving. Time is counted in uses of any block; the *age* of a block is the time since its last use.

1. Blocks with one use are in the queue *once*, blocks with more uses in the queue *again*. Both
   queues are ordered by recency.
2. Eviction compares the coldest block of each queue and evicts the one with the lower value at its
   age (ReuseTimes).
3. An evicted block leaves a ghost entry with its name, which is a part of the hash of its key. A
   block that returns while its name is kept joins `again`.
4. A use under a lease counts when the lease ends (discard, then add). A use without a lease counts
   at once (touch). Prefill writes a block and decode reads it for the same request. So uses of a
   block count as one if their distance is less than 1/64 of the number of blocks in the cache.

Of the blocks used together, the start of a prompt serves more requests than its end. The end is
inserted first into both queues, so it is evicted first, as with LRU. If the blocks of a prompt are
in both queues, its start is in `again`, which is kept longer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import exp, log

import numpy as np

from mooncake_store.directory.core.eviction.lru import RecencyQueue

GHOSTS_PER_BLOCK = 4  # names remembered per idle or leased block
SAME_USE_SHIFT = 6  # uses closer than blocks / 2**SAME_USE_SHIFT count as one
STAMP_SHIFT = 8  # blocks / 2**STAMP_SHIFT consecutive uses have the same stamp (rounded time)
STAMP_USES_MIN = 8  # least number of uses per stamp, because making a stamp takes longer than a use
# Constants of Ghosts.
HASH_PRIME = 2**61 - 1  # modulus of the hash of a key
ENTRIES = 64  # entries per bucket
MARK_BYTES = 3  # bytes of a name
SPARE = 1.5  # entries per remembered name
STAMP_MASK = 2**16 - 1  # stamps have 16 bits
STAMPS = 512  # stamps for which a name is remembered
NAMES_MIN = 8_192  # least number of remembered names
NAMES_MAX = 2**23  # most remembered names: a table of 60 MiB
# Constants of ReuseTimes.
ONCE, AGAIN = 0, 1  # kinds of blocks
PER_OCTAVE = 2  # age buckets per doubling of the age
BUCKETS = 2 * 48  # ages below 2**48 uses
# Width of each age bucket, in uses; and in the logarithm of the age.
WIDTHS = [2.0 ** ((b + 1) / PER_OCTAVE) - 2.0 ** (b / PER_OCTAVE) for b in range(BUCKETS)]
LOG_WIDTH = log(2) / PER_OCTAVE
AGAIN_WEIGHT = 1.5  # correction 2 of ReuseTimes
EVIDENCE_BLOCKS = 20  # correction 1 of ReuseTimes
SAMPLE_MAX = 16_384  # most sampled blocks, but at least 1 in 256 blocks is sampled
SAMPLE_AGE_MAX = 8  # uses, per block of the cache, for which an unused block stays in the sample
WARMUP_USES = 3  # uses, per block of the cache, before measured values are used
DECAY_PER_UPDATE = 0.9  # factor on all counts at each call of learn
UPDATE_USES_MIN = 1_000  # least number of uses between two calls of learn
# Values before any measurement. They fall with age, equally for both kinds, which is LRU.
NOTHING_KNOWN: list[list[float]] = [[2.0 ** (-b / PER_OCTAVE) for b in range(BUCKETS)]] * 2


class Ghosts:
    """Ghost entries: the names of the last `length` blocks that were evicted for room.

    A hash table of buckets with ENTRIES entries each. An entry has a name (24 bits of the block
    key's hash) and the stamp of the eviction. Here a stamp is the number of evictions so far,
    divided by `_per_stamp`. A full bucket overwrites its oldest entry.

    Buckets have SPARE entries per name, so that overwriting is rare. Blocks of one prompt are
    evicted together and return together. A lost name would put one block of the prompt into the
    wrong queue, and its early eviction would make the later blocks of the prompt unreachable.

    The probability of a false positive is 1 in 260,000. A name takes 7.5 bytes; a dict of the block
    keys takes twenty times as much.
    """

    def __init__(self) -> None:
        self._length = 0  # names to remember; 0 before the first resize
        self._drops = 0  # evictions so far
        self._per_stamp = 1  # evictions per stamp
        self._buckets = 0
        self._next = bytearray()  # per bucket: index of the oldest entry, which is overwritten next
        self._marks = bytearray()
        self._stamps = array("H")

    @property
    def table_bytes(self) -> int:
        return len(self._marks) + 2 * len(self._stamps) + len(self._next)

    def resize(self, length: int) -> None:
        """Remember at least `length` names, up to NAMES_MAX. A table that grows starts empty."""
        length = min(max(length, NAMES_MIN), NAMES_MAX)
        if length <= self._length:
            return
        self._length = length
        self._per_stamp = -(-length // STAMPS)
        self._buckets = int(length * SPARE) // ENTRIES + 1
        self._next = bytearray(self._buckets)
        self._marks = bytearray(MARK_BYTES * ENTRIES * self._buckets)
        self._stamps = array("H", bytes(2 * ENTRIES * self._buckets))

    def remember(self, keys: Iterable[bytes]) -> None:
        """Record the eviction of these keys, in this order. Requires an earlier resize."""
        following, marks, stamps, per_stamp = self._next, self._marks, self._stamps, self._per_stamp
        drops, buckets, from_bytes = self._drops, self._buckets, int.from_bytes
        for key in keys:
            drops += 1
            rest, bucket = divmod(from_bytes(key, "little") % HASH_PRIME, buckets)
            at = following[bucket]
            following[bucket] = (at + 1) % ENTRIES
            at += ENTRIES * bucket
            mark = (rest & 0xFFFFFF or 1).to_bytes(MARK_BYTES, "little")
            marks[MARK_BYTES * at : MARK_BYTES * (at + 1)] = mark
            stamps[at] = drops // per_stamp & STAMP_MASK
        self._drops = drops

    def take(self, key: bytes) -> bool:
        """Whether the key's name was kept. The name is removed, because the block is back."""
        if not self._buckets:
            return False
        rest, bucket = divmod(int.from_bytes(key, "little") % HASH_PRIME, self._buckets)
        mark = (rest & 0xFFFFFF or 1).to_bytes(MARK_BYTES, "little")  # as in `remember`; never 0
        start = MARK_BYTES * ENTRIES * bucket
        end = start + MARK_BYTES * ENTRIES
        found = self._marks.find(mark, start, end)
        while found >= 0 and found % MARK_BYTES:
            found = self._marks.find(mark, found + 1, end)
        if found < 0:
            return False
        self._marks[found : found + MARK_BYTES] = bytes(MARK_BYTES)
        stamps = self._drops // self._per_stamp - self._stamps[found // MARK_BYTES] & STAMP_MASK
        return stamps <= STAMPS

    def check(self) -> None:
        entries = ENTRIES * self._buckets
        assert len(self._marks) == MARK_BYTES * entries and len(self._stamps) == entries
        assert len(self._next) == self._buckets
        assert max(self._next, default=0) < ENTRIES
        assert self._drops // self._per_stamp <= self._drops


def bucket_of(age: int) -> int:
    """The bucket of an age: 0 below 2. Buckets 2, 3, 4, 5, 6, ... begin at 2, 3, 4, 6, 8, ..."""
    if age < 2:
        return 0
    bits = age.bit_length()
    return 2 * (bits - 1) + (age >> (bits - 2) & 1)


class ReuseTimes:
    """Reuse statistics of a sample of blocks, including evicted ones.

    There are two kinds of blocks: used *once* so far, and used *again*. The age of a block is the
    number of uses of any block since its own last use, in buckets of half an octave. For each kind
    and age, the sample counts the blocks that were used again at this age, and the blocks that
    reached the age unused. The quotient is the probability of a use in the next moment (hazard).
    The hazards give the value of keeping a block of some age:

        value(age) = max over t of P(used again before age + t) / E(time until that use, at most t)

    The value is the highest number of hits per unit of time and memory that the block can still
    bring. Evicting the lowest value is optimal if the uses of each block are independent of those
    of other blocks (Gittins index; in caches: Beckmann, Chen, Cidon, "LHD", NSDI '18).

    Corrections for small samples:
    1. Prior: EVIDENCE_BLOCKS more blocks of every age, with a hazard proportional to 1/age, for
       which LRU is optimal.
    2. A block used again is worth at least AGAIN_WEIGHT times a block of the same age used once. No
       measured trace had a lower ratio, so a sample with a lower ratio is too small.
    3. The order is LRU until the cache has seen WARMUP_USES uses per block, because long times
       without a use cannot be observed earlier.

    The last byte of a block key selects the sample, so block keys must be hashes. With other keys
    the sample may be empty, and only the prior and AGAIN_WEIGHT decide.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # block key -> 2 * clock of last use + kind, oldest first
        # By kind and age bucket: blocks used again at this age; blocks that left the sample unused.
        self._returned = [[0.0] * BUCKETS, [0.0] * BUCKETS]
        self._lost = [[0.0] * BUCKETS, [0.0] * BUCKETS]
        self.next_update = UPDATE_USES_MIN  # the clock at which the owner should call `learn`
        self.sampled = 256  # a key is in the sample if its last byte is lower
        self.value = NOTHING_KNOWN

    def used(self, key: bytes, clock: int, same_use: int) -> None:
        """Record the use of a sampled key. Uses at ages below `same_use` count as one."""
        seen = self._seen.pop(key, None)
        if seen is None:
            self._seen[key] = 2 * clock
            return
        kind, age = seen & 1, clock - (seen >> 1)
        if age >= same_use:
            self._returned[kind][bucket_of(age)] += 1
            kind = AGAIN
        self._seen[key] = 2 * clock + kind

    def learn(self, clock: int, blocks: int) -> None:
        """Compute the values from the counts so far, for a cache of `blocks` blocks."""
        self.next_update = clock + max(UPDATE_USES_MIN, blocks // 2)
        self._lose(clock - SAMPLE_AGE_MAX * blocks, clock)
        while len(self._seen) > SAMPLE_MAX and self.sampled > 1:
            self.sampled //= 2
            self._seen = {key: at for key, at in self._seen.items() if key[-1] < self.sampled}
        young = self._by_age(clock)
        kinds = zip(self._returned, self._lost, young, strict=True)
        values = [
            values_of(returned, [a + b for a, b in zip(lost, alive, strict=True)])
            for returned, lost, alive in kinds
        ]
        pairs = zip(values[ONCE], values[AGAIN], strict=True)
        values[AGAIN] = [max(again, AGAIN_WEIGHT * once) for once, again in pairs]
        if clock >= WARMUP_USES * blocks:
            self.value = values
        for counts in (*self._returned, *self._lost):
            counts[:] = [DECAY_PER_UPDATE * count for count in counts]

    def _by_age(self, clock: int) -> list[list[float]]:
        """The number of sampled blocks per kind and age bucket, vectorised over the sample."""
        seen = np.fromiter(self._seen.values(), np.int64, len(self._seen))
        ages = (clock - (seen >> 1)).astype(np.float64)
        part, bits = np.frexp(ages)  # exact: an age is below 2**53
        buckets = np.where(ages < 2, 0, 2 * (bits.astype(np.int64) - 1) + (part >= 0.75))
        return [
            np.bincount(buckets[seen & 1 == kind], minlength=BUCKETS).astype(np.float64).tolist()
            for kind in (ONCE, AGAIN)
        ]

    def _lose(self, before: int, clock: int) -> None:
        """Remove blocks last used before `before` from the sample, and count them as unused."""
        gone = []
        for key, seen in self._seen.items():
            if seen >> 1 >= before:
                break
            gone.append(key)
        for key in gone:
            seen = self._seen.pop(key)
            self._lost[seen & 1][bucket_of(clock - (seen >> 1))] += 1

    def check(self) -> None:
        clocks = [seen >> 1 for seen in self._seen.values()]
        assert clocks == sorted(clocks), "the sampled keys are not in order of their last use"
        assert all(key[-1] < self.sampled for key in self._seen)
        pairs = zip(self.value[ONCE], self.value[AGAIN], strict=True)
        assert all(0 < once <= again for once, again in pairs)


def values_of(returned: list[float], not_yet: list[float]) -> list[float]:
    """The value per age bucket. `returned`: blocks used again at this age; `not_yet`: blocks last
    observed unused at this age."""
    at_risk, older = [0.0] * BUCKETS, 0.0
    for b in reversed(range(BUCKETS)):
        ended = returned[b] + not_yet[b]
        at_risk[b] = older + ended / 2
        older += ended
    rate = (sum(returned) + 0.1) / (sum(at_risk) * LOG_WIDTH + 1)  # the prior's hazard * age
    hazards = [
        (returned[b] + EVIDENCE_BLOCKS * rate * LOG_WIDTH)
        / ((at_risk[b] + EVIDENCE_BLOCKS) * WIDTHS[b])
        for b in range(BUCKETS)
    ]
    p_use = [1 - exp(-hazard * width) for hazard, width in zip(hazards, WIDTHS, strict=True)]
    times = [p / hazard for p, hazard in zip(p_use, hazards, strict=True)]
    values = []
    for b in range(BUCKETS):
        left, hits, kept, best = 1.0, 0.0, 0.0, 0.0
        for later in range(b, BUCKETS):
            hits += left * p_use[later]
            kept += left * times[later]  # the mean time spent in this bucket
            left *= 1 - p_use[later]
            if hits > best * kept:
                best = hits / kept
        values.append(best)
    return values


class Density:
    """An EvictionOrder of two recency queues, compared by the values of ReuseTimes."""

    def __init__(self) -> None:
        self._once = RecencyQueue()
        self._again = RecencyQueue()
        # Key that `discard` removed -> queue that it joins at the next `add`.
        self._away: dict[bytes, RecencyQueue] = {}
        self._ghosts = Ghosts()
        self._reuse = ReuseTimes()
        self._clock = 0  # uses of any block so far
        self._stamp = 0  # a recent clock value; one int object that many blocks share
        self._renew_at = 0  # the clock at which the next stamp begins
        self._same_use = 1  # uses of a block less than this far apart count as one

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    def add(self, keys: Sequence[bytes]) -> None:
        """See EvictionOrder. This loop is the main cost of ending a request."""
        away, once, again, ghosts = self._away, self._once, self._again, self._ghosts
        clock, renew_at, stamp, same_use = self._clock, self._renew_at, self._stamp, self._same_use
        reuse = self._reuse
        sampled, used = reuse.sampled, reuse.used
        for key in keys:
            queue = away.pop(key, None)
            if queue is None:
                assert key not in once and key not in again, f"{key.hex()} is idle already"
                queue = again if ghosts.take(key) else once
            clock += 1
            if clock >= renew_at:
                self._clock = clock
                self._renew()
                renew_at, stamp, same_use = self._renew_at, self._stamp, self._same_use
                sampled = reuse.sampled
            if key[-1] < sampled:
                used(key, clock, same_use)
            queue.append(key, stamp)
        self._clock = clock

    def touch(self, key: bytes) -> None:
        stamp, queue = self._once.pop(key), self._again
        if stamp is None:
            was_there = self._again.pop(key) is not None
            assert was_there, f"{key.hex()} is touched and not idle"
        elif self._clock - stamp < self._same_use:
            queue = self._once
        self._clock = clock = self._clock + 1
        if clock >= self._renew_at:
            self._renew()
        if key[-1] < self._reuse.sampled:
            self._reuse.used(key, clock, self._same_use)
        queue.append(key, self._stamp)

    def discard(self, keys: Sequence[bytes]) -> None:
        away, once, again = self._away, self._once, self._again
        pop_once, pop_again, later = once.pop, again.pop, self._clock - self._same_use
        for key in keys:
            stamp = pop_once(key)
            if stamp is not None:
                away[key] = once if stamp > later else again
            elif pop_again(key) is not None:
                away[key] = again

    def evicted(self, key: bytes) -> None:
        self.forget(key)
        if not self._ghosts.table_bytes:
            self._ghosts.resize(GHOSTS_PER_BLOCK * self._blocks)
        self._ghosts.remember((key,))

    def forget(self, key: bytes) -> None:
        if self._once.pop(key) is None and self._again.pop(key) is None:
            self._away.pop(key, None)

    def take_coldest(self, count: int) -> list[bytes]:
        taken: list[bytes] = []
        queues, heads = (self._once, self._again), [self._once.head(), self._again.head()]
        compared, worse = (-1, -1), ONCE  # many keys share a stamp, so few comparisons are needed
        for left in range(count - 1, -1, -1):
            once, again = heads
            if once is None or again is None:
                if once is again:
                    break
                worse = AGAIN if once is None else ONCE
                compared = -1, -1
            elif (once[1], again[1]) != compared:
                compared = once[1], again[1]
                worse = ONCE if self._is_worth_less(once[1], again[1]) else AGAIN
            taken.append(queues[worse].pop_head())
            if left:
                heads[worse] = queues[worse].head()
        if taken:
            if not self._ghosts.table_bytes:
                self._ghosts.resize(GHOSTS_PER_BLOCK * (self._blocks + len(taken) - 1))
            self._ghosts.remember(taken)
        return taken

    def keys(self, limit: int | None = None) -> list[bytes]:
        return list(islice(self._in_order(), limit))

    def _in_order(self) -> Iterator[bytes]:
        """All candidates in the order in which they would be evicted without further uses."""
        queues = self._once.items(), self._again.items()
        heads = [next(queue, None) for queue in queues]
        while heads != [None, None]:
            once, again = heads
            is_once = again is None or (once and self._is_worth_less(once[1], again[1]))
            kind = ONCE if is_once else AGAIN
            if (head := heads[kind]) is not None:
                yield head[0]
            heads[kind] = next(queues[kind], None)

    def _is_worth_less(self, stamp_of_once: int, stamp_of_again: int) -> bool:
        """Whether the coldest block of `once` has a lower value than the coldest of `again`."""
        value, clock = self._reuse.value, self._clock
        of_once = value[ONCE][bucket_of(clock - stamp_of_once)]
        of_again = value[AGAIN][bucket_of(clock - stamp_of_again)]
        if of_once == of_again:
            return stamp_of_once <= stamp_of_again
        return of_once < of_again

    @property
    def _blocks(self) -> int:
        return len(self) + len(self._away)

    def _renew(self) -> None:
        """Take a new stamp, and update everything that depends on the number of blocks."""
        blocks = self._blocks
        self._stamp = self._clock
        self._renew_at = self._clock + max(STAMP_USES_MIN, blocks >> STAMP_SHIFT)
        self._same_use = max(1, blocks >> SAME_USE_SHIFT)
        if self._clock >= self._reuse.next_update:
            self._reuse.learn(self._clock, blocks)
            if self._ghosts.table_bytes:
                self._ghosts.resize(GHOSTS_PER_BLOCK * blocks)

    def check(self) -> None:
        for part in (self._once, self._again, self._ghosts, self._reuse):
            part.check()
        idle = {key for queue in (self._once, self._again) for key, _ in queue.items()}
        assert len(idle | self._away.keys()) == self._blocks
