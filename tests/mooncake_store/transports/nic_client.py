"""A store client on one host of a test network: does what its stdin says, one JSON line each.

    python -m tests.mooncake_store.transports.nic_client DIRECTORY

Every block's content follows from its number, so that whoever reads it knows what must come.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.errors import StoreUnavailable
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.transports.nic_transport import MultiNicTransport
from mooncake_store.transports.nixl_transport import NixlTransport, frozen_agents

Answer = dict[str, Any]
LOOK_S = 0.002
HUNG_S = 40.0  # longer than every deadline here


def content(number: int, size_bytes: int) -> ByteArray:
    return np.random.default_rng(number).integers(0, 256, size_bytes, dtype=np.uint8)


class NicClient:
    """One verb per method; each answers with what came of it."""

    def __init__(self, directory: str) -> None:
        self.store = StoreClient(directory)
        self.targets: dict[int, ByteArray] = {}

    def put(self, numbers: list[int], size_bytes: int, deadline_s: float) -> Answer:
        keys = [key_of(str(number)) for number in numbers]
        blocks = [content(number, size_bytes) for number in numbers]
        began_s = time.monotonic()
        stored = self._said(
            "put", lambda: self.store.put(keys, blocks, "b0", deadline_s), [False] * len(keys)
        )
        return {"stored": stored, "seconds": time.monotonic() - began_s}

    def get(self, numbers: list[int], size_bytes: int, deadline_s: float) -> Answer:
        """Which blocks came; `wrong`: those that came with other bytes than theirs."""
        keys = [key_of(str(number)) for number in numbers]
        targets = [
            self.targets.setdefault(size_bytes * 1000 + at, np.zeros(size_bytes, np.uint8))
            for at in range(len(numbers))
        ]
        for target in targets:
            target[:] = 0
        began_s = time.monotonic()
        came = self._said(
            "get", lambda: self.store.get_into(keys, targets, 0, deadline_s), [False] * len(keys)
        )
        seconds = time.monotonic() - began_s
        wrong = [
            number
            for number, target, is_here in zip(numbers, targets, came, strict=True)
            if is_here and not np.array_equal(target, content(number, size_bytes))
        ]
        return {"came": came, "wrong": wrong, "seconds": seconds}

    def counters(self) -> Answer:
        nixl, found = self.store.nodes.nixl, {}
        if isinstance(nixl, MultiNicTransport):
            found = {name: asdict(counters) for name, counters in nixl.nic_counters().items()}
        moved = {each.name: asdict(each.counters) for each in self.store.nodes.transports()}
        return {
            "nics": found,
            "transports": moved,
            "frozen": frozen_agents(),
            "pending": len(self.store.pending()),
            "threads": threading.active_count(),
            "is_single": isinstance(nixl, NixlTransport),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def fill(self, value: int) -> Answer:
        """All memory that has been read into."""
        for target in self.targets.values():
            target[:] = value
        return {}

    def holds(self, value: int) -> Answer:
        return {"holds": all(bool((target == value).all()) for target in self.targets.values())}

    def exist(self, numbers: list[int]) -> Answer:
        return {"exist": self.store.exist([key_of(str(number)) for number in numbers])}

    def reaches_directory(self) -> Answer:
        try:
            self.store.exist([key_of("any")])
        except StoreUnavailable:
            return {"reached": False}
        return {"reached": True}

    def remove(self, numbers: list[int]) -> Answer:
        return {"removed": self.store.remove([key_of(str(number)) for number in numbers])}

    def _said(self, verb: str, call: Any, none: list[bool]) -> Any:
        """The result of the call (`none`, when the directory is silent).

        Another thread says when bytes have begun to move; the log shows a call that hangs.
        """
        faulthandler.dump_traceback_later(HUNG_S)
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(verb, is_over))
        watch.start()
        try:
            return call()
        except StoreUnavailable as error:  # the directory is behind the same cards
            print(f"{verb}: {error}", file=sys.stderr, flush=True)
            return none
        finally:
            faulthandler.cancel_dump_traceback_later()
            is_over.set()
            watch.join()

    def _watch(self, verb: str, is_over: threading.Event) -> None:
        nixl = self.store.nodes.nixl
        if not isinstance(nixl, MultiNicTransport):
            return
        before = {name: c.read_bytes + c.write_bytes for name, c in nixl.nic_counters().items()}
        while not is_over.wait(LOOK_S):
            now = {name: c.read_bytes + c.write_bytes for name, c in nixl.nic_counters().items()}
            if all(now[name] > before[name] for name in now):
                say({"under_way": verb})  # over every card
                return


def say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


def asked() -> Iterator[Answer]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    client = NicClient(sys.argv[1])
    say({"ready": True})
    for request in asked():
        say(getattr(client, request.pop("verb"))(**request))
    client.store.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
