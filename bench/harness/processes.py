"""Processes that a benchmark starts beside a server, and the observed processes of a server.

A directory, nodes, and scripts in another project's Python end with the stack or block that started
them. Memory, threads, descriptors and CPU time are read through psutil. CPU times have the kernel's
10 ms steps, so measure seconds of work.

Not here: judging growth and leaks (bench/leaks.py), Triton (loadtest/harness/server.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CLIENT = "this client"
ANSWER_S_MAX = 600.0
LAST_WORDS = 1_000  # shown characters of a log's end


class BenchStore:
    """A directory and storage nodes as processes, until the stack ends.

    RuntimeError, with its last output, when one ends before it is ready.
    """

    def __init__(self, stack: contextlib.ExitStack, *directory_options: str) -> None:
        self._stack = stack
        self.folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-"))
        )
        self.address = f"ipc://{self.folder}/directory"
        self.directory = ModuleProcess(
            stack,
            "mooncake_store.directory",
            f"--address={self.address}",
            f"--events=ipc://{self.folder}/events",
            *directory_options,
        )

    def node(self, node_id: str, segment_bytes: int, *options: str) -> None:
        ModuleProcess(
            self._stack,
            "mooncake_store.node",
            "--node-id",
            node_id,
            f"--directory={self.address}",
            f"--events=ipc://{self.folder}/events",
            "--die-with-parent",
            f"--segment-bytes={segment_bytes}",
            f"--segment-path=/dev/shm/mooncake-bench-{os.getpid()}-{node_id}",
            *options,
        )


class ModuleProcess:
    """`python -m MODULE`, which prints `ready` in its first line; ends with the stack."""

    def __init__(self, stack: contextlib.ExitStack, module: str, *arguments: str) -> None:
        """RuntimeError, with its last output, when it ends before it is ready."""
        log = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")), "log"
        )
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        stack.enter_context(self._process)
        stack.callback(self._process.terminate)
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith("ready"):
            self._process.wait()
            raise RuntimeError(
                f"{module} did not start: {log.read_text(encoding='utf-8')[-LAST_WORDS:]}"
            )

    @property
    def pid(self) -> int:
        return self._process.pid


class PeerProcess:
    """A script in a Python that has another project's wheel; it answers in lines of JSON.

    The script is passed as text, so neither this project nor the script's own folder is on the path
    there. It ends with the stack.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        python: Path,
        script: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-peer-"))
        self._name, self._log = script.stem, Path(folder) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-c", script.read_text("utf-8"), *arguments],
                cwd=folder,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | dict(variables or {}),
            )
        stack.enter_context(self._process)
        stack.callback(self._process.kill)

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next line of JSON; RuntimeError, with its last output, when none comes."""
        assert self._process.stdout is not None
        deadline = threading.Timer(ANSWER_S_MAX, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            deadline.cancel()
        words = self._log.read_text()[-LAST_WORDS:]
        raise RuntimeError(f"{self._name} does not run here: {words}")


@dataclass(frozen=True, slots=True)
class Look:
    time_s: float  # of time.perf_counter
    rss_bytes: int
    threads: int
    descriptors: int

    @property
    def rss_mib(self) -> float:
        return self.rss_bytes / 2**20


Looks = Mapping[tuple[str, int], Sequence[Look]]  # by name and process id


def process_name(process: psutil.Process) -> str:
    """A readable name: the Triton model of a stub, the owner of a Triton, our module, or the
    program."""
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
        return "launcher" if module == "backends.cli" else module.partition(".")[2] or module
    return arguments[0].rpartition("/")[2] if arguments else process.name()


def process_tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


class ProcessWatch:
    """Samples `pid` and its descendants until stopped; keyed by (name, process id)."""

    def __init__(self, pid: int, period_s: float = 1.0) -> None:
        self.looks: dict[tuple[str, int], list[Look]] = {}
        self._pid, self._period_s = pid, period_s
        self._names: dict[int, str] = {}
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def look(self) -> None:
        for process in process_tree(self._pid):
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


def server_processes(address: str) -> list[psutil.Process]:
    """Processes of the server that listens on HOST:PORT here: Triton's parent and its descendants.

    Empty when the server is on another machine or belongs to another user.
    """
    port = int(address.rpartition(":")[2])
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_it and connection.pid:
                launcher = psutil.Process(connection.pid).parent()
                return process_tree(launcher.pid) if launcher else []
    return []


class CpuTime:
    """CPU seconds of each process of a server, and of this client, inside `measuring`."""

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
        times_s = {CLIENT: cpu_s(psutil.Process())}
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times_s[self._names[process.pid]] = cpu_s(process)
        return times_s


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
