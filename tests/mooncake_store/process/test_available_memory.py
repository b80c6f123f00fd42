"""Memory that can still be had: the least of what the machine and its container have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_store.process.available_memory import memory_available_bytes

KIB = 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   4000 kB\n")
    return tmp_path


def container(folder: Path, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 77\ninactive_file {cached}\nactive_file 1\ntotal_inactive_file 5\n"
    (folder / "memory.stat").write_text(stat)
    return folder


@pytest.mark.parametrize(
    ("limit", "used_kib", "cached_kib", "left_kib"),
    [
        ("max", 8000, 0, 4000),
        (str(9000 * KIB), 1000, 0, 4000),  # more than the machine has left
        (str(3000 * KIB), 1000, 0, 2000),
        (str(3000 * KIB), 2900, 1500, 1600),  # files in the cache make room
        (str(3000 * KIB), 3100, 0, 0),
    ],
)
def test_a_container_has_what_its_limit_leaves_and_no_more_than_the_machine(
    proc: Path, tmp_path: Path, limit: str, used_kib: int, cached_kib: int, left_kib: int
) -> None:
    cgroup = container(tmp_path, limit, used_kib * KIB, cached_kib * KIB)
    assert memory_available_bytes(proc, cgroup) == left_kib * KIB


def test_without_a_cgroup_of_its_own_it_is_the_machines(proc: Path, tmp_path: Path) -> None:
    assert memory_available_bytes(proc, tmp_path / "none") == 4000 * KIB


def test_a_kernel_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\n")
    with pytest.raises(OSError, match="no line MemAvailable"):
        memory_available_bytes(tmp_path, tmp_path)


def test_this_machine_has_some() -> None:
    assert memory_available_bytes() > 0
