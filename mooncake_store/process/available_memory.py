"""Memory that a process can still allocate without swapping or an out-of-memory kill."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def memory_available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Available bytes of the machine, or of the container if less. OSError: no /proc/meminfo."""
    lines = (proc / "meminfo").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if not found:
        raise OSError(f"{proc / 'meminfo'} has no line MemAvailable")
    return min([found[0] * 1024, *_left_in_container(cgroup)])


def _left_in_container(cgroup: Path) -> list[int]:
    """A list with the bytes below the container's limit; [] without a limit or cgroup v2."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used_bytes = int((cgroup / "memory.current").read_text())
        counted = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return []
    if limit == "max":
        return []
    # Linux frees cached files (weights, for instance) when a process needs the memory.
    cached_bytes = sum(
        int(line.split()[1]) for line in counted if line.startswith("inactive_file ")
    )
    return [max(0, int(limit) - used_bytes + cached_bytes)]
