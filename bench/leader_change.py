"""Seconds without a directory: from kill -9 of the leader until a cached block is found again.

    python -m bench.leader_change [--rounds 5] [--blocks 1000]

It starts an etcd, directories that are elected through it, and two storage nodes with some blocks.
In every round the leader is killed at a random moment of its renewals. A client looks up a prefix
repeatedly until all of it is found, while an event feed listens as in a frontend. Rows have the
times at which the next leader answered, the blocks were found, and the feed had them.

Not here: the same with requests that are routed to workers on other hosts (fleet.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure, own_ports
from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.errors import StoreError, StoreUnavailable
from mooncake_store.records.events import BlockAdded, Event, Snapshot

POLL_S = 0.02
PATIENCE_S = 60.0
BLOCK_BYTES = 16 * 1024
MEDIAN_S_GOAL, WORST_S_GOAL = 5.0, 8.0


class ElectedSite:
    """An etcd, elected directories and storage nodes as processes, until the stack ends."""

    def __init__(self, stack: contextlib.ExitStack, ttl_s: int) -> None:
        binary = shutil.which("etcd")
        if binary is None:
            raise CannotMeasure("etcd is not installed (Debian: apt-get install etcd-server)")
        self._stack, self._ttl_s, self._started = stack, ttl_s, 0
        folder = tempfile.TemporaryDirectory(prefix="mooncake-leader-")
        self.folder = Path(stack.enter_context(folder))
        client, peer = (f"http://127.0.0.1:{port}" for port in own_ports(2))
        self._run(
            "etcd",
            binary,
            "--data-dir",
            str(self.folder / "data"),
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self.address = f"etcd://{client.removeprefix('http://')}/bench"
        self.directories: dict[str, subprocess.Popen[bytes]] = {}  # by the address for requests

    def directory(self) -> None:
        self._started += 1
        port, events_port = own_ports(2)
        address = f"tcp://127.0.0.1:{port}"
        self.directories[address] = self._run(
            f"directory-{self._started}",
            sys.executable,
            "-m",
            "mooncake_store.directory",
            f"--address={address}",
            f"--events=tcp://127.0.0.1:{events_port}",
            f"--etcd={self.address}",
            f"--ttl-s={self._ttl_s}",
        )

    def node(self, node_id: str) -> None:
        self._run(
            node_id,
            sys.executable,
            "-m",
            "mooncake_store.node",
            "--node-id",
            node_id,
            f"--directory={self.address}",
            f"--segment-bytes={64 * 2**20}",
            "--mapped-only",
            f"--segment-path=/dev/shm/mooncake-leader-{os.getpid()}-{node_id}",
        )

    def kill_leader(self, client: DirectoryClient) -> None:
        self.directories.pop(client.leader().address).send_signal(signal.SIGKILL)

    def _run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process


class FollowedKeys:
    """The block keys of an event feed, as in a frontend's index."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.changed = threading.Condition()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        with self.changed:
            self.keys = {key for key, _ in snapshot.holders}
            self.changed.notify_all()

    def on_events(self, events: Sequence[Event]) -> None:
        with self.changed:
            self.keys |= {event.key for event in events if isinstance(event, BlockAdded)}
            self.changed.notify_all()


def until_found(
    client: DirectoryClient, keys: Sequence[bytes], old_epoch: int
) -> tuple[float, ...]:
    """Times (time.monotonic) at which another directory answered, and at which it had all of these
    keys."""
    answered_s = 0.0
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(StoreUnavailable):
            if not answered_s and client.stats().epoch != old_epoch:
                answered_s = time.monotonic()
            if answered_s and len(client.lookup(keys, "", 0.0)) == len(keys):
                return answered_s, time.monotonic()
        time.sleep(POLL_S)
    raise CannotMeasure(f"no directory had the blocks within {PATIENCE_S:g} s")


def measure(rounds: int, blocks: int, ttl_s: int, seed: int) -> list[dict[str, Cell]]:
    rng, rows = random.Random(seed), list[dict[str, Cell]]()
    keys = [key_of(f"block {number}") for number in range(blocks)]
    with contextlib.ExitStack() as stack:
        site = ElectedSite(stack, ttl_s)
        for _ in range(2):
            site.directory()
        for node_id in ("s0", "s1"):
            site.node(node_id)
        client = stack.enter_context(DirectoryClient(site.address))
        _put(site.address, keys)
        followed = FollowedKeys()
        feed = EventFeed(site.address, "", followed.on_snapshot, followed.on_events)
        stack.callback(feed.close)
        for _ in range(rounds):
            site.directory()  # it stands by in the place of the killed one
            feed.wait_ready(PATIENCE_S)
            time.sleep(rng.uniform(2.0, 3.0))  # a random moment between two renewals
            epoch = client.stats().epoch
            site.kill_leader(client)
            killed_s = time.monotonic()
            with followed.changed:
                followed.keys.clear()
            answered_s, found_s = until_found(client, keys, epoch)
            with followed.changed:
                followed.changed.wait_for(lambda: followed.keys.issuperset(keys), PATIENCE_S)
            row: dict[str, Cell] = {
                "answered_s": round(answered_s - killed_s, 2),
                "found_s": round(found_s - killed_s, 2),
                "followed_s": round(time.monotonic() - killed_s, 2),
            }
            console.print(str(row), markup=False)
            rows.append(row)
    return rows


def _put(address: str, keys: Sequence[bytes]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    block = np.ones(BLOCK_BYTES, np.uint8)
    while True:
        try:
            with StoreClient(address, "s0", transports="mapped") as store:
                if all(store.put(keys, [block] * len(keys))):
                    return
        except StoreError as error:
            if time.monotonic() > until_s:
                raise CannotMeasure(f"the blocks cannot be stored: {error}") from error
        time.sleep(POLL_S)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Leaders that are killed.")] = 5,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the prefix.")] = 1_000,
    ttl_s: Annotated[int, typer.Option(min=1, help="TTL of the election.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the times of kills.")] = 0,
) -> None:
    """Kill leaders, and measure how long a cached prefix cannot be found."""
    with benchmark("leader_change") as run:
        run.rows = measure(rounds, blocks, ttl_s, seed)
        found = [float(str(row["found_s"])) for row in run.rows]
        run.targets = [
            Target("store_leader_change_s", statistics.median(found), "<=", MEDIAN_S_GOAL),
            Target("store_leader_change_worst_s", max(found), "<=", WORST_S_GOAL),
        ]


if __name__ == "__main__":
    typer.run(main)
