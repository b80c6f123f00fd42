"""Memory of processes of this host: PSS (proportional set size), read from /proc.

PSS counts a page that n processes map as 1/n in each. The sum over processes is the memory that
they hold together.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

PROC = Path("/proc")
PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


def pid_space() -> str:
    """Identifies the kernel and the PID namespace in which this process's PIDs are valid."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def pss_bytes(groups: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Group -> PSS of its processes and their descendants, without those of another group.

    A process that ends during the call counts as 0. Raises PermissionError for another user's
    process.
    """
    named = {pid: group for group, pids in groups.items() for pid in pids}
    parents: dict[int, int] = {}
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found = dict.fromkeys(groups, 0)
    for pid in parents:
        if group := group_of(pid, parents, named):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                match = PSS.search((PROC / str(pid) / "smaps_rollup").read_text())
                found[group] += int(match[1]) * 1024 if match else 0
    return found


def group_of(pid: int, parents: Mapping[int, int], named: Mapping[int, str]) -> str | None:
    """The group of the closest ancestor in `named`, or of `pid` itself; None if there is none."""
    while pid not in named:
        if pid not in parents:
            return None
        pid = parents[pid]
    return named[pid]
