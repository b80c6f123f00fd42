"""How soon are blocks used again? Learned from a sample of them, dropped ones included.

Two kinds of blocks: used *once* so far, and used *again*. Age is counted in uses (of any block)
since a block's own last use, in buckets of half an octave. For both kinds it is counted how many
blocks of each age came back at that age, and how many got as old without coming back; that gives
the chance to be used again in the next moment (hazard), and from it what keeping a block is worth:

    value(age) = max over t of  P(used again before age + t) / expected time kept, at most t

the most hits per unit of time and memory that it can still bring. Dropping the block of the least
value is what is best when the future of each block does not depend on the others (Gittins' index;
caches call the same thing hit density: Beckmann, Chen, Cidon, "LHD", NSDI '18).

Few facts are no facts: as if EVIDENCE_BLOCKS blocks of every age had been seen to come back at a
rate of 1/age, the law under which least recently used is best. And a block used again is worth at
least AGAIN_WEIGHT times one of the same age that was used once: on no trace was it less, and where
the sample says so it is too small. Before so many uses that it could be seen how long blocks stay
away, nothing is known: the order is that of plain LRU.

The sample goes by the last byte of a key, so keys must be hashes; with others there may be no
sample, and only the weight and the law decide. Pure: same uses, same values.

Not here: the order of blocks (density.py).
"""

from __future__ import annotations

from math import exp, log

ONCE, AGAIN = 0, 1
PER_OCTAVE = 2
BUCKETS = 2 * 48
WIDTHS = [2.0 ** ((b + 1) / PER_OCTAVE) - 2.0 ** (b / PER_OCTAVE) for b in range(BUCKETS)]
LOG_WIDTH = log(2) / PER_OCTAVE
AGAIN_WEIGHT = 1.5
EVIDENCE_BLOCKS = 20
SAMPLE_MAX = 16_384  # blocks watched; more only where one in 256 is more
MEMORY = 8  # a block is watched for so many uses per block of the cache
WAIT = 3  # nothing is believed before so many uses per block of the cache
KEPT_PER_LESSON = 0.9  # old facts count less with each lesson
LESSON_USES_MIN = 1_000
# The older the less, of either kind: least recently used.
NOTHING_KNOWN: list[list[float]] = [[2.0 ** (-b / PER_OCTAVE) for b in range(BUCKETS)]] * 2


def bucket_of(age: int) -> int:
    """Half octaves: 1, 2, 3, 4, 6, 8, 12, ... begin one each (1 begins two)."""
    if age < 2:
        return 0
    bits = age.bit_length()
    return 2 * (bits - 1) + (age >> (bits - 2) & 1)


class ReuseTimes:
    """What a block of either kind and any age is worth."""

    __slots__ = ("_lost", "_next_lesson", "_returned", "_seen", "sampled", "value")

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # key -> 2 * clock of its last use + kind, oldest first
        self._returned = [[0.0] * BUCKETS, [0.0] * BUCKETS]
        self._lost = [[0.0] * BUCKETS, [0.0] * BUCKETS]
        self._next_lesson = LESSON_USES_MIN
        self.sampled = 256  # keys whose last byte is below are watched
        self.value = NOTHING_KNOWN

    @property
    def next_lesson(self) -> int:
        """At this clock `learn` should be called."""
        return self._next_lesson

    def used(self, key: bytes, clock: int, same_use: int) -> None:
        """A watched key was used; uses less than `same_use` apart are one."""
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
        """Values from what was seen so far, for a cache of so many blocks."""
        self._next_lesson = clock + max(LESSON_USES_MIN, blocks // 2)
        self._lose(clock - MEMORY * blocks, clock)
        while len(self._seen) > SAMPLE_MAX and self.sampled > 1:
            self.sampled //= 2
            self._seen = {key: at for key, at in self._seen.items() if key[-1] < self.sampled}
        young = [[0.0] * BUCKETS, [0.0] * BUCKETS]
        for seen in self._seen.values():
            young[seen & 1][bucket_of(clock - (seen >> 1))] += 1
        kinds = zip(self._returned, self._lost, young, strict=True)
        values = [
            values_of(returned, [a + b for a, b in zip(lost, alive, strict=True)])
            for returned, lost, alive in kinds
        ]
        pairs = zip(values[ONCE], values[AGAIN], strict=True)
        values[AGAIN] = [max(again, AGAIN_WEIGHT * once) for once, again in pairs]
        if clock >= WAIT * blocks:
            self.value = values
        for counts in (*self._returned, *self._lost):
            counts[:] = [KEPT_PER_LESSON * count for count in counts]

    def _lose(self, before: int, clock: int) -> None:
        """Who was last used before then is not coming back."""
        gone = []
        for key, seen in self._seen.items():
            if seen >> 1 >= before:
                break
            gone.append(key)
        for key in gone:
            seen = self._seen.pop(key)
            self._lost[seen & 1][bucket_of(clock - (seen >> 1))] += 1

    def check(self) -> None:
        """Prove the invariants."""
        clocks = [seen >> 1 for seen in self._seen.values()]
        assert clocks == sorted(clocks), "the watched keys are not in order of their last use"
        assert all(key[-1] < self.sampled for key in self._seen)
        pairs = zip(self.value[ONCE], self.value[AGAIN], strict=True)
        assert all(0 < once <= again for once, again in pairs)


def values_of(returned: list[float], not_yet: list[float]) -> list[float]:
    """The value of a block in each bucket of age, from how many ended in it, either way."""
    at_risk, older = [0.0] * BUCKETS, 0.0
    for b in reversed(range(BUCKETS)):
        ended = returned[b] + not_yet[b]
        at_risk[b] = older + ended / 2
        older += ended
    rate = (sum(returned) + 0.1) / (sum(at_risk) * LOG_WIDTH + 1)  # of 1/age
    hazards = [
        (returned[b] + EVIDENCE_BLOCKS * rate * LOG_WIDTH)
        / ((at_risk[b] + EVIDENCE_BLOCKS) * WIDTHS[b])
        for b in range(BUCKETS)
    ]
    chances = [1 - exp(-hazard * width) for hazard, width in zip(hazards, WIDTHS, strict=True)]
    times = [chance / hazard for chance, hazard in zip(chances, hazards, strict=True)]
    values = []
    for b in range(BUCKETS):
        left, hits, kept, best = 1.0, 0.0, 0.0, 0.0
        for later in range(b, BUCKETS):
            hits += left * chances[later]
            kept += left * times[later]  # the mean time spent in this bucket
            left *= 1 - chances[later]
            if hits > best * kept:
                best = hits / kept
        values.append(best)
    return values
