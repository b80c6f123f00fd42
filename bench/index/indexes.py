"""A trace as prefix indexes see it, and the compared indexes behind one interface.

Each request is cached whole on the workers of its placement, and a worker announces only blocks
that it did not have. These are the rules, and the random workers, of the script that first measured
NVIDIA Dynamo's figures.

    rr      request i on worker i % workers
    repR    each request on R random workers (rep4: hot prefixes on many of them)

`pydict` is the reference of the targets: a dictionary of sets of workers, the obvious first
version. `ours` is the production index (mooncake_store/prefix_index/prefix_index.py) with the
conductor's form of a result: an array of blocks per worker. Both take either kind of key, small
integers as in the trace or 16 random bytes as in production. Consecutive integers lie side by side
in a dictionary, hashed keys do not, and a cache miss costs more than all other parts of a lookup.

Their memory is measured in a process of its own:

    python -m bench.index.indexes LOAD.npz WAY        one JSON object

WAY is ours or pydict; keys are 16 bytes. `rss_bytes` is the growth of the resident set after
storing: the index with its keys, and the allocator's waste. Free memory is returned to the system
before each measurement, because the figure would otherwise depend on earlier allocations.
`counted_bytes` is the same by sys.getsizeof, without the waste. Both are per different block,
however many workers have it.

Not here: Dynamo's RadixTree, which has a Python of its own (dynamo_client.py); timing (lookups.py).
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from loadtest.replay.trace import read_trace
from mooncake_store.prefix_index.prefix_index import BlockCounts, PrefixIndex, Segment

PLACEMENT_SEED = 42
Keys = Sequence[Any]  # int or bytes
Stored = tuple[int, int | None, list[int]]  # (worker, the block before these, new blocks there)


@dataclass(frozen=True, slots=True)
class IndexedTrace:
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
        path.write_text(
            json.dumps({"requests": self.requests, "stored": self.stored}), encoding="utf-8"
        )


def requests_of(trace: Path, requests_max: int | None = None) -> list[list[int]]:
    """The block ids of each request, in order of arrival."""
    return [list(row.hash_ids) for row in read_trace(trace, requests_max)]


def placed(requests: Sequence[Sequence[int]], placement: str, workers: int) -> IndexedTrace:
    """ValueError for an unknown placement."""
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
    return IndexedTrace(placement, workers, requests, stored)


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
    """16 bytes for a block id of a trace, distributed like real block keys; a new object each
    time.
    """
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=16).digest()


class ComparedIndex(Protocol):
    name: str

    def store(self, worker: int, keys: Keys) -> None: ...
    def find(self, keys: Keys) -> Any: ...

    def consumed(self, found: Any) -> Any:
        """The result of `find` in the form that a scorer of all workers takes."""

    def scores(self, found: Any) -> dict[int, int]:
        """Worker -> blocks, to compare answers; not measured."""


class PyDict:
    """Key -> set of workers."""

    name = "pydict"

    def __init__(self) -> None:
        self._workers: dict[Any, set[int]] = {}

    def store(self, worker: int, keys: Keys) -> None:
        for key in keys:
            workers = self._workers.get(key)
            if workers is None:
                self._workers[key] = {worker}
            else:
                workers.add(worker)

    def find(self, keys: Keys) -> dict[int, int]:
        found: dict[int, int] = {}
        alive: set[int] | None = None
        depth = 0
        for depth, key in enumerate(keys):
            workers = self._workers.get(key)
            if not workers:
                break
            left = set(workers) if alive is None else alive & workers
            if alive is not None:
                for worker in alive - left:
                    found[worker] = depth
            alive = left
            if not alive:
                break
        else:
            depth = len(keys)
        for worker in alive or ():
            found[worker] = depth
        return found

    def consumed(self, found: dict[int, int]) -> dict[int, int]:
        return found

    def scores(self, found: dict[int, int]) -> dict[int, int]:
        return found


class OurIndex:
    """The production index; workers are named by their numbers."""

    name = "ours"

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.find = self.index.find
        self.consumed = self.index.blocks_by_number

    def store(self, worker: int, keys: Keys) -> None:
        self.index.add_many(keys, str(worker))

    def scores(self, found: Sequence[Segment]) -> dict[int, int]:
        blocks: BlockCounts = self.index.blocks_by_number(found)
        return {int(self.index.name(n)): int(blocks[n]) for n in blocks.nonzero()[0].tolist()}


def memory_per_block(load: IndexedTrace, way: str, folder: Path) -> dict[str, float]:
    """rss_bytes and counted_bytes per block."""
    path = folder / "load.npz"
    np.savez(
        path,
        workers=np.array([worker for worker, _, _ in load.stored]),
        lengths=np.array([len(ids) for _, _, ids in load.stored]),
        ids=np.concatenate([ids for _, _, ids in load.stored]),
    )
    command = [sys.executable, "-m", "bench.index.indexes", str(path), way]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def resident_bytes() -> int:
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


def distinct(index: PrefixIndex) -> Iterator[object]:
    """Every object that the index keeps for its keys, once."""
    yield index._bitmaps
    yield from index._bitmaps
    yield from {id(bitmap): bitmap for bitmap in index._bitmaps.values()}.values()
    yield from index._pages._pages


def main() -> None:
    index: ComparedIndex = PyDict() if sys.argv[2] == "pydict" else OurIndex()
    with np.load(sys.argv[1]) as file:
        workers, lengths, ids = (file[name] for name in ("workers", "lengths", "ids"))
    keys, starts = len(np.unique(ids)), np.cumsum(lengths) - lengths
    before_bytes = resident_bytes()
    for worker, start, length in zip(workers, starts, lengths, strict=True):
        new = [block_key(int(block)) for block in ids[start : start + length]]
        index.store(int(worker), new)
    found = {"rss_bytes": (resident_bytes() - before_bytes) / keys}
    if isinstance(index, OurIndex):
        counted = sum(sys.getsizeof(each) for each in distinct(index.index))
        found["counted_bytes"] = counted / keys
    print(json.dumps(found))


if __name__ == "__main__":
    main()
