"""Bytes per second out of a storage node of another host, by the store and by NIXL alone.

    python -m bench.cross_host [--links 1] [--pairs 5] [--block-mib 1]

Two hosts are network namespaces of this machine with that many links. A directory and a node serve
on one. A process on the other reads TOTAL_MIB of blocks of that node, in turns:

* `store`: StoreClient.get_into: looked up, read and verified (xxh3), into registered memory;
* `raw nixl`: one agent on each card, as in the store, each with its share of the blocks as one
  transfer, posted together and polled by as many threads as the store has;
* `raw nixl in batches`: the same with BATCH_MIB at once for each agent, often faster over TCP.

All use TCP. The ratio of a pair is the rate of the store over that of the faster NIXL way; the
target is the median of the pairs.

Not here: links with faults (harness/fleet/), one host (store/).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.harness.fleet.namespaces import Namespaces, why_no_namespaces
from loadtest.harness.benchmark import BlocksSeed, benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure
from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.layout import geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.membership import NicAgent, NodeInfo
from mooncake_store.transports.host_topology import host_data_network
from mooncake_store.transports.nixl_agent import AgentDevices, make_agent
from mooncake_store.transports.paths.nic_choice import Interface, nic_pairs

MB = 2**20
TOTAL_MIB = 64  # bytes of one read
HELD_MIB = 256  # blocks are chosen from so much memory that no cache holds it
THREADS = 2  # of the store's client, its default
BATCH_MIB = 8
WARM_ROUNDS = 2
START_S_MAX = 60.0
TARGET, TARGET_MIN = "handover_cross_host_over_raw_nixl_tcp", 0.7


class RawAgents:
    """NIXL without the store: `THREADS` agents on each pair of cards."""

    def __init__(self, node: NodeInfo, local: ByteArray, block_bytes: int) -> None:
        self._local, self._block_bytes = local, block_bytes
        shape = geometry(node.segment_bytes, node.unit_bytes)
        self._far = node.base_address + shape.payload_offset_bytes
        own = host_data_network().nics
        self.agents = [
            self._agent(own[here], node.nics[there])
            for _ in range(THREADS)
            for here, there in nic_pairs(own, node.nics)
        ]

    def _agent(self, nic: Interface, far: NicAgent) -> tuple[Any, str]:
        name = f"raw-{secrets.token_hex(4)}"
        devices = AgentDevices(nic.ucx_devices, is_tcp_only=not nic.rdma_devices)
        agent = make_agent(name, has_progress_thread=False, devices=devices)
        agent.register_memory([(self._local.ctypes.data, self._local.nbytes, 0, "")], "DRAM")
        peer = agent.add_remote_agent(far.agent_metadata)
        agent.make_connection(peer)
        return agent, peer

    def read(self, offsets_bytes: list[int], targets_bytes: list[int], batch: int) -> float:
        """Read blocks at these payload offsets to these offsets of the local memory, `batch` at
        once."""
        count = len(self.agents)
        shares = [
            (
                agent,
                peer,
                self._rows(self._local.ctypes.data, targets_bytes[number::count]),
                self._rows(self._far, offsets_bytes[number::count]),
            )
            for number, (agent, peer) in enumerate(self.agents)
        ]
        per_thread = count // THREADS
        threads = [
            threading.Thread(target=_read_all, args=(shares[start : start + per_thread], batch))
            for start in range(per_thread, count, per_thread)
        ]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        _read_all(shares[:per_thread], batch)
        for thread in threads:
            thread.join()
        return time.perf_counter() - started_s

    def _rows(self, start: int, offsets_bytes: list[int]) -> np.ndarray:
        rows = np.zeros((len(offsets_bytes), 3), np.uint64)
        rows[:, 0] = np.array(offsets_bytes, np.uint64) + np.uint64(start)
        rows[:, 1] = self._block_bytes
        return rows


def _read_all(shares: list[tuple[Any, str, np.ndarray, np.ndarray]], batch: int) -> None:
    """Read `batch` blocks of each share at once; the next batch begins when a batch has arrived."""
    waiting = [_posted(*share, batch) for share in shares]
    under_way = [steps for steps in waiting if next(steps, None) is not None]
    while under_way:
        time.sleep(0)  # the other side needs the processor too
        under_way = [steps for steps in under_way if next(steps, None) is not None]


def _posted(agent: Any, peer: str, near: np.ndarray, far: np.ndarray, batch: int) -> Iterator[str]:
    """Yields while a transfer is under way."""
    for start in range(0, len(near), batch):
        chosen = slice(start, start + batch)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(near[chosen], "DRAM"),
            agent.get_xfer_descs(far[chosen], "DRAM"),
            peer,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            yield state
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)


def measure_here(directory: str, node_id: str, block_bytes: int, pairs: int, seed: int) -> Any:
    """On the other host: seconds of each way, pair by pair."""
    rng = np.random.default_rng(seed)
    held, wanted = HELD_MIB * MB // block_bytes, TOTAL_MIB * MB // block_bytes
    local = np.ones(TOTAL_MIB * MB, np.uint8)
    positions = [local[at * block_bytes :][:block_bytes] for at in range(wanted)]
    keys = [key_of(f"cross-host {at}") for at in range(held)]
    with StoreClient(directory, threads=THREADS) as client:
        client.register(local)
        for start in range(0, held, wanted):
            chosen = keys[start : start + wanted]
            content = [rng.integers(0, 256, block_bytes, dtype=np.uint8) for _ in chosen]
            if not all(client.put(chosen, content, node_id, 60.0)):
                raise CannotMeasure(f"{node_id} did not store the blocks")
        node = next(each for each in client.directory.nodes() if each.node_id == node_id)
        raw = RawAgents(node, local, block_bytes)
        slots = [copies[0].slot for copies in client.stat(keys)]
        shape = geometry(node.segment_bytes, node.unit_bytes)
        offsets = [shape.slot_offset_bytes(slot) - shape.payload_offset_bytes for slot in slots]
        nics = client.nodes.nic_counters()
        batches = {"raw nixl": wanted, "raw nixl in batches": BATCH_MIB * MB // block_bytes}
        seconds: dict[str, list[float]] = {name: [] for name in ("store", *batches)}
        for turn in range(WARM_ROUNDS + pairs):
            picked = rng.choice(held, wanted, replace=False).tolist()
            started_s = time.perf_counter()
            came = client.get_into([keys[at] for at in picked], positions)
            store_s = time.perf_counter() - started_s
            if not all(came):
                raise CannotMeasure(f"{came.count(False)} of {wanted} blocks did not arrive")
            expected = local.copy()
            took_s = {"store": store_s}
            for name, batch in batches.items():
                local[:] = 0
                took_s[name] = raw.read(
                    [offsets[at] for at in picked],
                    [at * block_bytes for at in range(wanted)],
                    batch,
                )
                if not np.array_equal(local, expected):
                    raise CannotMeasure("two ways read different bytes")
            if turn >= WARM_ROUNDS:
                for name, value_s in took_s.items():
                    seconds[name].append(value_s)
        moved = client.nodes.nic_counters()
        if not moved or all(moved[name].read_bytes == nics[name].read_bytes for name in moved):
            raise CannotMeasure("the store read nothing over its network cards")
        return {"agents": len(raw.agents), "seconds": seconds}


def measure(links: int, pairs: int, block_bytes: int, seed: int) -> dict[str, Any]:
    """All ways between two namespaces with that many links."""
    if why := why_no_namespaces():
        raise CannotMeasure(why)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        hosts = stack.enter_context(Namespaces(("a", "b"), links=links))
        trusted = ",".join(hosts.links)

        def start(host: str, *words: str) -> subprocess.Popen[str]:
            environment = {
                **os.environ,
                "MOONCAKE_HOST_IDENTITY": host,
                "MOONCAKE_INSECURE": "1",
                "MOONCAKE_TRUSTED_NICS": trusted,
            }
            with (folder / "log").open("a") as log:
                process = subprocess.Popen(
                    hosts.command(host, [sys.executable, "-m", *words]),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            stack.enter_context(process)
            stack.callback(process.terminate)
            return process

        address = f"tcp://{hosts.address('b')}:7001"
        events = f"tcp://{hosts.address('b')}:7002"
        _line(
            start("b", "mooncake_store.directory", "--address", address, "--events", events), folder
        )
        _line(
            start(
                "b",
                "mooncake_store.node",
                "--node-id",
                "b0",
                f"--directory={address}",
                f"--segment-bytes={(HELD_MIB + 64) * MB}",
                f"--segment-path=/dev/shm/mooncake-bench-{os.getpid()}-b0",
            ),
            folder,
        )
        reader = start(
            "a",
            "bench.cross_host",
            f"--inside={address}",
            f"--pairs={pairs}",
            f"--block-mib={block_bytes // MB}",
            f"--seed={seed}",
        )
        found: dict[str, Any] = json.loads(_line(reader, folder))
        return found


def _line(process: subprocess.Popen[str], folder: Path) -> str:
    """The first line of a process. CannotMeasure with its last output when it ends instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CannotMeasure((folder / "log").read_text()[-2_000:])
    return line


def ratio(found: dict[str, Any]) -> float:
    """The store's rate over that of NIXL alone: the median of the pairs."""
    store, *raw = (found["seconds"][way] for way in found["seconds"])
    return statistics.median(
        min(raw_s) / store_s for store_s, *raw_s in zip(store, *raw, strict=True)
    )


def rows(found: dict[str, Any], links: int, block_bytes: int) -> list[dict[str, Cell]]:
    return [
        {
            "way": way,
            "links": links,
            "agents": found["agents"],
            "block_bytes": block_bytes,
            "gb_per_s": round(TOTAL_MIB * MB / statistics.median(seconds) / 1e9, 3),
            "slowest_gb_per_s": round(TOTAL_MIB * MB / max(seconds) / 1e9, 3),
        }
        for way, seconds in found["seconds"].items()
    ]


def main(
    links: Annotated[int, typer.Option(min=1, max=4, help="Network cards of each host.")] = 1,
    pairs: Annotated[int, typer.Option(min=3, help="Reads of each kind.")] = 5,
    block_mib: Annotated[int, typer.Option(min=1, max=16, help="Size of a block.")] = 1,
    seed: BlocksSeed = 1,
    inside: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Read blocks of another host by the store and by NIXL alone; the last line is JSON."""
    if inside:
        print(json.dumps(measure_here(inside, "b0", block_mib * MB, pairs, seed)), flush=True)
        os._exit(0)  # UCX's own exit handlers may crash, see transports/nixl_agent.py
    with benchmark("cross_host") as run, console.status("measuring ..."):
        found = measure(links, pairs, block_mib * MB, seed)
        run.rows = rows(found, links, block_mib * MB)
        run.targets = [Target(TARGET, round(ratio(found), 3), ">=", TARGET_MIN)]


if __name__ == "__main__":
    typer.run(main)
