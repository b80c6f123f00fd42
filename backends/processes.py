"""Child processes that end with us, whatever happens.

Each child gets its own session (so that a Ctrl-C in the terminal reaches only the launcher, which
then stops things in order), writes to a log file, and dies when the launcher dies, by the kernel's
parent-death signal. Not here: which processes and in which order (launch.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
RESTARTS_MAX, RESTARTS_WITHIN_S = 5, 60.0


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the launcher is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildDied(Exception):
    """A process that serving needs ended by itself; the message ends with its last lines."""


class Child:
    """One child process in its own session, with its output in a file."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, cwd: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command, self._cwd, self._env = list(command), cwd, dict(env)
        log_path.write_bytes(b"")
        self._restarted_s: list[float] = []
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self._cwd, env=self._env, start_new_session=True,
                preexec_fn=_die_with_parent,
            )  # fmt: skip

    def restart_if_dead(self) -> bool:
        """Start it again when it ended; ChildDied when it keeps ending."""
        if self._process.poll() is None:
            return False
        now_s = time.monotonic()
        recent = [each for each in self._restarted_s if now_s - each < RESTARTS_WITHIN_S]
        if len(recent) >= RESTARTS_MAX:
            self.check_alive()
        self._restarted_s = [*recent, now_s]
        self._kill_group()
        self._process = self._start()
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise ChildDied(
                f"{self.name} ended with status {self._process.returncode}. "
                f"The end of {self.log_path}:\n{self.last_lines(15)}"
            )

    def last_lines(self, lines: int) -> str:
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def wait_for_line(self, text: str, deadline_s: float) -> None:
        """Until the log has a line with `text`; ChildDied when it ended or took too long."""
        give_up_s = time.monotonic() + deadline_s
        while text not in self.log_path.read_text(errors="replace"):
            self.check_alive()
            if time.monotonic() > give_up_s:
                raise ChildDied(f"{self.name} was not ready after {deadline_s:.0f} s, see "
                                f"{self.log_path}:\n{self.last_lines(15)}")  # fmt: skip
            time.sleep(0.02)

    def kill(self) -> None:
        """End it and its process group now; `restart_if_dead` may start it again."""
        self._kill_group()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); returns at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

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
