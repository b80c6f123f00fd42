"""The processes of a running server, of which any may end while they are looked at."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.e2e.server import Server

STUB = "triton_python_backend_stub"


def processes(server: Server) -> dict[psutil.Process, list[str]]:
    """Those below the launcher that live, with their arguments."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = process.cmdline()
    return found


def processes_of(server: Server, words: str) -> list[psutil.Process]:
    """Those that have these words in their command line."""
    return [each for each, arguments in processes(server).items() if words in " ".join(arguments)]


def process_of(server: Server, words: str) -> psutil.Process:
    """The first of them; AssertionError when there is none."""
    found = processes_of(server, words)
    assert found, f"no process has {words!r} in its command line"
    return found[0]


def stubs_of(server: Server) -> dict[str, psutil.Process]:
    """The process of each model, by the model's name."""
    return {
        Path(arguments[1]).parents[1].name: process
        for process, arguments in processes(server).items()
        if len(arguments) > 1 and STUB in arguments[0]
    }


def stub_of(server: Server, model: str) -> psutil.Process:
    """AssertionError while it has none."""
    return process_of(server, f"/{model}/1/model.py")


def triton_of(server: Server, name: str) -> psutil.Process:
    """The tritonserver of the frontend or of one worker."""
    for process, arguments in processes(server).items():
        if any(part.endswith(f"/{name}") for part in arguments if "=" in part):
            return process
    raise AssertionError(f"{name} has no Triton")
