"""A process that puts, gets, moves and removes blocks, and writes down what it saw.

One line of JSON per thing worth knowing, flushed at once, so that a killed client's word is there:
a block that it was promised to find again ("kept"), a call that took longer than it may ("slow"),
bytes that are wrong ("wrong"), and at the end its counts. Errors of the store (StoreError) are what
a caller must expect while processes die; anything else ends this one with a traceback.

Not here: what is killed (monkey.py), what follows from the lines (verdict.py).
"""

from __future__ import annotations

import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mooncake_store.client.client import StoreClient
from mooncake_store.errors import StoreError
from tests.chaos.blocks import block_of, is_block_of, key_of, size_of

DEADLINE_S = 3.0
SLOW_S = DEADLINE_S + 1.0  # worth writing down
SHARED = 300  # blocks that all clients put, get and remove
BATCH_MAX = 6


@dataclass(frozen=True)
class Options:
    """As JSON, the only argument of the process."""

    name: str
    directory: str
    node_id: str  # whose memory is mapped
    transports: str
    seed: int
    sole_copies: int  # blocks that only this client stores, on `safe`, to be found at the end
    safe: str
    others: list[str]
    log: str
    is_writer_only: bool = False


class ChaosClient:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(options.seed)
        self.counts: Counter[str] = Counter()
        self.kept: list[bytes] = []
        self.is_stopping = False
        self._life = secrets.token_hex(4)  # a client that starts again keeps other blocks

    def note(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "name": self.options.name, **fields})
        with Path(self.options.log).open("a") as log:
            log.write(line + "\n")

    def run(self) -> None:
        store = self._open()
        try:
            while not self.is_stopping:
                self._once(store)
        finally:
            if store is not None:
                store.close()
        self.note("end", counts=self.counts)

    def _open(self) -> StoreClient | None:
        """Until there is a directory."""
        options = self.options
        while not self.is_stopping:
            try:
                return StoreClient(options.directory, options.node_id, options.transports)
            except StoreError as error:
                self.counts[f"start: {type(error).__name__}"] += 1
        return None

    def _once(self, store: StoreClient | None) -> None:
        if store is None:
            return
        steps = [
            self.put,
            self.put,
            self.keep,
            self.get,
            self.get,
            self.get,
            self.get_again,
            self.get_part,
            self.exist,
            self.remove,
            self.copy,
        ]
        step = self.put if self.options.is_writer_only else self.rng.choice(steps)
        started_s = time.monotonic()
        try:
            step(store)
            self.counts[step.__name__] += 1
        except StoreError as error:
            self.counts[type(error).__name__] += 1
        seconds = time.monotonic() - started_s
        self.counts["longest_ms"] = max(self.counts["longest_ms"], int(seconds * 1e3))
        if seconds > SLOW_S:
            self.note("slow", step=step.__name__, start_s=started_s, seconds=seconds)

    def some(self) -> list[bytes]:
        numbers = self.rng.sample(range(SHARED), self.rng.randint(1, BATCH_MAX))
        return [key_of("shared", number) for number in numbers]

    # ---- steps

    def put(self, store: StoreClient) -> None:
        keys = self.some()
        node_id = self.rng.choice(self.options.others)
        done = store.put(keys, [block_of(key) for key in keys], node_id, DEADLINE_S)
        self.counts["blocks put"] += sum(done)

    def keep(self, store: StoreClient) -> None:
        """A block on the node that is never killed, where there is room for all of them."""
        number = self.counts["sole copies tried"]
        if number >= self.options.sole_copies:
            self.get_again(store)
            return
        self.counts["sole copies tried"] += 1
        key = key_of(f"sole copy of {self._life}", number)
        (done,) = store.put([key], [block_of(key)], self.options.safe, deadline_s=DEADLINE_S)
        if done:
            self.kept.append(key)
            self.note("kept", key=key.hex())

    def get(self, store: StoreClient) -> None:
        keys = self.some()
        for key, found in zip(keys, store.get(keys, deadline_s=DEADLINE_S), strict=True):
            self._look(key, found)

    def get_again(self, store: StoreClient) -> None:
        if self.kept:
            key = self.rng.choice(self.kept)
            self._look(key, store.get([key], deadline_s=DEADLINE_S)[0], "sole copies ")

    def get_part(self, store: StoreClient) -> None:
        """A part of a block has no checksum: the header of its slot must tell."""
        key = self.rng.choice(self.some())
        offset_bytes = self.rng.randrange(size_of(key) - 100)
        part = np.zeros(self.rng.randint(1, size_of(key) - offset_bytes), np.uint8)
        (is_here,) = store.get_into([key], [part], offset_bytes, deadline_s=DEADLINE_S)
        self._look(key, part if is_here else None, "parts ", offset_bytes)

    def _look(self, key: bytes, found: Any, what: str = "", offset_bytes: int = 0) -> None:
        if found is None:
            self.counts[what + "misses"] += 1
        elif is_block_of(key, found, offset_bytes):
            self.counts[what + "hits"] += 1
        else:
            self.counts["wrong"] += 1
            self.note("wrong", key=key.hex(), what=what, offset_bytes=offset_bytes)

    def exist(self, store: StoreClient) -> None:
        store.exist([key_of("shared", number) for number in range(SHARED)])

    def remove(self, store: StoreClient) -> None:
        self.counts["blocks removed"] += sum(store.remove(self.some()[:2]))

    def copy(self, store: StoreClient) -> None:
        others = self.options.others
        add, drop = self.rng.sample(others, 2) if len(others) > 1 else (others[0], "")
        done = store.change_replica(
            self.some(),
            [add],
            [drop] if drop and self.rng.random() < 0.5 else [],
            deadline_s=DEADLINE_S,
        )
        self.counts["blocks copied"] += sum(done)


def main() -> None:
    client = ChaosClient(msgspec.json.decode(sys.argv[1], type=Options))

    def stop(_number: int, _frame: Any) -> None:
        client.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    client.run()


if __name__ == "__main__":
    main()
