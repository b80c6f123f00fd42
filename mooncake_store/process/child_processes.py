"""Child processes that always end with their launcher, and the signals that stop the launcher.

The launcher is `mooncake serve` or `mooncake store serve`. Each child runs in its own session, so a
Ctrl-C in the terminal reaches only the launcher, which then stops its children in order. A child
writes to a log file. When the launcher dies, the kernel sends SIGTERM to the child.
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

from mooncake_store.process.bounded_log import LOG_BYTES_MAX, BoundedLog

RESTARTS_MAX, RESTARTS_WITHIN_S = 5, 60.0  # maximum number of restarts without a pause in 60 s
PAUSE_S_MAX = 60.0  # longest pause before a restart

# This program requests SIGTERM at the launcher's death (prctl 1 is PR_SET_PDEATHSIG), then executes
# the command. It is a separate program, because Python code between fork and exec (preexec_fn) may
# hang in a launcher with threads.
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class ChildDied(Exception):
    """A required process died or was not ready in time. The message has its last log lines."""


class RestartPolicy(Protocol):
    """Decides when a child that ended is started again."""

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        """Seconds until the next start; None: no further start. Called once for each end."""


@dataclass(slots=True)
class LimitedRestarts:
    """Restarts at once, at most RESTARTS_MAX times within RESTARTS_WITHIN_S. For a process that all
    other processes need."""

    _at_s: list[float] = field(default_factory=list)

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        recent = [each for each in self._at_s if now_s - each < RESTARTS_WITHIN_S]
        self._at_s = [*recent, now_s]
        return 0.0 if len(recent) < RESTARTS_MAX else None


@dataclass(slots=True)
class GrowingPauses:
    """Always restarts, at first without a pause. After RESTARTS_MAX lives in a row that are shorter
    than RESTARTS_WITHIN_S, the pauses are 2 s, 4 s and so on, up to PAUSE_S_MAX. For one of several
    similar processes, so that its failure does not end the others."""

    _short_lives: int = 0

    def pause_s(self, lived_s: float, now_s: float) -> float | None:
        self._short_lives = self._short_lives + 1 if lived_s < RESTARTS_WITHIN_S else 1
        over = self._short_lives - RESTARTS_MAX
        return min(2.0 ** min(over, 10), PAUSE_S_MAX) if over > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Command:
    arguments: list[str]  # the first is the program's path; it is not searched in PATH
    env: Mapping[str, str]  # the child's whole environment


class ChildProcess:
    """One child process in its own session that writes its output to a file."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Command],
        log_path: Path,
        cwd: Path,
        policy: RestartPolicy | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """Start the process. `command` is called at each start, because ports may change."""
        self.name = name
        self.log_path = log_path
        self._log = BoundedLog(log_path, log_bytes_max)
        self._command, self._cwd = command, cwd
        self._policy = policy or LimitedRestarts()
        self._due_s: float | None = None  # monotonic time of the next start; None: the child runs
        self.starts = 0  # number of starts so far
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = self._command()
        arguments = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        self._started_s = time.monotonic()
        self.starts += 1
        with self._log.open_to_append() as log:
            return subprocess.Popen(
                [*arguments, *command.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._cwd,
                env=dict(command.env),
                start_new_session=True,
            )

    def supervise(self) -> float | None:
        """Restart an ended child when the policy's pause is over. The first call after each end
        returns the pause in seconds; all other calls return None. ChildDied: no more restarts."""
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
        """Shorten a log that is too long; returns the number of bytes removed from its front."""
        return self._log.shorten()

    def start_again(self) -> None:
        """Kill and restart the child at once. The restart policy does not count this."""
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
        """True if a signal ended the process."""
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
        """Wait until a line of the log begins with `text`. Raises ChildDied if the child ends, or
        after `deadline_s` seconds."""
        give_up_s = time.monotonic() + deadline_s
        while f"\n{text}" not in "\n" + self.log_path.read_text(errors="replace"):
            self.check_alive()
            if time.monotonic() > give_up_s:
                raise ChildDied(
                    f"{self.name} was not ready after {deadline_s:.0f} s, see "
                    f"{self.log_path}:\n{self.last_lines(15)}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the process group and wait; a later `supervise` starts the child again."""
        self._kill_group()
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self._process.terminate()

    def finish(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds for the child's end; True if it ended in time. Then kill
        its process group, because a crashed Triton leaves its stub processes."""
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
    """The launcher received a signal to stop."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """Ignore the stop signals, so that they do not interrupt the clean-up."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Stopped; later ones are ignored."""

    def stop(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
