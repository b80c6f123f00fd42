"""Processes that use the store itself, without a worker: they put, get, copy and remove blocks.

Each user has a `StoreClient` on a host of its own, so that every byte moves one-sided. Some users
verify what they read, others do not. Users meet on the same keys: two put one key at a time, and a
user removes a block, and puts another one, while a node still copies it.

A user judges each answer. A block that arrives has the bytes of its key, and a put that answers
True has some copy that a directory once took as complete.

Not here: what lies in the nodes at the end (judge.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mooncake_store.client.client import StoreClient
from mooncake_store.errors import StoreError
from mooncake_store.layout import geometry
from mooncake_store.memory.slot_memory import SlotMemory
from mooncake_store.records.membership import NodeInfo
from tests.fuzz_serve import green
from tests.fuzz_serve.engine import LAYOUT
from tests.fuzz_serve.loop import Loop, Process
from tests.fuzz_serve.memory import GreenNixl
from tests.fuzz_serve.site import DIRECTORY, Deployment

HOST = "u"  # has no directory, node or worker
PAUSE_S_MAX = 0.5  # between two acts of one thread
DEADLINE_S = 10.0  # of a put, a get or a copy
THREADS = 3  # of a user
KEYS_MAX = 12  # that users still ask for
GIVE_UP_S_MAX = 6.0  # after which the user of a copy that is slow gives it up
TAKEN_OVER = 2  # blocks put after one was removed
BURST_MAX = 8  # puts without a pause: slots are reserved ahead


class Users:
    def __init__(self, world: Loop, site: Deployment) -> None:
        self.world, self.site = world, site
        self.expected: dict[bytes, bytes] = {}  # by its key, the bytes of every block put by a user
        self._recent: list[bytes] = []  # keys, the newest last
        self._nodes = sorted(site.shape.units)
        self._processes: list[Process] = []
        self._is_over = False
        world.on_complete = self._check_complete

    def begin(self, from_s: float, count: int) -> None:
        for number in range(count):
            process = Process(self.world, f"user-{number}", HOST)
            process.state["environ"] = {"MOONCAKE_DIRECTORY": DIRECTORY, "MOONCAKE_INSECURE": "1"}
            self._processes.append(process)
            self.world.at(from_s, lambda _, process=process: self._start(process))

    def end(self) -> None:
        """Each user finishes its acts, gives back what it has reserved, and exits."""
        self._is_over = True

    def check_rest(self) -> None:
        left = [process.name for process in self._processes if process.is_alive]
        assert not left, f"{left} do not end"

    def _check_complete(self, node: NodeInfo, key: bytes, slot: int) -> None:
        """A copy that a directory commits has the bytes of its key."""
        view = GreenNixl.memories.views.get(node.segment_path)
        if key not in self.expected or view is None or self.is_damaged:
            return
        if self.world.seen["pause"]:  # a paused directory cannot know that it leads no more (0026)
            return
        shape = geometry(node.segment_bytes, node.unit_bytes)
        payload = SlotMemory(view, shape).payload(slot, LAYOUT.block_bytes)
        if payload.tobytes() != self.expected[key]:
            self.world.fail(f"a copy of {key.hex()[:8]} with the bytes of another key is committed")

    @property
    def is_damaged(self) -> bool:
        """Bytes that no checksum guards may be wrong: a bit fell over, or a transfer was late."""
        seen = self.world.seen
        return bool(seen["bits that fell over"] or seen["transfers that were late"])

    def _start(self, process: Process) -> None:
        green.spawn(process, lambda: self._run(process), "user")

    def _run(self, process: Process) -> None:
        is_verified = self.world.rng.random() < 0.3
        try:
            store = StoreClient(DIRECTORY, transports="nixl", is_verified=is_verified)
        except StoreError:
            self.world.at(self.world.now_s, lambda _: process.kill())
            return
        pool = green.ThreadPoolExecutor(THREADS)
        green.wait([pool.submit(self._act_on, store) for _ in range(THREADS)])
        store.close()
        self.world.at(self.world.now_s, lambda _: process.kill())

    def _act_on(self, store: StoreClient) -> None:
        rng = self.world.rng
        acts: list[Callable[[StoreClient], None]] = [
            self._put,
            self._put,
            self._get,
            self._copy,
            self._copy,
            self._remove,
        ]
        while not self._is_over:
            try:
                rng.choice(acts)(store)
            except StoreError as error:
                self.world.seen[f"users saw {type(error).__name__}"] += 1
            green.sleep(rng.random() ** 2 * PAUSE_S_MAX)

    # ---- acts

    def _new_key(self) -> bytes:
        key = self.world.rng.randbytes(16)
        self.expected[key] = self.world.rng.randbytes(LAYOUT.block_bytes)
        self._recent = [*self._recent[1 - KEYS_MAX :], key]
        return key

    def _some_key(self) -> bytes:
        return self.world.rng.choice(self._recent) if self._recent else self._new_key()

    def _put(self, store: StoreClient) -> None:
        rng = self.world.rng
        node_id = rng.choice(self._nodes)
        for _ in range(rng.randrange(1, BURST_MAX + 1)):
            key = self._recent[-1] if self._recent and rng.random() < 0.06 else self._new_key()
            self._put_one(store, key, node_id)

    def _put_one(self, store: StoreClient, key: bytes, node_id: str) -> None:
        block = np.frombuffer(self.expected[key], np.uint8)
        (is_stored,) = store.put([key], [block], node_id, DEADLINE_S)
        self.world.seen["puts of users"] += is_stored
        if is_stored and key not in self.world.completed:
            self.world.fail(f"put of {key.hex()[:8]} on {node_id} is True, and nobody stored it")

    def _get(self, store: StoreClient) -> None:
        key = self._some_key()
        (found,) = store.get([key], DEADLINE_S)
        self.world.seen["gets of users"] += found is not None
        is_wrong = found is not None and bytes(found) != self.expected[key]
        if is_wrong and not self.is_damaged:
            self.world.fail(f"a user reads wrong bytes for {key.hex()[:8]}")

    def _remove(self, store: StoreClient) -> None:
        store.remove([self._some_key()])

    def _copy(self, store: StoreClient) -> None:
        """A node pulls a block from another node. The user may give that up, and another block
        comes into the slot that is still read."""
        rng, key = self.world.rng, self._new_key()
        source, target = rng.sample(self._nodes, 2)
        self._put_one(store, key, source)
        owner = f"{store._owner()}/copy"
        if rng.random() < 0.6:
            after_s = rng.random() ** 4 * GIVE_UP_S_MAX
            process = green.in_process()
            assert process is not None
            green.spawn(process, lambda: self._take_over(store, owner, key, source, after_s), "")
        (is_there,) = store.replicas.change([key], [target], [], owner, DEADLINE_S, source)
        self.world.seen["copies of users"] += is_there

    def _take_over(
        self, store: StoreClient, owner: str, key: bytes, source: str, after_s: float
    ) -> None:
        green.sleep(after_s)
        if self._is_over:
            return
        try:
            store.directory.release(owner)
            if store.remove([key]) == [True]:
                self.world.seen["blocks removed while they are copied"] += 1
                for _ in range(TAKEN_OVER):
                    self._put_one(store, self._new_key(), source)
        except StoreError as error:
            self.world.seen[f"users saw {type(error).__name__}"] += 1
