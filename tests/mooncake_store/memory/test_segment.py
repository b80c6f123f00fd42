"""Segments: memory is promised before it is used, one owner at a time, nothing left behind."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.memory import segment_file
from mooncake_store.memory.segment import Segment, host_id, numa_nodes
from mooncake_store.memory.segment_file import SegmentRefused
from mooncake_store.memory.slot_memory import SlotHeader
from tests.mooncake_store.targets import ROOT

SIZE = 1024**2

OWNER = """
import sys
from mooncake_store.memory.segment import Segment
segment = Segment.create(sys.argv[1], int(sys.argv[2]))
segment.view[:] = 7
print("owned", flush=True)
sys.stdin.read()
segment.close()
"""


@pytest.fixture
def path() -> Iterator[str]:
    name = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    assert not Path(name).exists(), "the test left a segment behind"


def own_elsewhere(path: str) -> subprocess.Popen[str]:
    """Another process that owns a segment at `path` until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path, str(SIZE)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "owned\n"
    return process


def test_a_new_segment_is_zeroed_and_really_has_its_memory(path: str) -> None:
    with Segment.create(path, SIZE) as segment:
        assert segment.view.nbytes == SIZE and not segment.view.any()
        assert os.stat(path).st_blocks * 512 == SIZE, "a sparse file would end in SIGBUS"
        assert segment.address == segment.view.ctypes.data
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_what_one_mapping_writes_the_other_reads(path: str) -> None:
    with Segment.create(path, SIZE) as owner, Segment.open(path, SIZE) as guest:
        guest.view[12345] = 42
        assert owner.view[12345] == 42
        assert guest.is_owner_alive() and owner.is_owner_alive()
    assert not guest.is_owner_alive()


def test_a_guest_never_unlinks(path: str) -> None:
    with Segment.create(path, SIZE):
        Segment.open(path).close()
        assert Path(path).exists()


def test_closing_twice_is_harmless_and_a_held_view_survives_it(path: str) -> None:
    segment = Segment.create(path, SIZE)
    view = segment.view[10:20]
    view[:] = 9
    segment.close()
    segment.close()
    assert (view == 9).all(), "unmapped under a live view"
    with Segment.create(path, SIZE):  # neither the name nor the lock is held any more
        pass


def test_a_living_owners_file_is_not_taken_away(path: str) -> None:
    process = own_elsewhere(path)
    with process:
        with pytest.raises(SegmentRefused, match="living process"):
            Segment.create(path, SIZE)
        with Segment.open(path) as guest:
            assert (guest.view == 7).all()


def test_a_killed_owners_file_is_seen_as_dead_and_replaced(path: str) -> None:
    process = own_elsewhere(path)
    with process, Segment.open(path) as guest:
        assert guest.is_owner_alive()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert Path(path).exists() and not guest.is_owner_alive()
        with Segment.create(path, 2 * SIZE) as segment:
            assert not segment.view.any()
            assert (guest.view == 7).all(), "an old mapping keeps its old memory"
            assert not guest.is_owner_alive(), "the new owner owns another file"


def test_too_large_for_the_filesystem_is_refused_with_the_numbers(path: str) -> None:
    room = os.statvfs("/dev/shm")
    free_bytes = room.f_bavail * room.f_frsize
    with pytest.raises(SegmentRefused, match=r"needs \d+ MiB, /dev/shm has \d+ MiB free"):
        Segment.create(path, free_bytes + 1024**3)
    assert not Path(path).exists()


def test_more_than_the_memory_that_is_left_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_file, "memory_available_bytes", lambda: 257 * 1024**2)
    with pytest.raises(SegmentRefused, match="2 MiB of memory, 1 MiB are available"):
        Segment.create(path, 2 * SIZE)
    with Segment.create(path, SIZE):
        pass


def test_a_filesystem_that_runs_full_meanwhile_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentRefused, match="has no room"):
        Segment.create(path, SIZE)


def test_opening_what_is_not_there_or_has_another_size_is_refused(path: str) -> None:
    with pytest.raises(SegmentRefused, match="is its storage node running"):
        Segment.open(path)
    with Segment.create(path, SIZE), pytest.raises(SegmentRefused, match="announced 4096"):
        Segment.open(path, 4096)


def test_a_folder_that_cannot_be_written_is_refused(path: str) -> None:
    with pytest.raises(SegmentRefused, match="writable folder"):
        Segment.create("/proc/mooncake-test", SIZE)


def test_the_host_id_is_the_same_for_one_filesystem_and_differs_between_two(path: str) -> None:
    assert host_id(path) == host_id("/dev/shm/other") != host_id("/proc/x")


def test_hosts_that_share_a_kernel_are_told_apart_by_their_identity(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_machine = host_id(path)
    monkeypatch.setenv("MOONCAKE_HOST_IDENTITY", "a")
    identity_a = host_id(path)
    assert identity_a == host_id("/dev/shm/other") != host_id("/proc/x")
    monkeypatch.setenv("MOONCAKE_HOST_IDENTITY", "b")
    assert len({one_machine, identity_a, host_id(path)}) == 3
    monkeypatch.setenv("MOONCAKE_HOST_IDENTITY", "")
    assert host_id(path) == one_machine


def test_a_header_survives_packing_and_anything_else_is_no_header(seed: int) -> None:
    chance = np.random.default_rng(seed)
    for state, is_ephemeral in itertools.product((STATE_WRITING, STATE_READY), (False, True)):
        header = SlotHeader(state, 2**63 + 5, chance.bytes(16), 2**64 - 1, 131072, is_ephemeral)
        raw = header.pack()
        assert len(raw) == 64 and SlotHeader.unpack(raw) == header
        for position in range(64):
            torn = bytearray(raw)
            torn[position] ^= 1 << int(chance.integers(8))
            assert SlotHeader.unpack(bytes(torn)) is None, position
    assert SlotHeader.unpack(bytes(64)) is None
    assert SlotHeader.unpack(chance.bytes(64)) is None


def test_several_files_are_one_linear_memory(path: str) -> None:
    paths = [f"{path}-{name}" for name in "abc"]
    size = 3 * SIZE + 5000
    with Segment.create(":".join(paths), size) as owner:
        owner.view[:] = np.arange(size, dtype=np.uint32).astype(np.uint8)
        files = [Path(one).read_bytes() for one in paths]
        assert sum(map(len, files)) == size and len({len(file) for file in files[:-1]}) == 1
        assert b"".join(files) == owner.view.tobytes()
        with Segment.open(":".join(paths), size) as guest:
            assert np.array_equal(guest.view, owner.view) and guest.is_owner_alive()
            boundary = len(files[0])
            guest.view[boundary - 8 : boundary + 8] = 255
            assert (owner.view[boundary - 8 : boundary + 8] == 255).all()
        assert owner.address % 2**21 == 0
    assert not any(Path(one).exists() for one in paths)


def test_of_several_files_one_that_is_taken_leaves_none_behind(path: str) -> None:
    process = own_elsewhere(path)
    with process:
        with pytest.raises(SegmentRefused, match="living process"):
            Segment.create(f"{path}-a:{path}", SIZE)
        assert not Path(f"{path}-a").exists() and Path(path).exists()


def test_several_files_must_have_room_together(path: str) -> None:
    room = os.statvfs("/dev/shm")
    size = int(room.f_bavail * room.f_frsize * 1.5)
    with pytest.raises(SegmentRefused, match=r"needs \d+ MiB, /dev/shm has"):
        Segment.create(f"{path}-a:{path}-b", size)
    with pytest.raises(SegmentRefused, match="too few for 3 files"):
        Segment.create(f"{path}-a:{path}-b:{path}-c", 5000)
    assert not list(Path("/dev/shm").glob(Path(path).name + "*"))


def test_a_file_whose_memory_is_bound_to_a_numa_node_can_be_used(path: str) -> None:
    node = numa_nodes()[0]
    with Segment.create(f"{path}-a:{path}-b", 2 * SIZE, [node, None]) as segment:
        segment.view[:] = 1
    with pytest.raises(SegmentRefused, match=r"mbind to NUMA node 1000|Invalid argument"):
        Segment.create(path, SIZE, [1000])


@pytest.mark.parametrize("option", ["advise", "never"])
def test_huge_pages_are_had_where_the_mount_allows_them(tmp_path: Path, option: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size=32m,huge={option}", "none", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        with Segment.create(str(tmp_path / "s"), 8 * SIZE) as segment:
            assert segment.pages == {"advise": "2048 KiB", "never": "4 KiB"}[option]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
