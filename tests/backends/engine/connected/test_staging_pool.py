"""The staging pool: a file that goes with its worker, whatever ends the worker."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from backends.engine.connected import host_memory
from backends.engine.connected.host_memory import PoolProblem, StagingPool


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "SHM", tmp_path)
    return tmp_path


def test_both_sides_see_the_same_bytes() -> None:
    pool = StagingPool("mooncake-1-x", "decode_0", pages=3, page_bytes=4096)
    pool.bytes[5000] = 7
    assert np.fromfile(pool.path, np.uint8)[5000] == 7
    pool.close()
    assert not pool.path.exists()
    assert pool.bytes[5000] == 7, "who still looks at it may"


def test_the_pool_of_a_killed_life_is_removed_by_the_next(shm: Path) -> None:
    gone = shm / "mooncake-1-x-pool-decode_0-4194399"
    of_another = shm / "mooncake-1-x-pool-decode_1-4194399"
    alive = shm / f"mooncake-1-x-pool-decode_0-{os.getppid()}"
    for path in (gone, of_another, alive):
        path.touch()
    pool = StagingPool("mooncake-1-x", "decode_0", 1, 4096)
    assert not gone.exists() and of_another.exists() and alive.exists()
    assert pool.path.exists()


def test_a_file_whose_name_ends_in_no_process_id_is_kept(shm: Path) -> None:
    foreign = shm / "mooncake-1-x-pool-decode_0-\N{SUPERSCRIPT TWO}"
    foreign.touch()
    assert StagingPool("mooncake-1-x", "decode_0", 1, 4096).path.exists()
    assert foreign.exists()


def test_a_reload_has_a_pool_of_its_own_beside_the_old_one() -> None:
    first = StagingPool("mooncake-1-x", "decode_0", 1, 4096)
    second = StagingPool("mooncake-1-x", "decode_0", 1, 4096)
    assert first.path != second.path and first.path.exists()


def test_a_pool_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(PoolProblem, match=r"MiB.*Lower kv_bytes"):
        StagingPool("mooncake-1-x", "decode_0", 1 << 24, 1 << 30)
