"""The processes of vLLM below a worker."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.e2e.server import Server
from tests.e2e.server_processes import stub_of


def engine_processes(server: Server, model: str) -> list[psutil.Process]:
    """vLLM's processes of this worker: that of AsyncLLM first."""
    return stub_of(server, model).children(recursive=True)


def engine_core(process: psutil.Process) -> psutil.Process:
    """It computes too; the other child is Python's resource tracker."""
    return max(process.children(), key=lambda each: each.memory_info().rss)


def alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


def segments(processes: list[psutil.Process]) -> list[Path]:
    """Shared memory of Python that these processes have mapped."""
    found = set()
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if (path := line.rpartition(" ")[2]).startswith("/dev/shm/psm_"):
                found.add(Path(path))
    return sorted(found)
