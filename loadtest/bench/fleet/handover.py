"""Blocks from a storage node of one host to a client on another, beside raw NIXL over TCP.

Two hosts in namespaces, a directory and a node on each, and this module as a process on the second:
`python -m loadtest.bench.fleet.handover DIRECTORY`, which prints seconds as JSON. Both ways read
the same number of bytes from the same registered memory of the other host in turns; ours looks
the blocks up under a lease and proves each by its checksum.

Not here: the other numbers of a fleet (__main__.py, leader.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from loadtest.bench.store.ways import Pattern, RawNixl, fill, getting, pages
from loadtest.harness.benchmark import in_turns
from loadtest.harness.fleet import Namespaces
from loadtest.harness.server import PROJECT, CannotMeasure
from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError

MIB = 2**20
BLOCK_BYTES, BATCH, BLOCKS = MIB, 64, 128  # 64 MiB at once, of twice as many
PAIRS, WARM_PAIRS = 5, 1
DIRECTORY_PORT, EVENTS_PORT = 7001, 7002
SOURCE, TARGET = "a", "b"
READY_S_MAX, MEASURED_S_MAX = 60.0, 300.0
POLL_S = 0.1


def pairs() -> dict[str, list[float]]:
    """Seconds of each turn of each way."""
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-bench-") as name,
        Namespaces((SOURCE, TARGET)) as hosts,
    ):
        folder = Path(name)
        directory = f"tcp://{hosts.address(SOURCE)}:{DIRECTORY_PORT}"
        _start(hosts, SOURCE, folder, "mooncake_store.directory", "--address", directory,
               "--events", f"tcp://{hosts.address(SOURCE)}:{EVENTS_PORT}")  # fmt: skip
        for host in hosts.hosts:
            _start(hosts, host, folder, "mooncake_store.node", "--node-id", f"{host}0",
                   "--directory", directory, "--segment-bytes", str(2 * BLOCKS * BLOCK_BYTES),
                   "--segment-path", f"/dev/shm/mooncake-bench-{os.getpid()}-{host}")  # fmt: skip
        try:
            _wait_for_nodes(directory, folder)
            measuring = _start(hosts, TARGET, folder, __name__, directory)
            try:
                status = measuring.wait(MEASURED_S_MAX)
            except subprocess.TimeoutExpired:
                raise CannotMeasure(f"no result in {MEASURED_S_MAX:.0f} s") from None
            if status:
                raise CannotMeasure(f"it failed: {_last_words(folder)}")
            found: dict[str, list[float]] = json.loads((folder / "result").read_text())
            return found
        finally:
            hosts.close()  # ends them
            for path in Path("/dev/shm").glob(f"mooncake-bench-{os.getpid()}-*"):
                path.unlink()


def _start(
    hosts: Namespaces, host: str, folder: Path, module: str, *arguments: str
) -> subprocess.Popen[bytes]:
    """On that host, which shares this kernel and must not know it."""
    variables = {
        "UCX_TLS": "tcp", "UCX_NET_DEVICES": "e0", "MOONCAKE_HOST_IDENTITY": host,
        "MOONCAKE_ADDRESS": hosts.address(host), "MOONCAKE_INSECURE": "1",
        "MOONCAKE_BENCH_RESULT": str(folder / "result"),
    }  # fmt: skip
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            hosts.command(host, [sys.executable, "-m", module, *arguments]), cwd=PROJECT,
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | variables,
        )  # fmt: skip


def _wait_for_nodes(directory: str, folder: Path) -> None:
    give_up_s = time.monotonic() + READY_S_MAX
    with DirectoryClient(directory, timeout_s=1.0) as client:
        while True:
            try:
                if len(client.nodes()) == 2:
                    return
            except StoreError:
                pass
            if time.monotonic() > give_up_s:
                raise CannotMeasure(f"no store on two hosts: {_last_words(folder)}")
            time.sleep(POLL_S)


def _last_words(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-1_000:]


def measure(directory: str) -> dict[str, list[float]]:
    """On the second host; the blocks are put on the first one, over NIXL."""
    chance = np.random.default_rng(1)
    pattern = Pattern(BLOCK_BYTES, BLOCKS, pages(BLOCKS * BLOCK_BYTES, chance), chance)
    pattern.batch = BATCH
    with StoreClient(directory, f"{TARGET}0") as client:
        client.register(pattern.local)
        fill(client, pattern, f"{SOURCE}0")
        infos = {info.node_id: info for info in client.directory.nodes()}
        raw = RawNixl(infos[f"{SOURCE}0"], pattern)
        ways = {"handover": getting(client, pattern), "raw": lambda: raw.transfer("READ")}
        return in_turns(ways, PAIRS, WARM_PAIRS)


if __name__ == "__main__":
    Path(os.environ["MOONCAKE_BENCH_RESULT"]).write_text(json.dumps(measure(sys.argv[1])))
