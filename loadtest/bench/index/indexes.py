"""Prefix indexes behind one face: store a worker's new blocks, find who has how much of a prompt.

`pydict` is the reference that the targets are promised against: a dictionary of sets of workers, as
anybody would write it first. `ours` is the production index
(mooncake_store/prefix_index/prefix_index.py), asked for what the conductor scores with: an array of
blocks per worker. Both take either kind of key, small integers as in the trace or 16 random bytes
as in production: integers that count up lie side by side in a dictionary, keys that are hashes do
not, and a cache line that is not there costs more than everything else in a lookup.

`Adapter` has the five methods that the script by which Dynamo was first measured calls.

Not here: Dynamo's RadixTree, which has a Python of its own (peer_client.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mooncake_store.prefix_index.holder_numbers import BlockCounts, Segment
from mooncake_store.prefix_index.prefix_index import PrefixIndex

Keys = Sequence[Any]  # int or bytes


class Index(Protocol):
    name: str

    def store(self, worker: int, keys: Keys) -> None: ...
    def find(self, keys: Keys) -> Any: ...

    def consumed(self, found: Any) -> Any:
        """`find`'s answer in the form that a scorer of all workers takes."""

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


class Ours:
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


class Adapter:
    """For that script. Its `scores` is a dict of all workers, as that script compares them; the
    array that our scorer takes is `Ours.consumed`."""

    name, version = "mooncake-triton", "-"

    def __init__(self) -> None:
        self._ours = Ours()

    def prep(self, worker: int, parent: int | None, hashes: list[int]) -> tuple[int, list[int]]:
        return worker, hashes

    def store(self, prepared: tuple[int, list[int]]) -> None:
        self._ours.store(*prepared)

    def find(self, hashes: list[int]) -> list[Segment]:
        return self._ours.find(hashes)  # type: ignore[arg-type]  # integers serve as keys too

    def scores(self, found: list[Segment]) -> dict[int, int]:
        return self._ours.scores(found)
