"""Times of storing and finding, request by request; compared indexes take turns.

A round looks up every request of the trace in each index. Other work on the machine can only add
time, and a lookup takes two microseconds. So indexes are compared by `best_us`: for each request
the least time of all rounds, then the mean over the requests. Keys of 16 bytes are new objects at
each lookup, as after hashing a prompt: a reused object would have its hash cached.

Not here: the indexes (indexes.py), the code in Dynamo's Python (dynamo_client.py).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.processes import PeerProcess
from bench.index.indexes import ComparedIndex, IndexedTrace, Keys, OurIndex, PyDict, block_key

IDS, BYTES = "trace ids", "16 bytes"  # kinds of keys
COMPARED = 300  # requests whose answers are compared


@dataclass(slots=True)
class LookupRound:
    """One round of one index, in microseconds per request."""

    find_us: float  # mean of `find` alone
    p50_us: float  # this and the following fields: of `find` and the scorer's form of its result
    p99_us: float
    mean_us: float
    best_us: float  # mean over requests of the least in this and earlier rounds


@dataclass(slots=True)
class LookupTimes:
    index: str
    keys: str  # IDS or BYTES
    store_blocks_per_s: float
    rounds: list[LookupRound] = field(default_factory=list)

    def median(self, name: str) -> float:
        values: list[float] = [getattr(one, name) for one in self.rounds]
        return statistics.median(values)

    @property
    def best_us(self) -> float:
        return self.rounds[-1].best_us


class Contender:
    """One index with the trace in it."""

    def __init__(self, index: ComparedIndex, load: IndexedTrace, keys: str) -> None:
        self._index, self._load = index, load
        self._as_keys: Callable[[Sequence[int]], Keys] = list if keys == IDS else _fresh
        events = [(worker, self._as_keys(ids)) for worker, _, ids in load.stored]
        started_s = time.perf_counter()
        for worker, new in events:
            index.store(worker, new)
        seconds = time.perf_counter() - started_s
        self.measured = LookupTimes(index.name, keys, load.blocks / seconds)
        self._best_ns: list[int] = []

    def round(self) -> None:
        find, consumed, clock = self._index.find, self._index.consumed, time.perf_counter_ns
        find_ns, all_ns = [], []
        for ids in self._load.requests:
            keys = self._as_keys(ids)
            began = clock()
            found = find(keys)
            middle = clock()
            consumed(found)
            end = clock()
            find_ns.append(middle - began)
            all_ns.append(end - began)
        if isinstance(self._index, PyDict):  # a scorer takes its answer as it is
            all_ns = find_ns
        self._best_ns = list(map(min, all_ns, self._best_ns or all_ns))
        ordered, requests = sorted(all_ns), len(all_ns)
        self.measured.rounds.append(
            LookupRound(
                find_us=sum(find_ns) / requests / 1e3,
                p50_us=ordered[requests // 2] / 1e3,
                p99_us=ordered[requests * 99 // 100] / 1e3,
                mean_us=sum(ordered) / requests / 1e3,
                best_us=sum(self._best_ns) / requests / 1e3,
            )
        )

    def answers(self) -> list[dict[int, int]]:
        some = self._load.requests[:: max(1, len(self._load.requests) // COMPARED)]
        return [self._index.scores(self._index.find(self._as_keys(ids))) for ids in some]


def contenders(load: IndexedTrace) -> list[Contender]:
    """RuntimeError when they do not give the same answers."""
    made = [
        Contender(index, load, keys) for keys in (IDS, BYTES) for index in (PyDict(), OurIndex())
    ]
    first = made[0].answers()
    if any(other.answers() != first for other in made[1:]):
        raise RuntimeError(f"the indexes disagree: {load.placement}, {load.workers} workers")
    return made


class DynamoIndex:
    """NVIDIA Dynamo's RadixTree with the trace in it, in a process of the Python with its wheel
    until the stack ends; RuntimeError, with its last output, when it does not run."""

    def __init__(self, stack: ExitStack, python: Path, load: IndexedTrace) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        load.save(folder / "load.json")
        script = Path(__file__).with_name("dynamo_client.py")
        self._process = PeerProcess(
            stack,
            python,
            script,
            "index",
            str(folder / "load.json"),
            str(COMPARED),
            variables={"DYN_LOG": "error"},
        )
        first = self._process.answer()
        self.version = str(first["version"])
        self.hashing: dict[str, float] = first["hashing"]
        self.measured = LookupTimes("dynamo", IDS, load.blocks / float(first["store_s"]))
        self._answers: list[dict[int, int]] = [dict(pairs) for pairs in first["answers"]]

    def round(self) -> None:
        self.measured.rounds.append(LookupRound(**self._process.ask("round")))

    def answers(self) -> list[dict[int, int]]:
        return self._answers


def _fresh(ids: Sequence[int]) -> list[bytes]:
    return [block_key(block) for block in ids]
