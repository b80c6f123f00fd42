"""Memory, threads and file descriptors of every process of a server, once a second.

Pure reading of /proc through psutil; what is flat and what leaks is for leaks.py to say.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one moment."""

    time_s: float  # time.perf_counter
    rss_bytes: int
    threads: int
    descriptors: int


def process_name(process: psutil.Process) -> str:
    """What a person calls it: the Triton model of a stub, whose Triton it is, the module of ours,
    or the program."""
    arguments = process.cmdline()
    if arguments and arguments[0].endswith("/tritonserver"):
        return f"triton {arguments[1].rpartition('/')[2]}"  # --model-repository=.../decode_0
    for argument in arguments:
        if argument.endswith("/model.py"):
            return argument.split("/")[-3]  # .../prefill_0/1/model.py
    if "-m" in arguments:
        module = arguments[arguments.index("-m") + 1]
        if "--node-id" in arguments:
            return f"node {arguments[arguments.index('--node-id') + 1]}"
        return "launcher" if module == "backends.cli" else module.rpartition(".")[2]
    return arguments[0].rpartition("/")[2] if arguments else process.name()


class ProcessWatch:
    """Looks at `pid` and everything below it until stopped; keyed by (name, process id)."""

    def __init__(self, pid: int, period_s: float = 1.0) -> None:
        self.looks: dict[tuple[str, int], list[Look]] = {}
        self._root = psutil.Process(pid)
        self._period_s = period_s
        self._names: dict[int, str] = {}
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def look(self) -> None:
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                if process.pid not in self._names:
                    self._names[process.pid] = process_name(process)
                look = Look(
                    time.perf_counter(),
                    process.memory_info().rss,
                    process.num_threads(),
                    process.num_fds(),
                )
            except psutil.NoSuchProcess:
                continue
            self.looks.setdefault((self._names[process.pid], process.pid), []).append(look)

    def _run(self) -> None:
        while not self._is_stopping.wait(self._period_s):
            self.look()
