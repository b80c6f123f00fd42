"""Several client processes at once: what they get together, in bytes per second.

Each is a process of its own (`python -m loadtest.bench.store.clients ADDRESS NODE WAY ...`), gets
ready, says so, waits for a line on stdin, works for a while and prints what it moved.

Not here: the single client (ways.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from loadtest.bench.store.pattern import BATCH, Pattern, pages
from loadtest.bench.store.ways import copying, fill, getting
from mooncake_store.client.client import StoreClient

WARM_ROUNDS = 3


def together(address: str, node_id: str, way: str, count: int, block_bytes: int) -> float:
    """Bytes per second of `count` clients that all get (or copy) at once."""
    command = [sys.executable, "-m", "loadtest.bench.store.clients"]
    processes = [
        subprocess.Popen(
            [*command, address, node_id, way, str(block_bytes), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a client did not get ready; its reason is above")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        rates = []
        for process in processes:
            assert process.stdout is not None
            rates.append(float(json.loads(process.stdout.readline())))
        return sum(rates)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    address, node_id, way, block_bytes, number = sys.argv[1:6]
    chance = np.random.default_rng(int(number))
    size = int(block_bytes)
    pattern = Pattern(size, 128 * 2**20 // size, pages(128 * 2**20, chance), chance)
    with StoreClient(address, node_id) as client:
        if way == "get":
            client.register(pattern.local)
            fill(client, pattern, node_id)
            move = getting(client, pattern)
        else:
            move = copying(pages(pattern.local.nbytes, chance), pattern, is_read=True)
        for _ in range(WARM_ROUNDS):
            move()
        print("ready", flush=True)
        sys.stdin.readline()
        until_s, rounds, seconds = time.monotonic() + 2.0, 0, 0.0
        while time.monotonic() < until_s:
            seconds += move()
            rounds += 1
        print(json.dumps(rounds * BATCH * size / seconds), flush=True)
        if way == "get":
            client.remove(pattern.keys)


if __name__ == "__main__":
    main()
