"""A trace as an index sees it: who caches which blocks, and which prompts are looked up.

Each request is cached whole on the workers that its placement names, and a worker announces only
blocks that it did not have: the same rules, and the same random workers, as the script that
NVIDIA Dynamo's figures were first measured with.

    rr      request i on worker i % workers
    repR    each request on R random workers (rep4: hot prefixes on many of them)

Not here: the indexes (indexes.py), their clocks (lookups.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.replay.trace import read_trace

PLACEMENT_SEED = 42

Stored = tuple[int, int | None, list[int]]  # (worker, the block before these, new blocks there)


@dataclass(frozen=True, slots=True)
class Load:
    placement: str
    workers: int
    requests: Sequence[Sequence[int]]  # block ids of each prompt
    stored: Sequence[Stored]

    @property
    def blocks(self) -> int:
        """Pairs of a block and a worker that has it."""
        return sum(len(ids) for _, _, ids in self.stored)

    @property
    def keys(self) -> int:
        """Different blocks."""
        return len({block for _, _, ids in self.stored for block in ids})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"requests": self.requests, "stored": self.stored}))


def requests_of(trace: Path, requests_max: int | None = None) -> list[list[int]]:
    """The block ids of each request, in order of arrival."""
    return [list(row.hash_ids) for row in read_trace(trace, requests_max)]


def placed(requests: Sequence[Sequence[int]], placement: str, workers: int) -> Load:
    """ValueError for a placement that is none."""
    stored: list[Stored] = []
    has: list[set[int]] = [set() for _ in range(workers)]
    homes = _homes(len(requests), placement, workers)
    for ids, workers_of_it in zip(requests, homes, strict=True):
        for worker in workers_of_it:
            known = 0
            while known < len(ids) and ids[known] in has[worker]:
                known += 1
            if new := list(ids[known:]):
                has[worker].update(new)
                stored.append((worker, ids[known - 1] if known else None, new))
    return Load(placement, workers, requests, stored)


def _homes(requests: int, placement: str, workers: int) -> list[list[int]]:
    if placement == "rr":
        return [[number % workers] for number in range(requests)]
    if not (placement.startswith("rep") and placement[3:].isdecimal() and int(placement[3:])):
        raise ValueError(
            f"placement {placement!r} is neither rr nor rep and a number, such as rep4"
        )
    copies = min(int(placement[3:]), workers)
    rng = random.Random(PLACEMENT_SEED)
    return [rng.sample(range(workers), copies) for _ in range(requests)]


def block_key(block: int) -> bytes:
    """16 bytes for a block id of a trace, spread like real block keys; a new object each time."""
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=16).digest()
