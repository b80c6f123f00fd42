"""One host of a fleet: the processes in its namespace, found by kind, killed and frozen.

`HostProcesses` covers all processes in the namespace, whatever started them. `FleetHost` starts
`mooncake serve --cluster FILE --host NAME` there.

Kinds: `prefill` and `decode` (processes of models, children of their Tritons), `triton` (a worker's
tritonserver), `frontend` (the tritonserver that clients call), `conductor`, `node`, `directory`,
`etcd`, `launcher`. A name of a model or a node, like prefill_a_0 or a0, selects one.

Not here: the network (namespaces.py, faults.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.harness.fleet.namespaces import Namespaces
from bench.harness.processes import process_name
from loadtest.harness.server import LOG_LINES_SHOWN, POLL_S, PROJECT, STOP_S_MAX, ServerFailed
from mooncake_store.process.child_processes import DIE_WITH_PARENT

READY_S_MAX = 300.0
END_S_MAX = 10.0
SEEN_S_MAX = 2.0
KINDS = (
    "prefill",
    "decode",
    "triton",
    "frontend",
    "conductor",
    "node",
    "directory",
    "etcd",
    "launcher",
)


def kind_of(name: str) -> str:
    """The kind of a process with this name in bench.harness.processes; "" without one."""
    if name == "triton frontend":
        return "frontend"
    first = name.partition(" ")[0]
    if first in ("triton", "node"):
        return first
    role = name.partition("_")[0]
    if role in ("prefill", "decode") and role != name:
        return role
    return name if name in KINDS else ""


class FrozenProcesses:
    """Processes stopped until `go_on`, or the end of the block."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.processes = list(processes)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                _await_stopped(process)

    def go_on(self) -> None:
        """Continue the processes. A second call is harmless, and so are ended processes."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil compares more than the id
                process.resume()

    def __enter__(self) -> FrozenProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()


def _await_stopped(process: psutil.Process) -> None:
    give_up_s = time.monotonic() + SEEN_S_MAX
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < give_up_s:
        time.sleep(0.005)


class HostProcesses:
    def __init__(self, namespaces: Namespaces, host: str) -> None:
        self.namespaces, self.host = namespaces, host

    @property
    def address(self) -> str:
        return self.namespaces.address(self.host)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Live processes of a kind or name, ordered by id."""
        found = []
        for name, process in self.named():
            if kind in (kind_of(name), name, name.removeprefix("node ")):
                found.append(process)
        return found

    def named(self) -> list[tuple[str, psutil.Process]]:
        """Every process of the host with its readable name."""
        found = []
        for pid in sorted(self.namespaces.pids(self.host)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                arguments = process.cmdline()
                is_becoming_another = "-c" in arguments  # see DIE_WITH_PARENT
                found.append(("" if is_becoming_another else process_name(process), process))
        return found

    def kill(self, kind: str) -> list[int]:
        """kill -9 of all processes of that kind; returns their ids when they have ended."""
        killed = self.processes(kind)
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._await_gone([process.pid for process in killed])
        return [process.pid for process in killed]

    def freeze(self, kind: str) -> FrozenProcesses:
        """SIGSTOP to all processes of that kind; the host's other processes continue."""
        return FrozenProcesses(self.processes(kind))

    def kill_all(self) -> None:
        """Kill every process on the host at once, like a power failure."""
        give_up_s = time.monotonic() + END_S_MAX
        while pids := self.namespaces.pids(self.host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if time.monotonic() > give_up_s:
                raise ServerFailed(f"processes of {self.host} do not die: {pids}")
            time.sleep(0.01)

    def _await_gone(self, pids: Sequence[int]) -> None:
        give_up_s = time.monotonic() + END_S_MAX
        # A dying process leaves its namespace before it has ended.
        while any(map(_is_running, pids)) and time.monotonic() < give_up_s:
            self._reap()
            time.sleep(0.01)

    def _reap(self) -> None:
        """Reap children of this process; a launcher reaps its own."""


def _is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class FleetHost(HostProcesses):
    """`mooncake serve --cluster FILE --host NAME` in the host's namespace.

    Start it from a thread that outlives it (the main one): the kernel ends it with that thread.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        host: str,
        cluster_file: Path,
        log_path: Path,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(namespaces, host)
        self.log_path = log_path
        self._command = [
            sys.executable,
            "-m",
            "backends.cli",
            "serve",
            f"--cluster={cluster_file.resolve()}",
            f"--host={host}",
            *options,
        ]
        self.launcher_pids: list[int] = []  # one for each start
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # start of this incarnation's part of the log

    def start(self) -> None:
        """Start without waiting; `wait_ready` waits."""
        assert not self.is_running, f"{self.host} runs already"
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = self.namespaces.command(self.host, self._command)
        guard = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *command],
                cwd=PROJECT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.launcher_pids.append(self._process.pid)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it has reported ready; processes that died since are found by kind."""
        return "ready after" in self._log()

    def wait_ready(self, ready_s_max: float = READY_S_MAX) -> None:
        """ServerFailed, with its last lines, when it ends or takes longer."""
        give_up_s = time.monotonic() + ready_s_max
        while not self.is_ready:
            if not self.is_running or time.monotonic() > give_up_s:
                what = "is not ready" if self.is_running else "ended"
                raise ServerFailed(f"host {self.host} {what}\n{self.tail()}")
            time.sleep(POLL_S)

    def interrupt(self) -> None:
        """Interrupt the launcher and continue stopped processes; returns at once."""
        for _, process in self.named():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        if self._process is not None and self.is_running:
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> int:
        """Stop in order; returns the exit status. After STOP_S_MAX all remaining processes are
        killed."""
        if self._process is None:
            return 0
        self.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S_MAX)
        self.kill_all()
        return self._process.wait()

    def tail(self) -> str:
        return "\n".join(self._log().splitlines()[-LOG_LINES_SHOWN:])

    def _log(self) -> str:
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def _reap(self) -> None:
        if self._process is not None:
            self._process.poll()
