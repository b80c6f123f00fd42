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

Not here: the ways and several clients at once (ways.py), the SSD (ssd_tier.py), what runs in
Mooncake's Python (mooncake_client.py).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from loadtest.bench import ssd_tier
from loadtest.bench.store.ways import (
    BATCH,
    MB,
    WARM_ROUNDS,
    Pattern,
    RawNixl,
    copying,
    fill,
    getting,
    pages,
    payload_of,
    putting,
    together,
)
from loadtest.harness.benchmark import (
    BatchRounds,
    BlocksSeed,
    benchmark,
    console,
    median_s,
    moved,
)
from loadtest.harness.processes import BenchStore, PeerProcess
from loadtest.harness.result import Cell, Target
from mooncake_store.client.client import StoreClient
from mooncake_store.memory.segment import Segment

NEAR, FAR, SSD = "near", "far", "ssd"  # the clients' own node, another one, one with an SSD
SIZES = (256 * 1024, MB)
MEMORY_BYTES = 256 * MB  # of blocks, and of the client's buffer
DRAM_MIB = 512
ONE_THREAD = "get nixl unverified, 1 thread"
EXIST_KEYS = 1_000
EXIST_ROUNDS = 200
SSD_NODE_MIB, SSD_MIB = 128, 1_024
PEER_NODE_MIB = 2_048
PEER_START_S_MAX = 30.0
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


@contextlib.contextmanager
def bench_store(ssd_folder: Path) -> Iterator[str]:
    """The address of a directory with three nodes. SSD has little DRAM: what it is given spills."""
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


def measure(address: str, block_bytes: int, rounds: int, seed: int) -> dict[str, float]:
    """Seconds per batch of every way, for one size."""
    chance = np.random.default_rng(seed)
    local = pages(MEMORY_BYTES, chance)
    pattern = Pattern(block_bytes, MEMORY_BYTES // block_bytes // 2, local, chance)
    with contextlib.ExitStack() as stack:

        def client(node_id: str, is_verified: bool = True, threads: int = 2) -> StoreClient:
            made = stack.enter_context(
                StoreClient(address, node_id, is_verified=is_verified, threads=threads)
            )
            made.register(local)
            return made

        near, near_fast = client(NEAR), client(NEAR, is_verified=False)
        far, far_one = client(FAR), client(FAR, is_verified=False, threads=1)
        # A client that belongs to the other node reaches `near` by NIXL.
        infos = {info.node_id: info for info in near.directory.nodes()}
        info = infos[NEAR]
        fill(near, pattern, NEAR)
        segment = stack.enter_context(Segment.open(info.segment_path, info.segment_bytes))
        raw = RawNixl(info, pattern)
        found = median_s(
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
            WARM_ROUNDS,
        )
        near.remove(pattern.keys)
        found |= median_s(
            {
                "memcpy to segment": copying(payload_of(segment, info), pattern, False),
                "put": putting(near, pattern, NEAR),
                "put unverified": putting(near_fast, pattern, NEAR),
                "put nixl": putting(far, pattern, NEAR),
            },
            rounds,
            WARM_ROUNDS,
        )
    return found


def measure_exist(address: str) -> float:
    """Median seconds of asking for 1,000 keys that are there."""
    with StoreClient(address, NEAR) as client:
        keys = [i.to_bytes(16, "little") for i in range(EXIST_KEYS)]
        small = [np.zeros(64, np.uint8)] * BATCH
        for start in range(0, EXIST_KEYS, BATCH):
            part = keys[start : start + BATCH]
            assert all(client.put(part, small[: len(part)], NEAR))
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
        why = f"{IN_MEMORY}; with every block of ours verified {verified:.2f}"
        ratio = _rounded(seconds / ours[f"{verb} unverified"])
        found.append(Target(target, ratio, ">=", 1.0, why))
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def moved_rows(size: int, ways: dict[str, float]) -> list[dict[str, Cell]]:
    return [{"way": name, **moved(size, BATCH, seconds)} for name, seconds in ways.items()]


def rows(
    seconds: dict[int, dict[str, float]], clients: dict[str, float], ssd: dict[str, float],
    exist_s: float, mooncake: dict[str, Any], own: dict[str, Any],
) -> list[dict[str, Cell]]:  # fmt: skip
    found: list[dict[str, Cell]] = []
    for size, ways in seconds.items():
        found += moved_rows(size, ways)
    for name, bytes_per_s in clients.items():
        rate = round(bytes_per_s / 1e9, 3)
        found.append({"way": f"{name} client(s)", "block_bytes": MB, "gb_per_s": rate})
    found += moved_rows(MB, {f"ssd {name}": value for name, value in ssd.items()})
    found.append({"way": f"exist {EXIST_KEYS}", "microseconds": round(exist_s * 1e6, 1)})
    for where, theirs in (("TCP", mooncake), ("own process", own)):
        for size in SIZES if theirs else ():
            ways = {f"mooncake {verb}, {where}": theirs[str(size)][f"{verb}_s"]
                    for verb in ("get", "put")}  # fmt: skip
            found += moved_rows(size, ways)
    if mooncake:
        micros = round(mooncake["exist_1000"]["s"] * 1e6, 1)
        found.append({"way": f"mooncake exist {EXIST_KEYS}", "microseconds": micros})
    return found


def measure_mooncake(python: Path, rounds: int, is_own: bool) -> dict[str, Any]:
    """What Mooncake's client needs, from a node's memory over TCP or from the memory of its own
    process by memcpy; RuntimeError when it does not run here, with the reason."""
    binary, script = (
        python.parent / "mooncake_master",
        Path(__file__).with_name("mooncake_client.py"),
    )
    if not binary.exists():
        raise RuntimeError(f"{binary} does not exist: {python} has no Mooncake wheel")
    port = free_port()
    master = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-peer-"))
        process = subprocess.Popen(
            [str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}",
             "--rpc_thread_num=4", "--enable_http_metadata_server=true",
             f"--http_metadata_server_port={free_port()}", "--default_kv_lease_ttl=5000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        stack.enter_context(process)
        stack.callback(process.kill)
        wait_for(port)
        own_mib = PEER_NODE_MIB if is_own else 0
        if not is_own:
            PeerProcess(stack, python, script, "node", master, str(PEER_NODE_MIB)).answer()
        return PeerProcess(
            stack, python, script, "client", master, str(own_mib), str(rounds), str(list(SIZES)),
            variables={"MC_STORE_MEMCPY": "1"} if is_own else None,
        ).answer()  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    until_s = time.monotonic() + PEER_START_S_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() > until_s:
            raise RuntimeError(f"mooncake_master does not listen on port {port}")
        time.sleep(0.1)


def main(
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python that has Mooncake's wheel, to measure it too.")
    ] = None,
    ssd_folder: Annotated[
        Path, typer.Option(help="On the disk to be measured; emptied afterwards.")
    ] = Path(".mooncake/bench-ssd"),
    rounds: BatchRounds = 40,
    seed: BlocksSeed = 1,
) -> None:
    """Measure put, get and exist; the last line is JSON."""
    why = {"peer": "give --peer-python", "ssd": ""}
    seconds, mooncake, own = {}, {}, {}
    with benchmark("store") as run:
        with ssd_tier.new_folder(ssd_folder) as folder, bench_store(folder) as address:
            for size in SIZES:
                with console.status(f"blocks of {size // 1024} KiB ..."):
                    seconds[size] = measure(address, size, rounds, seed)
            with console.status("several clients ..."):
                clients = {
                    f"{way} {count}": together(address, NEAR, way, count, MB)
                    for way in ("memcpy", "get")
                    for count in (1, 2)
                }
            with console.status("SSD ..."):
                ssd = ssd_tier.measure_node(address, SSD, folder, MB, rounds)
            with console.status("exist ..."):
                exist_s = measure_exist(address)
        if peer_python is not None:
            with console.status("Mooncake ..."):
                try:
                    mooncake = measure_mooncake(peer_python, rounds, is_own=False)
                    own = measure_mooncake(peer_python, rounds, is_own=True)
                    why["peer"] = ""
                except RuntimeError as error:
                    why["peer"] = str(error)
        run.rows = rows(seconds, clients, ssd, exist_s, mooncake, own)
        run.targets = targets(seconds, clients, ssd, exist_s, mooncake, own, why)


if __name__ == "__main__":
    typer.run(main)
