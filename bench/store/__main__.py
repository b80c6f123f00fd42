"""Bytes per second of the KV store beside memcpy, raw NIXL, the disk, and Mooncake's own store.

    python -m bench.store [--peer-python PATH] [--ssd-folder DIR]

It starts a directory and three storage nodes as processes and moves batches of 16 random blocks
between them and a client's registered, pre-faulted memory, metadata calls included. Own node: the
mapped segment; other node: one-sided NIXL. Compared ways take turns, batch by batch. Mooncake has
turns of its own, because its processes empty the CPU's caches of ours, which a memcpy does not. A
segment has small pages in /dev/shm here, which slow memcpy too: the row `memcpy huge pages` is the
same between two arrays in huge pages. Mooncake does not verify; ours does, unless a row states
otherwise.

Not here: the ways and several clients at once (ways.py), the SSD (ssd_tier.py), Mooncake's
processes (mooncake.py), goals (targets.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import ssd_tier
from bench.harness.processes import BenchStore
from bench.store.mooncake import OWN_PROCESS, TCP, Mooncake
from bench.store.targets import SIZES, Seconds, beside_mooncake, targets
from bench.store.ways import (
    BATCH,
    MB,
    WARM_ROUNDS,
    Pattern,
    RawNixl,
    Way,
    copying,
    fill,
    getting,
    pages,
    payload_of,
    putting,
    together,
)
from loadtest.harness.benchmark import BlocksSeed, benchmark, console, median_s, moved
from loadtest.harness.result import Cell
from loadtest.harness.server import CannotMeasure
from mooncake_store.client.client import StoreClient
from mooncake_store.memory.segment import Segment

NEAR, FAR, SSD = "near", "far", "ssd"  # the clients' own node, another one, one with an SSD
MEMORY_BYTES = 256 * MB  # of blocks, and of the client's buffer
DRAM_MIB = 1_024  # room for blocks that are not removed yet, and for reservations
EXIST_KEYS = 1_000
SSD_NODE_MIB, SSD_MIB = 128, 1_024


@contextlib.contextmanager
def bench_store(ssd_folder: Path) -> Iterator[str]:
    """The address of a directory with three nodes. SSD has little DRAM, so its blocks spill."""
    with contextlib.ExitStack() as stack:
        store = BenchStore(stack)

        def node(node_id: str, mib: int, *more: str) -> None:
            unit, control = str(ssd_tier.UNIT_BYTES), f"ipc://{store.folder}/{node_id}"
            store.node(node_id, mib * MB, "--unit-bytes", unit, "--control", control, *more)

        node(NEAR, DRAM_MIB)
        node(FAR, DRAM_MIB)
        ssd = ("--ssd-path", str(ssd_folder), "--ssd-bytes", str(SSD_MIB * MB))
        node(SSD, SSD_NODE_MIB, *ssd)
        yield store.address


@dataclass(frozen=True, slots=True)
class Effort:
    """Size of the measurement: rounds of `batches` batches of each way, all ways in turns."""

    rounds: int
    batches: int
    seed: int

    def medians_s(self, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        found = [
            median_s(ways, self.batches, 0 if turn else WARM_ROUNDS) for turn in range(self.rounds)
        ]
        return {name: [each[name] for each in found] for name in ways}


def measure(
    address: str, block_bytes: int, peers: Mapping[str, Mooncake], effort: Effort
) -> dict[str, list[float]]:
    """Seconds of a batch of every way, for one size: the median of each round."""
    rng = np.random.default_rng(effort.seed)
    local = pages(MEMORY_BYTES, rng)
    pattern = Pattern(block_bytes, MEMORY_BYTES // block_bytes // 2, local, rng)
    with contextlib.ExitStack() as stack:

        def client(node_id: str, is_verified: bool = True, threads: int = 2) -> StoreClient:
            made = stack.enter_context(
                StoreClient(address, node_id, is_verified=is_verified, threads=threads)
            )
            made.register(local)
            return made

        def beside_peers(verb: str, ours: Mapping[str, Way]) -> dict[str, Way]:
            if not peers:
                return {}
            compared = (verb, f"{verb} unverified", f"{verb} nixl")
            return {beside_mooncake(each): ours[each] for each in compared} | {
                f"mooncake {verb}, {path}": partial(peer.ask, verb, block_bytes)
                for path, peer in peers.items()
            }

        near, near_fast = client(NEAR), client(NEAR, is_verified=False)
        near_one = client(NEAR, threads=1)
        # A client that belongs to the other node reaches `near` by NIXL.
        far, far_fast = client(FAR), client(FAR, is_verified=False)
        far_one = client(FAR, is_verified=False, threads=1)
        info = {node.node_id: node for node in near.directory.nodes()}[NEAR]
        fill(near, pattern, NEAR)
        for peer in peers.values():
            peer.ask("fill", block_bytes)
        segment = stack.enter_context(Segment.open(info.segment_path, info.segment_bytes))
        raw, raw_two = RawNixl(info, pattern), RawNixl(info, pattern, 2)
        payload, huge = payload_of(segment, info), pages(local.nbytes, rng)
        gets: dict[str, Way] = {
            "memcpy from segment": copying(payload, pattern, True),
            "get": getting(near, pattern),
            "memcpy huge pages": copying(huge, pattern, True),
            "get, 1 thread": getting(near_one, pattern),
            "get unverified": getting(near_fast, pattern),
            "raw nixl read": partial(raw.transfer, "READ"),
            "raw nixl read, 2 lanes": partial(raw_two.transfer, "READ"),
            "get nixl": getting(far, pattern),
            "get nixl unverified": getting(far_fast, pattern),
            "get nixl unverified, 1 thread": getting(far_one, pattern),
        }
        puts: dict[str, Way] = {
            "memcpy to segment": copying(payload, pattern, False),
            "put": putting(near, pattern, NEAR),
            "put unverified": putting(near_fast, pattern, NEAR),
            "put nixl": putting(far, pattern, NEAR),
            "put, 1 thread": putting(near_one, pattern, NEAR),
        }
        found = effort.medians_s(gets) | effort.medians_s(beside_peers("get", gets))
        near.remove(pattern.keys)
        for peer in peers.values():
            peer.ask("empty")
        found |= effort.medians_s(puts) | effort.medians_s(beside_peers("put", puts))
        for peer in peers.values():
            peer.ask("empty")
    return found


def measure_exist(
    address: str, peers: Mapping[str, Mooncake], effort: Effort
) -> dict[str, list[float]]:
    """Seconds of `exist` for 1,000 present block keys: the median of each round."""
    with StoreClient(address, NEAR) as client:
        keys = [i.to_bytes(16, "little") for i in range(EXIST_KEYS)]
        small = [np.zeros(64, np.uint8)] * BATCH
        for start in range(0, EXIST_KEYS, BATCH):
            part = keys[start : start + BATCH]
            assert all(client.put(part, small[: len(part)], NEAR))

        def exist() -> float:
            started_s = time.perf_counter()
            there = client.exist(keys)
            seconds = time.perf_counter() - started_s
            assert all(there)
            return seconds

        found = effort.medians_s({"exist": exist})
        if TCP in peers:  # another process between two of our calls empties the CPU's cache
            peer = partial(peers[TCP].ask, "exist")
            found |= effort.medians_s({"exist in turns": exist, "mooncake exist": peer})
        client.remove(keys)
        return found


def rows(
    seconds: Mapping[int, Seconds],
    others: Seconds,
    clients: Mapping[str, float],
    ssd: Mapping[str, float],
) -> list[dict[str, Cell]]:
    found: list[dict[str, Cell]] = []
    for size, ways in seconds.items():
        found += moved_rows(size, {way: statistics.median(each) for way, each in ways.items()})
    for name, bytes_per_s in clients.items():
        rate = round(bytes_per_s / 1e9, 3)
        found.append({"way": f"{name} client(s)", "block_bytes": MB, "gb_per_s": rate})
    found += moved_rows(MB, {f"ssd {name}": value for name, value in ssd.items()})
    for way, each in others.items():
        micros = round(statistics.median(each) * 1e6, 1)
        found.append({"way": f"{way} {EXIST_KEYS}", "microseconds": micros})
    return found


def moved_rows(size: int, ways: Mapping[str, float]) -> list[dict[str, Cell]]:
    return [{"way": name, **moved(size, BATCH, seconds)} for name, seconds in ways.items()]


def main(
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python that has Mooncake's wheel, to measure it too.")
    ] = None,
    ssd_folder: Annotated[
        Path, typer.Option(help="Folder on the measured disk; emptied afterwards.")
    ] = Path(".mooncake/bench-ssd"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all ways in turns.")] = 5,
    batches: Annotated[int, typer.Option(min=3, help="Batches of each way in a round.")] = 20,
    seed: BlocksSeed = 1,
) -> None:
    """Measure put, get and exist; the last line is JSON."""
    why = {"peer": "give --peer-python", "ssd": ""}
    effort = Effort(rounds, batches, seed)
    seconds: dict[int, dict[str, list[float]]] = {}
    with benchmark("store") as run, contextlib.ExitStack() as stack:
        peers: dict[str, Mooncake] = {}
        if peer_python is not None:
            with console.status("Mooncake starts ..."):
                try:
                    peers = {
                        path: Mooncake(stack, peer_python, path) for path in (TCP, OWN_PROCESS)
                    }
                except RuntimeError as error:
                    why["peer"] = str(error)
        folder = stack.enter_context(ssd_tier.new_folder(ssd_folder))
        address = stack.enter_context(bench_store(folder))
        for size in SIZES:
            with console.status(f"blocks of {size // 1024} KiB ..."):
                seconds[size] = measure(address, size, peers, effort)
        with console.status("exist ..."):
            others = measure_exist(address, peers, effort)
        with console.status("several clients ..."):
            clients = {
                f"{way} {count}": together(address, NEAR, way, count, MB)
                for way in ("memcpy", "get")
                for count in (1, 2)
            }
        with console.status("SSD ..."):
            ssd: dict[str, float] = {}
            try:
                ssd = ssd_tier.measure_node(address, SSD, folder, MB, batches)
            except CannotMeasure as error:
                why["ssd"] = str(error)
        run.rows = rows(seconds, others, clients, ssd)
        run.targets = targets(seconds, others, clients, ssd, why)


if __name__ == "__main__":
    typer.run(main)
