"""`python -m tests.chaos --seconds 300 --seed 1`: see the package's docstring.

Not here: anything but the frame.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.monkey import Monkey
from tests.chaos.site import ChaosSite
from tests.chaos.verdict import judge

LAST = ("s0", "s1", "s2", "directory")  # nodes deregister, so they end before the directory


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"mooncake-chaos-{os.getpid()}-*")}


def run(seconds: float, seed: int) -> tuple[Counter[str], Counter[str]]:
    """(what the monkey did, what the clients counted). AssertionError: a promise was broken."""
    before = descriptors()
    with tempfile.TemporaryDirectory(prefix="mooncake-chaos-") as name:
        site = ChaosSite(Path(name), seed, seconds)
        monkey = Monkey(site, seed)
        try:
            monkey.run(seconds)
            counts = judge(site, monkey.stops)
            site.directory.close()
            for last in LAST:
                status = site.members[last].end()
                tail = site.members[last].tail()
                assert status == 0, f"{last} ended with {status}:\n{tail}"
            assert not shared_memory(), f"left in /dev/shm: {shared_memory()}"
        finally:
            site.directory.close()
            site.kill_all()
    assert descriptors() <= before, f"{descriptors()} descriptors, {before} at the start"
    return monkey.done, counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=300.0, help="of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="(random)")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.seconds:g} s", flush=True)
    started_s = time.monotonic()
    done, counts = run(options.seconds, options.seed)
    print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    print("clients: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"every promise was kept; {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
