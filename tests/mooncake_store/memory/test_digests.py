"""Blocks are copied and hashed alike by native.c and by Python, and as xxHash says."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store.memory import digests
from mooncake_store.memory.buffers import PIECE_BYTES, copy_and_sum
from mooncake_store.memory.digests import (
    STREAMED_BYTES_MIN,
    block_checksum,
    copy_blocks,
    layer_digests,
    pack_digests,
)
from mooncake_store.native import library


@pytest.fixture(params=["native", "python"], autouse=True)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SHARED_BYTES_MIN", 0)  # short copies are shared, too
    if request.param == "python":
        monkeypatch.setattr(digests, "_native_copy", lambda: None)
    elif library.why_not():
        pytest.skip(library.why_not())


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    part_bytes=st.one_of(st.integers(1, 2_200), st.integers(1, 40).map(lambda n: n * 1_024)),
    layers=st.integers(0, 5),
    blocks=st.integers(1, 4),
    shift=st.integers(0, 70),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 5),
)
def test_a_copy_is_whole_and_has_the_digests_of_xxhash(
    part_bytes: int, layers: int, blocks: int, shift: int, seed: int, threads: int
) -> None:
    block_bytes = part_bytes * (layers or 1)
    source = random_bytes(blocks * block_bytes + shift, seed)
    target = np.full(blocks * (block_bytes + 2) + shift, 255, np.uint8)
    here = [(source, shift + at * block_bytes) for at in range(blocks)]
    there = [(target, 1 + at * (block_bytes + 2)) for at in reversed(range(blocks))]
    packed = copy_blocks(there, here, block_bytes, layers, threads=threads, is_read=False)
    for (_, start), (_, far), found in zip(there, here, packed, strict=True):
        wanted = source[far : far + block_bytes]
        assert (target[start : start + block_bytes] == wanted).all()
        assert target[start - 1] == 255 == target[start + block_bytes], "beside the block"
        assert found == layer_digests(wanted, layers or 1)


@pytest.mark.parametrize("extra", [0, 1, 63, 64, 65])
def test_a_large_copy_goes_past_the_cache_and_is_whole(extra: int) -> None:
    block_bytes = STREAMED_BYTES_MIN // 2 + extra
    source, target = random_bytes(2 * block_bytes, 1), np.zeros(2 * block_bytes + 64, np.uint8)
    aligned = -target.ctypes.data % 64
    there = [(target, aligned), (target, aligned + block_bytes)]
    here = [(source, 0), (source, block_bytes)]
    for is_hashed in (True, False):
        target[:] = 0
        packed = copy_blocks(there, here, block_bytes, 0, is_hashed, is_read=True)
        assert (target[aligned : aligned + 2 * block_bytes] == source).all()
        halves = (source[:block_bytes], source[block_bytes:])
        sums = [pack_digests([xxhash.xxh3_64_intdigest(half.data)]) for half in halves]
        assert packed == (sums if is_hashed else [b"", b""])


def copy_and_check(seed: int, rounds: int, threads: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(rounds):
        blocks, block_bytes = int(chance.integers(1, 20)), int(chance.integers(241, 40_000))
        source = chance.integers(0, 256, blocks * block_bytes, dtype=np.uint8)
        target = np.zeros(blocks * block_bytes, np.uint8)
        places = [at * block_bytes for at in range(blocks)]
        packed = copy_blocks(
            [(target, at) for at in places],
            [(source, at) for at in reversed(places)],
            block_bytes,
            threads=threads,
            is_read=False,
        )
        for at, found in zip(places, packed, strict=True):
            far = places[-1] - at
            wanted = source[far : far + block_bytes]
            assert (target[at : at + block_bytes] == wanted).all()
            assert found == pack_digests([xxhash.xxh3_64_intdigest(wanted.data)])


def test_more_callers_than_helpers_copy_at_once_and_each_gets_its_own() -> None:
    with ThreadPoolExecutor(12) as callers:
        done = [callers.submit(copy_and_check, seed, 40, 2 + seed % 7) for seed in range(12)]
        for each in done:
            each.result(timeout=60)


def test_a_forked_process_copies_without_the_helpers_of_its_parent() -> None:
    script = (
        "import os, sys\n"
        "from mooncake_store.memory import digests\n"
        "from tests.mooncake_store.memory.test_digests import copy_and_check\n"
        "digests.SHARED_BYTES_MIN = 0\n"
        "copy_and_check(1, 20, 3)\n"
        "child = os.fork()\n"
        "copy_and_check(2, 20, 3)\n"
        "if child == 0: os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7


@pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())
def test_a_helper_runs_where_its_process_may_and_dies_of_its_own_mistakes() -> None:
    script = (
        "import os, threading\n"
        "from pathlib import Path\n"
        "from mooncake_store.memory import digests\n"
        "from tests.mooncake_store.memory.test_digests import copy_and_check\n"
        "digests.SHARED_BYTES_MIN = 0\n"
        "def first():\n"
        "    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)\n"
        "    copy_and_check(1, 20, 2)\n"
        "caller = threading.Thread(target=first)\n"
        "caller.start()\n"
        "caller.join()\n"
        "tasks = Path('/proc/self/task').iterdir()\n"
        "def name(task):\n"
        "    try: return (task / 'comm').read_text().strip()\n"
        "    except FileNotFoundError: return ''\n"  # a thread that has just ended
        "[helper] = [at for at in tasks if name(at) == 'store-copy']\n"
        "number = int(helper.name)\n"
        "assert os.sched_getaffinity(number) == os.sched_getaffinity(0)\n"
        "status = dict(l.split(':', 1) for l in (helper / 'status').read_text().splitlines())\n"
        "blocked = int(status['SigBlk'], 16)\n"
        "assert blocked & 1 << 15 - 1, 'SIGTERM is for others'\n"
        "assert not blocked & (1 << 11 - 1 | 1 << 7 - 1), 'SIGSEGV and SIGBUS are its own'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def test_the_checksum_of_a_block_is_over_its_layers_digests() -> None:
    source, target = random_bytes(4 * 512, 2), np.zeros(4 * 512, np.uint8)
    (packed,) = copy_blocks([(target, 0)], [(source, 0)], source.nbytes, 4, is_read=True)
    assert block_checksum(packed) == digests.checksum_of(source, 4)


def test_a_place_outside_of_its_buffer_is_refused_before_anything_is_written() -> None:
    source, target = random_bytes(512, 3), np.zeros(512, np.uint8)
    with pytest.raises(ValueError):
        copy_blocks([(target, 1)], [(source, 0)], 512, is_read=True)
    assert not target.any()


@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("layer_bytes", [200, 4_096, PIECE_BYTES + 1_000])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_late_byte_in_shared_memory_never_gets_into_the_digest_of_a_copy(
    is_read: bool, layer_bytes: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that was given up writes into the segment between the copy and the hashing. A
    write must be hashed as it was meant, a read as it arrived."""
    monkeypatch.setattr(digests, "_native_copy", lambda: None)
    source = random_bytes(layers * layer_bytes, 4)
    target = np.zeros_like(source)
    meant, shared = source.copy(), source if is_read else target
    plain, running = xxhash.xxh3_64_intdigest, xxhash.xxh3_64
    late = iter([*range(0, source.nbytes, 199)] * 50)

    def write_late() -> None:
        shared[next(late)] ^= 0xFF

    class Late:
        def __init__(self) -> None:
            self.state = running()

        def update(self, data: memoryview) -> None:
            write_late()
            self.state.update(data)

        def intdigest(self) -> int:
            return self.state.intdigest()

    def late_digest(data: memoryview) -> bytes:
        write_late()
        return plain(data).to_bytes(8, "big")

    monkeypatch.setattr(xxhash, "xxh3_64", Late)
    monkeypatch.setattr(xxhash, "xxh3_64_digest", late_digest)
    monkeypatch.setattr(
        xxhash, "xxh3_64_intdigest", lambda data: int.from_bytes(late_digest(data), "big")
    )
    (packed,) = copy_blocks([(target, 0)], [(source, 0)], source.nbytes, layers, is_read=is_read)
    summed = copy_and_sum(target, source, is_read=is_read)
    monkeypatch.undo()
    if is_read:
        assert summed == xxhash.xxh3_64_intdigest(target.data)
    else:
        assert summed == xxhash.xxh3_64_intdigest(meant.data)
        assert packed == layer_digests(meant, layers)
