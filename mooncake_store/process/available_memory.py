"""How much memory a process can still have without anything being swapped out or killed."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def memory_available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Of the machine, or of the container where that has less. OSError where Linux does not say."""
    lines = (proc / "meminfo").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if not found:
        raise OSError(f"{proc / 'meminfo'} does not say how much memory is available")
    return min([found[0] * 1024, *_left_in_container(cgroup)])


def _left_in_container(cgroup: Path) -> list[int]:
    """Nothing without a limit, or without a cgroup of version 2 around this process."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used_bytes = int((cgroup / "memory.current").read_text())
        counted = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return []
    if limit == "max":
        return []
    # Files that were read, weights for instance, count as used until somebody needs the room.
    cached_bytes = sum(
        int(line.split()[1]) for line in counted if line.startswith("inactive_file ")
    )
    return [max(0, int(limit) - used_bytes + cached_bytes)]
