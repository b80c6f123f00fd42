"""Child processes: when one that ended is started again, and that it ends with its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.process.child_processes import (
    PAUSE_S_MAX,
    ChildDied,
    ChildProcess,
    Command,
    GrowingPauses,
    LimitedRestarts,
)
from tests.e2e.server import wait_until

PYTHON = [sys.executable, "-c"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[ChildProcess]]:
    """Children that are gone after the test."""
    children: list[ChildProcess] = []
    yield children
    for child in children:
        child.kill()


def child(
    folder: Path, program: str, policy: LimitedRestarts | GrowingPauses | None = None
) -> ChildProcess:
    command = Command([*PYTHON, program], os.environ)
    return ChildProcess("it", lambda: command, folder / "it.log", folder, policy)


def test_what_all_others_need_is_given_up_when_it_does_not_stay_up() -> None:
    policy = LimitedRestarts()
    assert [policy.pause_s(1.0, now_s) for now_s in range(6)] == [0.0] * 5 + [None]


def test_deaths_that_are_long_past_do_not_count() -> None:
    policy = LimitedRestarts()
    assert [policy.pause_s(20.0, now_s) for now_s in range(0, 200, 20)] == [0.0] * 10


def test_one_of_several_alike_is_tried_again_for_ever_but_less_and_less_often() -> None:
    policy = GrowingPauses()
    pauses_s = [policy.pause_s(1.0, now_s) for now_s in range(14)]
    assert pauses_s[:8] == [0.0] * 5 + [2.0, 4.0, 8.0]
    assert pauses_s[-1] == PAUSE_S_MAX
    assert policy.pause_s(100.0, 1_000.0) == 0.0, "it stayed up for long"


def test_a_child_that_ended_is_started_again_with_a_new_command(
    tmp_path: Path, started: list[ChildProcess]
) -> None:
    numbers = iter(range(9))

    def command() -> Command:
        return Command([*PYTHON, f"print('incarnation', {next(numbers)})"], os.environ)

    made = ChildProcess("it", command, tmp_path / "it.log", tmp_path)
    started.append(made)
    wait_until(lambda: not made.is_alive, "its end")
    assert made.supervise() == 0.0
    made.wait_for_line("incarnation 1", 20.0)
    assert made.starts == 2


def test_a_child_that_keeps_ending_is_told_once_and_waits_for_its_turn(
    tmp_path: Path, started: list[ChildProcess]
) -> None:
    class Patient:
        def pause_s(self, lived_s: float, now_s: float) -> float | None:
            return 1_000.0

    command = Command([*PYTHON, "pass"], os.environ)
    made = ChildProcess("it", lambda: command, tmp_path / "it.log", tmp_path, Patient())
    started.append(made)
    wait_until(lambda: not made.is_alive, "its end")
    assert [made.supervise(), made.supervise()] == [1_000.0, None]
    assert made.starts == 1


def test_a_child_that_is_given_up_says_its_last_words(
    tmp_path: Path, started: list[ChildProcess]
) -> None:
    made = child(tmp_path, "raise SystemExit('no disk')")
    started.append(made)

    def tend_for_ever() -> None:
        while True:
            wait_until(lambda: not made.is_alive, "its end")
            made.supervise()

    with pytest.raises(ChildDied, match="no disk"):
        tend_for_ever()


def test_a_word_inside_a_line_is_not_the_line_that_is_waited_for(
    tmp_path: Path, started: list[ChildProcess]
) -> None:
    made = child(tmp_path, "print('the port is already taken', flush=True); input()")
    started.append(made)
    wait_until(lambda: "taken" in made.log_path.read_text(), "its line")
    made.terminate()
    with pytest.raises(ChildDied, match="already taken"):
        made.wait_for_line("ready", 20.0)


def test_a_child_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = (
        "import os, sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "from mooncake_store.process.child_processes import ChildProcess, Command\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "run = [sys.executable, '-c', 'import os, signal;'\n"
        "       'print(\"pid\", os.getpid(), flush=True); signal.pause()']\n"
        "child = ChildProcess('it', lambda: Command(run, os.environ), folder / 'it.log', folder)\n"
        "child.wait_for_line('pid ', 30.0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", launcher, str(tmp_path), str(root)], timeout=60.0)
    pid = int((tmp_path / "it.log").read_text().split()[1])

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(is_gone, "the child to end")
