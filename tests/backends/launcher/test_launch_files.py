"""Files of dead launchers go, those of living ones stay, whatever their process ids say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.launcher.environment import EnvironmentProblem
from backends.launcher.launch_files import LaunchFiles, remove_leftovers

LAUNCHER = """
import sys
from pathlib import Path
from backends.launcher.launch_files import LaunchFiles
files = LaunchFiles(Path(sys.argv[1]))
files.path("s0").touch()
print(files.name, files.socket_dir, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a short path: sockets lie in it. The folder of `tmp_path` is made before."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def launcher_elsewhere(shm: Path) -> tuple[subprocess.Popen[str], str, Path]:
    """A launcher in a process of its own, what it is called, and its folder of sockets."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(shm)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    name, _, folder = process.stdout.readline().strip().partition(" ")
    return process, name, Path(folder)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_living_launcher_of_another_pid_namespace_keeps_its_files(shm: Path) -> None:
    # Its pid is in the names. Seen from another container no process has it, or another one does.
    for seen_as in (2**22 + 1, os.getpid()):
        process, name, _ = launcher_elsewhere(shm)
        other = f"mooncake-{seen_as}-{name.rpartition('-')[2]}"
        for path in shm.iterdir():
            path.rename(shm / path.name.replace(name, other))
        before = names(shm)
        assert before == [f"{other}-s0", f"{other}.lock"]
        assert remove_leftovers(shm) == [] and names(shm) == before
        end(process)
        assert remove_leftovers(shm) == [other] and names(shm) == []


def test_a_killed_launcher_leaves_files_and_sockets_that_the_next_one_removes(shm: Path) -> None:
    process, name, sockets = launcher_elsewhere(shm)
    (sockets / "directory").touch()
    end(process)
    assert names(shm) == [f"{name}-s0", f"{name}.lock"] and sockets.is_dir()
    mine = LaunchFiles(shm)
    mine.path("s0").touch()
    assert remove_leftovers(shm) == [name]
    assert names(shm) == [f"{mine.name}-s0", f"{mine.name}.lock"]
    assert not sockets.exists() and mine.socket_dir.is_dir()
    mine.remove()
    mine.remove()
    assert names(shm) == [] and not mine.socket_dir.exists()


def test_what_has_no_lock_or_only_looks_like_a_launchers_stays(shm: Path, tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.touch()
    for name in (
        "mooncake-17-s0",
        "mooncake-node-0-s0",
        "mooncake-17.lock",
        "mooncake-17-s0-pool",
        "mooncake-node-0-s0.lock",
    ):
        (shm / name).touch()
    (shm / "mooncake-17-0123abcd.lock").symlink_to(victim)
    before = names(shm)
    assert remove_leftovers(shm) == [] and names(shm) == before and victim.exists()


def test_two_launchers_of_one_process_id_do_not_share_a_name(shm: Path) -> None:
    first, second = LaunchFiles(shm), LaunchFiles(shm)
    assert first.name != second.name
    second.path("s0").touch()
    first.remove()
    assert second.path("s0").exists()
    second.remove()


@pytest.mark.parametrize("folder", ["x" * 53, "größe"])
def test_sockets_lie_in_a_short_place_of_ascii_letters_whatever_tmpdir_is(
    folder: str, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp")) / folder
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    files = LaunchFiles(shm)
    try:
        assert files.socket_dir.parent == Path("/tmp") and files.socket_dir.is_dir()
    finally:
        files.remove()
    assert not files.socket_dir.exists() and not names(shm)
    place.rmdir()
    place.parent.rmdir()


def test_a_launch_that_finds_no_place_for_its_sockets_leaves_nothing_behind(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(EnvironmentProblem, match="set TMPDIR"):
        LaunchFiles(shm)
    assert not names(shm)
