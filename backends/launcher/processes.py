"""Child processes that end with us, whatever happens, and the signals that end us.

Each child gets its own session (so that a Ctrl-C in the terminal reaches only the launcher, which
then stops things in order), writes to a log file, and dies when the launcher dies, by the kernel's
parent-death signal. Not here: which processes and in which order (launch.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from backends.launcher.bounded_log import LOG_BYTES_MAX, BoundedLog

RESTARTS_MAX, RESTARTS_WITHIN_S = 5, 60.0
PAUSE_S_MAX = 60.0

# Becomes the command, after it asked the kernel for SIGTERM at the launcher's end (prctl 1 is
# PR_SET_PDEATHSIG). In a process of its own, because Python code between fork and exec
# (preexec_fn) may hang in a launcher that has threads.
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class ChildDied(Exception):
    """A process that serving needs ended by itself; the message ends with its last lines."""


class RestartPolicy(Protocol):
    """When a child that ended is started again."""

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        """Asked once for each end; None: never."""


@dataclass(slots=True)
class LimitedRestarts:
    """For what all others need: at once, but not for ever."""

    _at_s: list[float] = field(default_factory=list)

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        recent = [each for each in self._at_s if now_s - each < RESTARTS_WITHIN_S]
        self._at_s = [*recent, now_s]
        return 0.0 if len(recent) < RESTARTS_MAX else None


@dataclass(slots=True)
class GrowingPauses:
    """For one of several alike, which must not end the others: always, but less and less often."""

    _short_lives: int = 0

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        self._short_lives = self._short_lives + 1 if lived_s < RESTARTS_WITHIN_S else 1
        over = self._short_lives - RESTARTS_MAX
        return min(2.0 ** min(over, 10), PAUSE_S_MAX) if over > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Command:
    arguments: list[str]  # the first is the path of a program
    env: Mapping[str, str]


class ChildProcess:
    """One child process in its own session, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Command],
        log_path: Path,
        cwd: Path,
        policy: RestartPolicy | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """`command` is asked anew at each start: ports may have changed."""
        self.name = name
        self.log_path = log_path
        self._log = BoundedLog(log_path, log_bytes_max)
        self._command, self._cwd = command, cwd
        self._policy = policy or LimitedRestarts()
        self._due_s: float | None = None  # it ended and will be started again then
        self.starts = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = self._command()
        arguments = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            DIE_WITH_PARENT,
            str(os.getpid()),
            *command.arguments,
        ]
        self._started_s = time.monotonic()
        self.starts += 1
        with self._log.open_to_append() as log:
            return subprocess.Popen(
                arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._cwd,
                env=dict(command.env),
                start_new_session=True,
            )

    def supervise(self) -> float | None:
        """Start it again when it ended and its pause is over; ChildDied when it keeps ending.

        Returns once for each end, after how many seconds it is started again.
        """
        if self._process.poll() is None:
            return None
        now_s, pause_s = time.monotonic(), None
        if self._due_s is None:
            self._kill_group()
            pause_s = self._policy.pause_s(now_s - self._started_s, now_s)
            if pause_s is None:
                self.check_alive()
            self._due_s = now_s + (pause_s or 0.0)
        if now_s >= self._due_s:
            self._due_s = None
            self._process = self._start()
        return pause_s

    def bound_log(self) -> int:
        """Call it now and then: so many bytes have gone from the front of the log."""
        return self._log.shorten()

    def start_again(self) -> None:
        """At once, as if it had not been started before."""
        self.kill()
        self._process = self._start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_crashed(self) -> bool:
        """Did a signal end it?"""
        status = self._process.poll()
        return status is not None and status < 0

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise ChildDied(
                f"{self.name} ended with status {self._process.returncode}. "
                f"The end of {self.log_path}:\n{self.last_lines(15)}"
            )

    def last_lines(self, lines: int) -> str:
        return self._log.last_lines(lines)

    def wait_for_line(self, text: str, deadline_s: float) -> None:
        """Until the log has a line with `text`; ChildDied when it ended or took too long."""
        give_up_s = time.monotonic() + deadline_s
        while text not in self.log_path.read_text(errors="replace"):
            self.check_alive()
            if time.monotonic() > give_up_s:
                raise ChildDied(
                    f"{self.name} was not ready after {deadline_s:.0f} s, see "
                    f"{self.log_path}:\n{self.last_lines(15)}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """End it and its process group now; `supervise` may start it again."""
        self._kill_group()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); returns at once."""
        self._process.terminate()

    def finish(self, deadline_s: float) -> bool:
        """Wait for its end, then kill what is left of its process group; True if it ended itself.

        The group is the child's own (it leads a session), so this reaches the stubs of a Triton
        that crashed, and nothing else.
        """
        try:
            self._process.wait(timeout=max(deadline_s, 0.01))
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        self._kill_group()
        self._process.wait()
        return ended

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Stopped(Exception):
    """A signal asked the launcher to end."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """From here on nothing interrupts the clean-up."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once; later ones are ignored while stopping."""

    def stop(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
