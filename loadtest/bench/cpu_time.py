"""CPU time that the processes of a server on this machine, and this one, spend on something.

Times of the kernel's accounting (10 ms steps), so measure seconds of work. Not here: what it is
divided by, and what it means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from loadtest.bench.process_watch import process_name

CLIENT = "this client"


def server_processes(address: str) -> list[psutil.Process]:
    """Of the server that listens on HOST:PORT here: Triton's parent and everything below it.

    Empty when it is on another machine or another user's.
    """
    port = int(address.rpartition(":")[2])
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_it and connection.pid:
                launcher = psutil.Process(connection.pid).parent()
                return [launcher, *launcher.children(recursive=True)] if launcher else []
    return []


class CpuTime:
    """Adds up what each process spends inside `measuring`."""

    def __init__(self, address: str) -> None:
        found = {process.pid: process for process in server_processes(address)}
        self._names = {pid: process_name(process) for pid, process in found.items()}
        self._processes = list(found.values())
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        before = self._times_s()
        yield
        for name, time_s in self._times_s().items():
            self.seconds[name] = self.seconds.get(name, 0.0) + time_s - before.get(name, time_s)

    def _times_s(self) -> dict[str, float]:
        times_s = {CLIENT: _cpu_s(psutil.Process())}
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times_s[self._names[process.pid]] = _cpu_s(process)
        return times_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
