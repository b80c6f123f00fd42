"""Notices that the process of a model died. Triton does not: it reports the model as ready.

Each model instance runs in a process of its own (Triton's Python stub), a child of tritonserver.
Not here: starting it again (triton_process.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

STUB = "triton_python_backend_stub"


class Stubs:
    """All processes of this host are looked at once for all Tritons, and strangers only once."""

    def __init__(self) -> None:
        self._strangers: set[str] = set()  # pids of processes that no Triton of ours has started

    def models_alive(self, triton_pids: Collection[int]) -> dict[int, set[str]]:
        """By tritonserver: the models that have a process."""
        found: dict[int, set[str]] = {pid: set() for pid in triton_pids}
        pids = set(filter(str.isdigit, os.listdir("/proc")))
        self._strangers &= pids  # a pid that was free in between may be anybody's
        for pid in pids - self._strangers:
            with contextlib.suppress(OSError):  # it ended while we look
                stat = Path(f"/proc/{pid}/stat").read_text()
                state, parent = stat.rpartition(") ")[2].split()[:2]
                if int(parent) not in found:
                    self._strangers.add(pid)
                elif state != "Z" and (arguments := _stub_arguments(pid)):
                    found[int(parent)].add(Path(arguments[1]).parents[1].name)
        return found


def end_orphans(launches: Collection[str]) -> None:
    """Ends processes of models that dead launches left: one whose Triton is killed while it loads
    may wait for it for ever. `launches` are the names that their shared memory begins with."""
    prefixes = tuple(f"{name}-" for name in launches)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if any(argument.startswith(prefixes) for argument in _stub_arguments(pid)):
                os.kill(int(pid), signal.SIGKILL)


def _stub_arguments(pid: str) -> list[str]:
    """[] for any other process."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    is_stub = len(arguments) > 1 and Path(arguments[0]).name == STUB
    return arguments if is_stub else []


class StubWatch:
    """Of one life of a Triton."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def died(self, expected: set[str], alive: set[str]) -> list[str]:
        """Models of `expected` that had a process and have none now; each is named once."""
        lost = sorted((self._seen & expected) - alive)
        self._seen = alive
        return lost
