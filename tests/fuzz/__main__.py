"""Many walks, in all processes that the machine allows: `python -m tests.fuzz` (make fuzz).

Each seed is one walk. A failing one prints what was broken and the command that repeats it.

Not here: the walk (walk.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.fuzz.walk import Walk


def walk(seed: int, steps: int) -> tuple[int, Counter[str], str]:
    """(seed, what was gone through, what failed)."""
    one = Walk(seed)
    try:
        one.run(steps)
        one.finish()
    except Exception:
        return seed, one.world.seen, traceback.format_exc()
    return seed, one.world.seen, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many walks (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="of them (%(default)s)")
    parser.add_argument("--steps", type=int, default=5_000, help="in each (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(%(default)s)")
    options = parser.parse_args()
    print(
        f"seeds {options.first_seed} .. {options.first_seed + options.seeds - 1}, "
        f"{options.steps} steps each, check() after every one",
        flush=True,
    )
    started_s, total, failed = time.monotonic(), Counter[str](), list[int]()
    with ProcessPoolExecutor(options.processes) as pool:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        futures = [pool.submit(walk, seed, options.steps) for seed in seeds]
        for done, future in enumerate(as_completed(futures), 1):
            seed, seen, failure = future.result()
            total += seen
            if failure:
                failed.append(seed)
                print(
                    f"{failure}repeat: python -m tests.fuzz --seeds 1 --first-seed {seed} "
                    f"--steps {options.steps}",
                    flush=True,
                )
            elif done % 10 == 0:
                print(f"{done} walks, {time.monotonic() - started_s:.0f} s", flush=True)
    print("gone through: " + ", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    verdict = f"FAILED: seeds {sorted(failed)}" if failed else "all walks kept every promise"
    print(f"{verdict}; {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
