"""How large the directory is with ten million keys, and how much slower it answers.

    python -m bench.directory [--keys 10000000] [--few 100000] [--eviction density]

Two real directory processes, one with few block keys and one with many, are filled over the wire as
by a node and its clients (allocate, commit). Then `exist` and `lookup` of 1,000 random present keys
are sent to both in turns; the client's waiting time is measured. The blocks have no bytes.

Not here: the cost of a block's bytes (store/).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import psutil
import typer

from bench.harness.processes import BenchStore
from loadtest.harness.benchmark import benchmark, console, median_s, timed_s
from loadtest.harness.result import Cell, Target
from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.eviction import POLICIES
from mooncake_store.layout import memory_bytes_for
from mooncake_store.records.membership import UNIT_BYTES, NodeInfo

KEYS_GOAL, GIB_MAX, RATIO_MAX = 10_000_000, 4.0, 2.5
ASKED = 1_000  # block keys in one question
BATCH = 8_192  # block keys in one allocate
FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class FilledDirectory:
    client: DirectoryClient
    process: psutil.Process
    keys: np.ndarray[tuple[int], np.dtype[np.void]]  # KEY_BYTES each
    fill_s: float
    empty_gib: float

    @property
    def gib(self) -> float:
        return float(self.process.memory_info().rss) / 2**30

    def some(self, rng: np.random.Generator) -> list[bytes]:
        """ASKED different block keys, in random order."""
        chosen = rng.choice(len(self.keys), ASKED, replace=False)
        return [self.keys[index].tobytes() for index in chosen]


@contextlib.contextmanager
def filled(keys: int, eviction: str, rng: np.random.Generator) -> Iterator[FilledDirectory]:
    """A directory with that many block keys on one node, until the block ends."""
    with contextlib.ExitStack() as stack:
        store = BenchStore(
            stack, "--node-ttl-s", str(FOREVER_S), "--eviction", eviction, "--log-level", "WARNING"
        )
        client = stack.enter_context(DirectoryClient(store.address, timeout_s=60.0))
        process = psutil.Process(store.directory.pid)
        empty_gib = process.memory_info().rss / 2**30
        segment_bytes = memory_bytes_for(keys, UNIT_BYTES, UNIT_BYTES)
        client.register_node(
            NodeInfo("n", "incarnation", "host", "none", segment_bytes, "", b"", 0)
        )
        client.attach("n", "bench", UNIT_BYTES)
        names = np.frombuffer(rng.bytes(keys * KEY_BYTES), f"V{KEY_BYTES}")
        started_s = time.perf_counter()
        for start in range(0, keys, BATCH):
            fill(client, [name.tobytes() for name in names[start : start + BATCH]])
        fill_s = time.perf_counter() - started_s
        assert client.stats().blocks == keys, "a key was evicted, or came twice"
        yield FilledDirectory(client, process, names, fill_s, empty_gib)


def fill(client: DirectoryClient, keys: Sequence[bytes]) -> None:
    given = client.allocate("n", keys, "bench", 60.0)
    rows = [
        (key, slot.slot, slot.generation, int.from_bytes(key[:8], "little"))
        for key, slot in zip(keys, given.slots, strict=True)
        if slot is not None
    ]
    assert all(client.commit("n", rows, "bench", 0.0)) and len(rows) == len(keys)


def exist(one: FilledDirectory, keys: list[bytes]) -> None:
    assert all(one.client.exist(keys))


def lookup(one: FilledDirectory, keys: list[bytes]) -> None:
    assert all(one.client.lookup(keys, "reader", 0.0, prefix_only=False))


def lease(one: FilledDirectory, keys: list[bytes]) -> None:
    assert all(one.client.lookup(keys, "reader", 60.0, prefix_only=False))
    one.client.release("reader")


WAYS: dict[str, Callable[[FilledDirectory, list[bytes]], None]] = {
    "exist": exist,
    "lookup": lookup,
    "lease_and_release": lease,
}


def ask(
    both: Sequence[FilledDirectory], rounds: int, rng: np.random.Generator
) -> list[dict[str, float]]:
    """For each directory the median milliseconds of each way; they take turns."""

    def asked(way: str, one: FilledDirectory) -> float:
        keys = one.some(rng)
        return timed_s(lambda: WAYS[way](one, keys))

    turns = {(way, at): partial(asked, way, one) for way in WAYS for at, one in enumerate(both)}
    found = median_s(turns, rounds)
    return [{way: found[way, at] * 1e3 for way in WAYS} for at in range(len(both))]


def measure(
    few: int, many: int, rounds: int, eviction: str, seed: int
) -> tuple[list[dict[str, Cell]], list[Target]]:
    rng = np.random.default_rng(seed)
    with filled(few, eviction, rng) as small, filled(many, eviction, rng) as large:
        both = (small, large)
        found = ask(both, rounds, rng)
        rows = [row(one, eviction, times) for one, times in zip(both, found, strict=True)]
        gib = large.gib
    why = "" if many >= KEYS_GOAL else f"promised for {KEYS_GOAL:,} keys, here are {many:,}"
    ratio = found[1]["exist"] / found[0]["exist"]
    return rows, [
        Target("directory_gib", None if why else round(gib, 3), "<=", GIB_MAX, why),
        Target("exist_1000_over_few_keys", None if why else round(ratio, 3), "<=", RATIO_MAX, why),
    ]


def row(one: FilledDirectory, eviction: str, times: dict[str, float]) -> dict[str, Cell]:
    keys = len(one.keys)
    return {
        "keys": keys,
        "eviction": eviction,
        "fill_s": round(one.fill_s, 1),
        "rss_gib": round(one.gib, 3),
        "bytes_per_key": round((one.gib - one.empty_gib) * 2**30 / keys),
        **{f"{name}_ms": round(value, 3) for name, value in times.items()},
    }


def main(
    keys: Annotated[
        int, typer.Option(min=ASKED, help="Block keys of the large directory.")
    ] = KEYS_GOAL,
    few: Annotated[int, typer.Option(min=ASKED, help="Block keys of the small one.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=3, help="Questions of each kind to each.")] = 200,
    eviction: Annotated[str, typer.Option(help=f"{' or '.join(POLICIES)}.")] = "density",
    seed: Annotated[int, typer.Option(help="Seed of the keys and questions.")] = 1,
) -> None:
    """Fill two directories and ask both; the last line is JSON."""
    with benchmark("directory") as run, console.status(f"filling with {keys:,} keys ..."):
        run.rows, run.targets = measure(few, keys, rounds, eviction, seed)


if __name__ == "__main__":
    typer.run(main)
