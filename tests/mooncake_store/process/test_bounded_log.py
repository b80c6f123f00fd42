"""A child's log stays below a size, and no line of it is lost while the child goes on writing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.launcher.repository import ModelLoad, TritonLog
from mooncake_store.process import bounded_log
from mooncake_store.process.bounded_log import BoundedLog
from mooncake_store.process.child_processes import ChildProcess, Command
from tests.e2e.server import wait_until

LINES, LINE_BYTES = 4_000, 100
WRITER = (
    "import os\n"
    f"for number in range({LINES}):\n"
    f"    os.write(1, b'%0{LINE_BYTES - 1}d\\n' % number)\n"
    "os.abort()\n"
)


def lines_of(log: BoundedLog) -> list[str]:
    return (log.older_path.read_text() + log.path.read_text()).splitlines()


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "it.log", 10_000)
    log.path.write_bytes(b"x" * 10_000)
    assert log.shorten() == 0
    assert not log.older_path.exists()


def test_what_another_launch_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "it.log").write_text("old")
    (tmp_path / "it.log.1").write_text("older")
    log = BoundedLog(tmp_path / "it.log")
    assert log.path.read_text() == "" and not log.older_path.exists()


@pytest.mark.parametrize("can_collapse", [True, False])
def test_the_older_part_goes_to_a_file_of_its_own(
    tmp_path: Path, can_collapse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_collapse:
        monkeypatch.setattr(bounded_log, "_collapse", lambda file, length_bytes: False)
    log = BoundedLog(tmp_path / "it.log", 8_192)
    with log.open_to_append() as child:
        for number in range(200):
            child.write(b"%099d\n" % number)
        child.flush()
        taken = log.shorten()
        child.write(b"after\n")
    assert taken >= 8_192 and log.path.stat().st_size <= 20_006 - taken
    expected = [*(f"{number:099}" for number in range(200)), "after"]
    assert lines_of(log) == expected, "each line once, in order"
    assert log.last_lines(2).splitlines() == expected[-2:]


def test_no_line_of_a_child_that_writes_and_crashes_is_lost(tmp_path: Path) -> None:
    """The older part holds what was cut last, so the test collects each of them."""
    log = BoundedLog(tmp_path / "it.log", 16_384)
    collected = b""
    with log.open_to_append() as out:
        child = subprocess.Popen([sys.executable, "-c", WRITER], stdout=out)
    while True:
        has_ended = child.poll() is not None
        if log.shorten():
            collected += log.older_path.read_bytes()
        if has_ended:
            break
    collected += log.path.read_bytes()
    if not bounded_log_collapses(tmp_path):
        pytest.skip("this file system cannot collapse a range: a line may be lost")
    assert collected.splitlines() == [b"%099d" % number for number in range(LINES)]
    assert child.returncode < 0
    assert log.last_lines(1) == f"{LINES - 1:099}"


def bounded_log_collapses(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(b"x" * 1_000_000)
    with probe.open("r+b") as file:
        block = max(os.fstat(file.fileno()).st_blksize, os.fstatvfs(file.fileno()).f_bsize)
        return bounded_log._collapse(file.fileno(), block)


def test_a_disk_that_is_full_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bounded_log, "_copy", full)
    log = BoundedLog(tmp_path / "it.log", 1_000)
    log.path.write_bytes(b"x" * 10_000)
    assert log.shorten() == 0
    assert log.path.stat().st_size == 10_000, "nothing was taken that is not kept"
    assert [path.name for path in tmp_path.iterdir()] == ["it.log"]


def test_what_is_taken_off_the_front_is_in_the_older_file_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a disk that is full at the last bytes would cost all of them."""
    kept: list[int] = []

    def collapse(file: int, length_bytes: int) -> bool:
        kept.append((tmp_path / "it.log.copying").stat().st_size - length_bytes)
        return False

    monkeypatch.setattr(bounded_log, "_collapse", collapse)
    log = BoundedLog(tmp_path / "it.log", 1_000)
    block = max(tmp_path.stat().st_blksize, os.statvfs(tmp_path).f_bsize)
    log.path.write_bytes(b"x" * (block + 1_000))
    assert log.shorten() == block + 1_000
    assert kept == [0]


def test_what_triton_says_is_read_once_though_the_front_goes(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "it.log", 8_192)
    watch = TritonLog(log.path)
    with log.open_to_append() as triton:
        triton.write(b"I1123 x\n" * 2_000 + b"I1123 successfully loaded 'decode_0'\n")
        triton.flush()
        assert watch.news() == [ModelLoad("decode_0")]
        watch.moved(log.shorten())
        assert watch.news() == []
        triton.write(b"I1123 successfully loaded 'decode_1'\n")
        triton.flush()
        assert watch.news() == [ModelLoad("decode_1")]


def test_the_last_words_of_a_child_are_found_behind_a_cut(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", WRITER], os.environ)
    child = ChildProcess("it", lambda: command, tmp_path / "it.log", tmp_path, log_bytes_max=16_384)
    try:
        wait_until(lambda: not child.is_alive, "its end")
        assert child.bound_log() > 0
        assert child.last_lines(100).splitlines() == [
            f"{number:099}" for number in range(LINES - 100, LINES)
        ]
    finally:
        child.kill()
