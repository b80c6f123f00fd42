"""Bytes per second of the KV store beside memcpy, raw NIXL, the disk, and Mooncake's own store.

    python -m loadtest.bench.store [--peer-python PATH] [--ssd-folder DIR]

Starts a directory and three storage nodes as processes and moves batches of 16 blocks of 256 KiB
and 1 MiB between them and a client's registered, pre-faulted memory: random blocks over more memory
than the CPU caches, metadata calls included. Own node: the mapped segment; other node: one-sided
NIXL. Beside each, in turn, what is compared: memcpy of the same pattern between the same two
memories (a segment lies in small pages of /dev/shm here, which memcpy feels as well: the row
`memcpy huge pages` is the same between two arrays in huge pages), NIXL with nothing around it,
O_DIRECT reads of the node's SSD file, and with --peer-python Mooncake's client: over TCP, which is
what its wheel has between processes of one host, and with its blocks in its own process, which it
copies. Neither verifies; ours does, unless it says otherwise.

Not here: the processes (site.py), the ways (ways.py), several clients (clients.py), the SSD
(disk.py), the peer (peer.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from loadtest.bench.result import Cell, Result, Target
from loadtest.bench.store import disk, peer
from loadtest.bench.store.clients import together
from loadtest.bench.store.pattern import BATCH, Pattern, pages
from loadtest.bench.store.site import MB, Site, site
from loadtest.bench.store.ways import (
    RawNixl,
    Way,
    copying,
    fill,
    getting,
    payload_of,
    putting,
)
from mooncake_store.client.client import StoreClient
from mooncake_store.memory.segment import Segment

SIZES = (256 * 1024, MB)
MEMORY_BYTES = 256 * MB  # of blocks, and of the client's buffer
DRAM_MIB = 512
ONE_THREAD = "get nixl unverified, 1 thread"
EXIST_KEYS = 1_000
EXIST_ROUNDS = 200
GOALS = {
    "get_local_over_memcpy": 0.70, "put_local_over_memcpy": 0.65,
    "get_local_unverified_over_memcpy": 0.85, "put_local_unverified_over_memcpy": 0.75,
    "get_nixl_unverified_over_raw_nixl": 0.85,
}  # fmt: skip
OVER_NODES = (
    "ours by NIXL on one host (CMA: one copy by the kernel), two threads, verified; theirs by TCP "
    "over loopback, not verified"
)
IN_MEMORY = (
    "not verified, ours out of the segment of another process, theirs within its own (memcpy)"
)
Rates = dict[tuple[str, int], float]  # (way, block_bytes) -> seconds per batch


def in_turn(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each way; they take turns, because the machine may be busy now."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        for name, way in ways.items():
            seconds = way()
            if turn >= 3:
                found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def measure(here: Site, block_bytes: int, rounds: int, seed: int) -> dict[str, float]:
    """Seconds per batch of every way, for one size."""
    chance = np.random.default_rng(seed)
    local = pages(MEMORY_BYTES, chance)
    pattern = Pattern(block_bytes, MEMORY_BYTES // block_bytes // 2, local, chance)
    with contextlib.ExitStack() as stack:

        def client(node_id: str, is_verified: bool = True, threads: int = 2) -> StoreClient:
            made = stack.enter_context(
                StoreClient(here.address, node_id, is_verified=is_verified, threads=threads)
            )
            made.register(local)
            return made

        near, near_fast = client(here.near), client(here.near, is_verified=False)
        far, far_one = client(here.far), client(here.far, is_verified=False, threads=1)
        # A client that belongs to the other node reaches `near` by NIXL.
        infos = {info.node_id: info for info in near.directory.nodes()}
        info = infos[here.near]
        fill(near, pattern, here.near)
        segment = stack.enter_context(Segment.open(info.segment_path, info.segment_bytes))
        raw = RawNixl(info, pattern)
        found = in_turn(
            {
                "memcpy from segment": copying(payload_of(segment, info), pattern, True),
                "memcpy huge pages": copying(pages(local.nbytes, chance), pattern, True),
                "get": getting(near, pattern),
                "get unverified": getting(near_fast, pattern),
                "raw nixl read": lambda: raw.transfer("READ"),
                "get nixl": getting(far, pattern),
                ONE_THREAD: getting(far_one, pattern),
            },
            rounds,
        )
        near.remove(pattern.keys)
        found |= in_turn(
            {
                "memcpy to segment": copying(payload_of(segment, info), pattern, False),
                "put": putting(near, pattern, here.near),
                "put unverified": putting(near_fast, pattern, here.near),
                "put nixl": putting(far, pattern, here.near),
            },
            rounds,
        )
    return found


def measure_exist(here: Site) -> float:
    """Median seconds of asking for 1,000 keys that are there."""
    with StoreClient(here.address, here.near) as client:
        keys = [i.to_bytes(16, "little") for i in range(EXIST_KEYS)]
        small = [np.zeros(64, np.uint8)] * BATCH
        for start in range(0, EXIST_KEYS, BATCH):
            part = keys[start : start + BATCH]
            assert all(client.put(part, small[: len(part)], here.near))
        found = []
        for _ in range(EXIST_ROUNDS):
            started_s = time.perf_counter()
            there = client.exist(keys)
            found.append(time.perf_counter() - started_s)
            assert all(there)
        client.remove(keys)
        return statistics.median(found)


def targets(
    seconds: dict[int, dict[str, float]], clients: dict[str, float], ssd: dict[str, float],
    exist_s: float, mooncake: dict[str, Any], own: dict[str, Any], why: dict[str, str],
) -> list[Target]:  # fmt: skip
    mib = seconds[MB]
    values = {
        "get_local_over_memcpy": mib["memcpy from segment"] / mib["get"],
        "put_local_over_memcpy": mib["memcpy to segment"] / mib["put"],
        "get_local_unverified_over_memcpy": mib["memcpy from segment"] / mib["get unverified"],
        "put_local_unverified_over_memcpy": mib["memcpy to segment"] / mib["put unverified"],
        "get_nixl_unverified_over_raw_nixl": mib["raw nixl read"]
        / mib["get nixl unverified, 1 thread"],
    }
    found = [Target(name, round(values[name], 3), ">=", goal) for name, goal in GOALS.items()]
    limit = clients["memcpy 2"] / clients["memcpy 1"]
    note = f"two processes of memcpy alone: {limit:.2f} times one"
    two = clients["get 2"] / clients["get 1"]
    found.append(Target("two_clients_over_one", round(two, 3), ">=", 1.6, note))
    ratio = ssd["raw"] / ssd["get"] if ssd else None
    found.append(Target("ssd_get_over_raw", _rounded(ratio), ">=", 0.7, why.get("ssd", "")))
    for size, name in ((SIZES[0], "256k"), (MB, "1m")):
        theirs = mooncake.get(str(size), {})
        get = theirs["get_s"] / seconds[size]["get nixl"] if theirs else None
        put = theirs["put_s"] / seconds[size]["put nixl"] if theirs else None
        reason = why.get("peer") or OVER_NODES
        found.append(Target(f"get_over_mooncake_{name}", _rounded(get), ">=", 2.0, reason))
        found.append(Target(f"put_over_mooncake_{name}", _rounded(put), ">=", 3.0, reason))
        found += in_memory_targets(seconds[size], own.get(str(size), {}), name, why.get("peer", ""))
    asked = mooncake.get("exist_1000")
    over = exist_s / asked["s"] if asked else None
    reason = why.get("peer", "")
    found.append(Target("exist_1000_over_mooncake", _rounded(over), "<=", 1.0, reason))
    return found


def in_memory_targets(
    ours: dict[str, float], theirs: dict[str, float], name: str, reason: str
) -> list[Target]:
    """Own node beside Mooncake's fastest path on one host. It does not verify: nor do we here."""
    found = []
    for verb in ("get", "put"):
        target = f"{verb}_local_over_mooncake_own_process_{name}"
        if not theirs:
            found.append(Target(target, None, ">=", 1.0, reason))
            continue
        seconds = theirs[f"{verb}_s"]
        verified = seconds / ours[verb]
        told = f"{IN_MEMORY}; with every block of ours verified {verified:.2f}"
        ratio = _rounded(seconds / ours[f"{verb} unverified"])
        found.append(Target(target, ratio, ">=", 1.0, told))
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def rows(seconds: dict[int, dict[str, float]], clients: dict[str, float]) -> list[dict[str, Cell]]:
    found: list[dict[str, Cell]] = []
    for size, ways in seconds.items():
        for name, value in ways.items():
            rate = BATCH * size / value / 1e9
            found.append(
                {"way": name, "block_bytes": size, "blocks": BATCH,
                 "microseconds": round(value * 1e6, 1), "gb_per_s": round(rate, 3)}
            )  # fmt: skip
    for name, value in clients.items():
        found.append(
            {"way": f"{name} client(s)", "block_bytes": MB, "gb_per_s": round(value / 1e9, 3)}
        )
    return found


def peer_rows(where: str, found: dict[str, Any]) -> list[dict[str, Cell]]:
    """What Mooncake's client took."""
    return [
        {
            "way": f"mooncake {verb}, {where}", "block_bytes": size, "blocks": BATCH,
            "microseconds": round(found[str(size)][f"{verb}_s"] * 1e6, 1),
            "gb_per_s": round(BATCH * size / found[str(size)][f"{verb}_s"] / 1e9, 3),
        }
        for size in (SIZES if found else ())
        for verb in ("get", "put")
    ]  # fmt: skip


def main(
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python that has Mooncake's wheel, to measure it too.")
    ] = None,
    ssd_folder: Annotated[
        Path, typer.Option(help="On the disk to be measured; emptied afterwards.")
    ] = Path(".mooncake/bench-ssd"),
    rounds: Annotated[int, typer.Option(min=5, help="Batches of each kind.")] = 40,
    seed: Annotated[int, typer.Option(help="Which blocks.")] = 1,
) -> None:
    """Measure put, get and exist; the last line is JSON."""
    console = Console(stderr=True, highlight=False)
    started_s = time.perf_counter()
    why: dict[str, str] = {"peer": "give --peer-python", "ssd": ""}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(disk.folder(ssd_folder))
        here = stack.enter_context(site(DRAM_MIB, folder, 1_024))
        seconds = {}
        for size in SIZES:
            with console.status(f"blocks of {size // 1024} KiB ..."):
                seconds[size] = measure(here, size, rounds, seed)
        with console.status("several clients ..."):
            clients = {
                f"{way} {count}": together(here.address, here.near, way, count, MB)
                for way in ("memcpy", "get")
                for count in (1, 2)
            }
        with console.status("SSD ..."):
            ssd = disk.measure(here, folder, MB, rounds)
        with console.status("exist ..."):
            exist_s = measure_exist(here)
    mooncake: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if peer_python is not None:
        with console.status("Mooncake ..."):
            try:
                mooncake = peer.measure(peer_python, list(SIZES), rounds, is_own=False)
                own = peer.measure(peer_python, list(SIZES), rounds, is_own=True)
                why["peer"] = ""
            except RuntimeError as error:
                why["peer"] = str(error)
    table = rows(seconds, clients)
    table += disk.rows(ssd, MB)
    table.append({"way": f"exist {EXIST_KEYS}", "microseconds": round(exist_s * 1e6, 1)})
    for where, found in (("TCP", mooncake), ("own process", own)):
        table += peer_rows(where, found)
    if mooncake:
        micros = round(mooncake["exist_1000"]["s"] * 1e6, 1)
        table.append({"way": f"mooncake exist {EXIST_KEYS}", "microseconds": micros})
    goals = targets(seconds, clients, ssd, exist_s, mooncake, own, why)
    Result("store", time.perf_counter() - started_s, table, goals).print()


if __name__ == "__main__":
    typer.run(main)
