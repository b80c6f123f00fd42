"""Blocks that several processes write together, on real nodes that die, spill and copy."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import LayerRange
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl
from tests.mooncake_store.layer_stage import DEADLINE_S, LAYOUT, content
from tests.mooncake_store.processes import SiteProcesses
from tests.mooncake_store.site import PATIENCE_S, pause
from tests.mooncake_store.targets import ROOT

pytestmark = pytest.mark.servers
BLOCK, LAYER = LAYOUT.block_bytes, LAYOUT.layer_bytes
FIRST, LAST = LayerRange(0, 5), LayerRange(5, 12)


class StageProcess:
    """layer_stage.py with the later layers."""

    def __init__(self, address: str, transports: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.mooncake_store.layer_stage",
                address,
                "s1",
                transports,
                str(LAST.first),
                str(LAST.stop),
            ],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def ask(self, key: bytes, slot: Slot, seed: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([key.hex(), slot, seed]) + "\n")
        self.process.stdin.flush()

    def answers(self) -> dict[bytes, list[int] | None]:
        """All that it says before it ends."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        said = [json.loads(line) for line in self.process.stdout if line.endswith("\n")]
        self.process.stdout.close()
        self.process.wait(PATIENCE_S)
        return {bytes.fromhex(key): digests for key, digests in said}


class Owner:
    """The stage with the first layers, in this process: it allocates, and commits."""

    def __init__(self, address: str, transports: str) -> None:
        self.directory = DirectoryClient(address)
        self.store = Store(self.directory, "s0", "f" * 32, LAYOUT, transports, FIRST)
        self.seeds: dict[bytes, int] = {}

    def begin(self, keys: list[bytes], chance: random.Random) -> dict[bytes, Slot]:
        given = self.store.allocate(keys, "group", 60.0)
        slots = {key: slot for key, slot in zip(keys, given.slots, strict=True) if slot is not None}
        assert len(slots) == len(keys)
        self.seeds.update({key: chance.randrange(2**32) for key in keys})
        return slots

    def write(self, key: bytes, slot: Slot) -> tuple[int, ...]:
        part = content(self.seeds[key])[: len(FIRST) * LAYER]
        [digests] = self.store.write([slot], part, [0], DEADLINE_S)
        assert digests is not None
        return digests

    def close(self) -> None:
        self.store.close()
        self.directory.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path, "--spill-fraction", "0.001")
    yield made
    made.close()


def pages_of(copies: list[Copy], store: Store) -> list[np.ndarray | None]:
    """What a worker with some layers reads of these blocks."""
    size = store.pages.page_bytes
    pool = np.zeros(len(copies) * size, np.uint8)
    store.register_buffer(pool)
    offsets = range(0, len(pool), size)
    arrived = store.read(copies, pool, offsets, DEADLINE_S)
    return [
        pool[at : at + size] if is_here else None
        for at, is_here in zip(offsets, arrived, strict=True)
    ]


def until(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain for {what}"
        pause()


@pytest.mark.parametrize("transports", ["mapped", "auto", "tcp"])
def test_a_stage_that_is_killed_while_it_writes_leaves_no_block_that_is_believed(
    site: SiteProcesses, transports: str, seed: int
) -> None:
    if transports == "auto":
        try:
            load_nixl()
        except NixlUnavailable as error:
            pytest.skip(str(error))
    more = ("--data", "127.0.0.1:0") if transports == "tcp" else ()
    for node_id in ("s0", "s1"):
        site.node(node_id, 64, *more)
    chance = random.Random(seed)
    owner = Owner(site.address, transports)
    committed: set[bytes] = set()
    for _ in range(3):
        stage = StageProcess(site.address, transports)
        keys = [chance.randbytes(16) for _ in range(40)]
        slots = owner.begin(keys, chance)
        fatal = chance.randrange(len(keys))
        mine = {}
        for number, key in enumerate(keys):
            stage.ask(key, slots[key], owner.seeds[key])
            mine[key] = owner.write(key, slots[key])
            if number == fatal:
                stage.process.send_signal(signal.SIGKILL)
                break
        theirs = stage.answers()
        done = [key for key in keys if key in mine and theirs.get(key)]
        rows = [(key, slots[key], [*mine[key], *(theirs[key] or [])]) for key in done]
        assert owner.store.commit(rows, "group", 60.0) == [True] * len(rows) if rows else True
        owner.store.release("group")
        committed.update(done)
    with StoreClient(site.address, transports=transports) as client:
        for key, number in owner.seeds.items():
            [found] = client.get([key])
            assert (found is not None) == (key in committed)
            assert found is None or np.array_equal(found, content(number))
    owner.close()


def test_layers_are_verified_singly_after_an_ssd_a_restart_and_a_copy_by_the_node(
    site: SiteProcesses, tmp_path: Path, seed: int
) -> None:
    ssd = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 * 2**20))
    site.node("s0", 32, "--mapped-only", *ssd)
    site.node("s1", 32, "--mapped-only")
    chance = random.Random(seed)
    owner = Owner(site.address, "mapped")
    stage = Store(owner.directory, "s1", "f" * 32, LAYOUT, "mapped", LAST)
    keys = [chance.randbytes(16) for _ in range(5)]
    slots = owner.begin(keys, chance)
    rows = []
    for key in keys:
        part = content(owner.seeds[key])[len(FIRST) * LAYER :]
        [theirs] = stage.write([slots[key]], part, [0], DEADLINE_S)
        rows.append((key, slots[key], [*owner.write(key, slots[key]), *(theirs or ())]))
    assert stage.commit(rows, "group", 60.0) == [True] * 5
    owner.store.release("group")

    def copies(node_id: str) -> list[Copy]:
        found = owner.directory.lookup(keys, "looking", 0.0, prefix_only=False)
        return [copy for each in found for copy in each if copy.node_id == node_id]

    until(lambda: len(copies("s0/ssd")) == 5, "the blocks to be on the SSD")
    site.nodes["s0"].end(signal.SIGKILL)
    site.nodes["s0"].start()
    until(lambda: len(copies("s0/ssd")) == 5 and not copies("s0"), "the SSD to be told of")
    with StoreClient(site.address, transports="mapped") as client:
        found = client.get(keys)
        for key, block in zip(keys, found, strict=True):
            assert block is not None and np.array_equal(block, content(owner.seeds[key]))
        assert client.change_replica(keys, add=["s1"]) == [True] * 5
    for node_id in ("s0", "s1"):
        here = copies(node_id)
        assert len(here) == 5
        for key, page in zip(keys, pages_of(here, stage), strict=True):
            assert page is not None, f"of {node_id} no single layer could be verified"
            assert np.array_equal(page, content(owner.seeds[key])[len(FIRST) * LAYER :])
    stage.close()
    owner.close()
