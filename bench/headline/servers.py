"""Starts a system's processes and ends them; its logs stay in the resume folder.

Every command gets a session of its own, so its whole process group is ended: interrupted first,
then terminated, then killed. Shared memory that stays in /dev/shm is reported and never removed,
because it may belong to another server of this machine.

Not here: the commands (systems.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

from backends.direct_http import CALL_FAILED, DIRECTLY
from bench.headline.systems import SERVER_FOLDER, ServerCommand, SystemPlan
from loadtest.harness.server import CannotMeasure, last_lines

READY_S_MAX = 900.0  # the first start of vLLM compiles
STOP_S_MAX = 20.0
POLL_S, PROBE_S_MAX = 0.5, 5.0
NAMES_SHOWN = 4
SHARED_MEMORY = Path("/dev/shm")


class StartFailed(CannotMeasure):
    """A system did not become ready; the message ends with the last lines of its log."""


@contextlib.contextmanager
def running(plan: SystemPlan, logs: Path, progress: Callable[[str], None]) -> Iterator[float]:
    """The system until the block ends; yields the seconds until it was ready. StartFailed.

    `progress` gets a line when files stay in /dev/shm."""
    logs.mkdir(parents=True, exist_ok=True)
    before = shared_memory()
    started_s = time.perf_counter()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for stage in plan.stages:
            begun = [(command, start(command, logs)) for command in stage]
            processes += [process for _, process in begun]
            for command, process in begun:
                wait_ready(command, process, logs)
        yield time.perf_counter() - started_s
    finally:
        with signals_held():
            for process in reversed(processes):
                end(process)
        if left := sorted(shared_memory() - before):
            names = ", ".join(path.name for path in left[:NAMES_SHOWN])
            progress(f"{len(left)} new files in {SHARED_MEMORY}, maybe of other programs: {names}")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ignore a second Ctrl-C or SIGTERM, which would leave servers behind."""
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in held:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def start(command: ServerCommand, logs: Path) -> subprocess.Popen[bytes]:
    with (logs / f"{command.name}.log").open("wb") as log:
        return subprocess.Popen(
            command.words,
            cwd=SERVER_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(command.variables),
            start_new_session=True,
        )


def wait_ready(command: ServerCommand, process: subprocess.Popen[bytes], logs: Path) -> None:
    give_up_s = time.monotonic() + READY_S_MAX
    while command.ready_url and not answers(command.ready_url):
        why = ""
        if process.poll() is not None:
            why = f"ended with status {process.returncode}"
        elif time.monotonic() > give_up_s:
            why = f"was not ready within {READY_S_MAX:.0f} s"
        if why:
            log = logs / f"{command.name}.log"
            raise StartFailed(f"{command.name} {why}; {log} ends with:\n{last_lines(log)}")
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    """Whether the URL answers with status 200."""
    try:
        with DIRECTLY.open(url, timeout=PROBE_S_MAX) as answer:
            return bool(answer.status == 200)
    except (urllib.error.HTTPError, *CALL_FAILED):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group; the leader may be gone already."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if group_ended(process):
            break
    process.wait()


def group_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the group is empty within STOP_S_MAX."""
    give_up_s = time.monotonic() + STOP_S_MAX
    while time.monotonic() < give_up_s:
        process.poll()  # reap the leader, or its group would never be empty
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(POLL_S)
    return False


def shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
