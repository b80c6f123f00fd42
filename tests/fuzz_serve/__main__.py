"""Many seeds, in as many processes as asked for: `python -m tests.fuzz_serve` (make fuzz-serve).

A violation prints its seed, its step, the last events, the faults that it needs, and the command
that repeats it. `--seed S --trace` shows every event of one seed.

Not here: one seed (simulation.py).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.fuzz_serve import stage
from tests.fuzz_serve.faults import KINDS
from tests.fuzz_serve.simulation import Outcome, Simulation

SEEDS_AT_ONCE = 25  # in one task of a process
LAST_LINES = 40


def run_seeds(seeds: range, checks_all: bool) -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    gc.disable()  # a seed leaves cycles behind; they are collected between the seeds
    found = []
    with stage.on_stage():
        for seed in seeds:
            found.append(Simulation(seed, checks_all=checks_all).run())
            if seed % 10 == 0:
                gc.collect()
    return found


def shrink(outcome: Outcome) -> tuple[str, ...]:
    """The kinds of faults without which it does not fail any more."""
    needed = set(outcome.kinds)
    with stage.on_stage():
        for kind in outcome.kinds:
            without = frozenset(KINDS) - (needed - {kind})
            if Simulation(outcome.seed, without).run().problem:
                needed.discard(kind)
    return tuple(sorted(needed))


def show(outcome: Outcome) -> None:
    print(f"\nseed {outcome.seed}, step {outcome.steps}: {outcome.problem}")
    print("\n".join(outcome.lines[-LAST_LINES:]))
    needed = ", ".join(shrink(outcome)) or "no faults at all"
    print(f"faults were {', '.join(outcome.kinds) or 'none'}; it fails as well with: {needed}")
    print(f"repeat: python -m tests.fuzz_serve --seed {outcome.seed} --trace", flush=True)


def one_seed(seed: int, is_shown: bool, checks_all: bool) -> int:
    logging.disable(logging.CRITICAL)
    with stage.on_stage():
        simulation = Simulation(seed, checks_all=checks_all)
        simulation.world.is_shown = is_shown
        outcome = simulation.run()
    print(
        f"seed {seed}: {outcome.steps} steps, {len(outcome.ends)} requests, faults "
        f"{', '.join(outcome.kinds)}, digest {outcome.digest}"
    )
    if outcome.problem:
        print(outcome.problem)
    return 1 if outcome.problem else 0


def many_seeds(options: argparse.Namespace) -> int:
    last = options.first_seed + options.seeds
    print(f"seeds {options.first_seed} .. {last - 1}", flush=True)
    started_s, ends, failed = time.monotonic(), Counter[str](), list[int]()
    seen = Counter[str]()
    done = 0
    for outcome in outcomes(options, last):
        done += 1
        ends.update(outcome.ends)
        seen += outcome.seen
        if outcome.problem:
            failed.append(outcome.seed)
            if len(failed) <= options.shown_max:
                show(outcome)
        if done % 500 == 0:
            print(f"{done} seeds, {time.monotonic() - started_s:.0f} s", flush=True)
    print("answers: " + ", ".join(f"{name} {count}" for name, count in ends.most_common()))
    print("gone through: " + ", ".join(f"{name} {seen[name]}" for name in sorted(seen)))
    verdict = f"FAILED: seeds {sorted(failed)[:50]}" if failed else "no violation"
    print(f"{done} seeds, {verdict}; {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


def outcomes(options: argparse.Namespace, last: int) -> Iterator[Outcome]:
    starts = range(options.first_seed, last, SEEDS_AT_ONCE)
    tasks = [range(start, min(start + SEEDS_AT_ONCE, last)) for start in starts]
    if options.jobs == 1:
        for task in tasks:
            yield from run_seeds(task, options.steps)
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run_seeds, task, options.steps) for task in tasks]):
            yield from future.result()


def with_fixed_hashes() -> None:
    """Begin this process anew unless the order of sets of names is the same each time."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz_serve", *sys.argv[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_serve", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="of them (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every event")
    parser.add_argument("--steps", action="store_true", help="check everything after every step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (%(default)s)")
    parser.add_argument("--shown-max", type=int, default=5, help="violations shown (%(default)s)")
    options = parser.parse_args()
    if options.seed is not None:
        return one_seed(options.seed, options.trace, options.steps)
    return many_seeds(options)


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
