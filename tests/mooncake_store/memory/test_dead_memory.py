"""Memory of a dead node: given back at once by whoever has mapped it, and never under a user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import KvLayout
from tests.mooncake_store.processes import NodeProcess, SiteProcesses
from tests.mooncake_store.site import pause
from tests.mooncake_store.targets import ROOT

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=64, dtype="float32", block_tokens=64)
PATIENCE_S = 30.0
pytestmark = pytest.mark.servers


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(site: SiteProcesses) -> Iterator[Store]:
    site.node("s0", 8, "--mapped-only")
    with DirectoryClient(site.address) as directory:
        made = Store(directory, "s0", "f" * 32, LAYOUT, "mapped")
        yield made
        made.close()


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, f"waited {PATIENCE_S:g} s for {what}"
        pause()


def is_mapped(node: NodeProcess) -> bool:
    """Does this process have memory of the node's, be it of a deleted file?"""
    return node.path in Path("/proc/self/maps").read_text()


def stored(store: Store, key: bytes, value: int) -> None:
    """One block of that value, committed by a worker, as soon as its node takes it."""
    until(lambda: attempted(store, key, value), "the node to take a block")


def attempted(store: Store, key: bytes, value: int) -> bool:
    try:
        [slot] = store.allocate([key], "writer", 60.0).slots
    except Exception as error:  # it is dead, and the directory has not heard of it
        assert "has died" in str(error), error
        return False
    if slot is None:
        return False
    block = np.full(LAYOUT.block_bytes, value, np.uint8)
    [digests] = store.write([slot], block, [0], PATIENCE_S)
    return digests is not None and store.commit([(key, slot, digests)], "writer", 60.0) == [True]


def test_an_idle_worker_gives_the_memory_of_a_dead_node_back(
    site: SiteProcesses, store: Store
) -> None:
    node = site.nodes["s0"]
    stored(store, b"a" * 16, 1)
    assert is_mapped(node)
    node.end(signal.SIGKILL)
    until(lambda: not is_mapped(node), "the memory to be unmapped")
    node.start()
    stored(store, b"b" * 16, 2)
    page = np.zeros(LAYOUT.block_bytes, np.uint8)
    [copies] = store.lookup([b"b" * 16], "reader", 60.0)
    assert store.read(copies, page, [0], PATIENCE_S) == [True] and page[0] == page[-1] == 2


def test_a_view_in_use_keeps_its_memory_until_it_is_dropped(
    site: SiteProcesses, store: Store
) -> None:
    node = site.nodes["s0"]
    [slot] = store.allocate([b"a" * 16], "writer", 60.0).slots
    assert slot is not None
    views = [store._local.segment.view[-LAYOUT.block_bytes :]]
    node.end(signal.SIGKILL)
    until(lambda: store._local.mapped() is None, "the worker to let go")
    assert is_mapped(node)
    views[0][:] = 7
    assert (views[0] == 7).all()
    views.clear()
    assert not is_mapped(node)


def test_a_late_writer_does_not_touch_the_next_life_of_its_node(
    site: SiteProcesses, store: Store
) -> None:
    [late] = store.allocate([b"a" * 16], "late", 60.0).slots
    assert late is not None
    site.nodes["s0"].end(signal.SIGKILL)
    site.nodes["s0"].start()
    stored(store, b"b" * 16, 2)
    [[copy]] = store.lookup([b"b" * 16], "reader", 60.0)
    assert copy.slot == late.slot, "the same place, in another life"
    nines = np.full(LAYOUT.block_bytes, 9, np.uint8)
    assert store.write([late], nines, [0], PATIENCE_S) == [None]
    assert store.commit([(b"a" * 16, late, [9] * LAYOUT.layers)], "late", 60.0) == [False]
    page = np.zeros(LAYOUT.block_bytes, np.uint8)
    assert store.read([copy], page, [0], PATIENCE_S) == [True] and (page == 2).all()


def test_a_node_that_needs_more_than_there_could_be_is_refused_at_once(
    site: SiteProcesses, tmp_path: Path
) -> None:
    room = os.statvfs("/dev/shm")
    mib = room.f_blocks * room.f_frsize // 2**20 + 1
    with pytest.raises(AssertionError, match=r"cannot start: segment .* needs \d+ MiB"):
        site.node("huge", mib, "--room-s-max", "3600")


def test_a_dead_nodes_next_life_gets_the_room_that_workers_and_clients_had_mapped(
    tmp_path: Path,
) -> None:
    """In a /dev/shm that has room for two segments and little more, as a server's has."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root, to mount a /dev/shm of its own")
    script = (
        "mount -t tmpfs -o size=176m tmpfs /dev/shm && "  # 2 x 64 MiB, and 48 MiB for all else
        f"exec {sys.executable} -m tests.mooncake_store.small_memory {tmp_path} 64"
    )
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
