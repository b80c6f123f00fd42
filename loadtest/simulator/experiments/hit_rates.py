"""The hit-rate experiment as `mooncake simulate` runs it: its traces, progress and picture.

Not here: what is counted (hit_rate.py, block_cache.py).
"""

from __future__ import annotations

import time

from loadtest.bench.result import Result
from loadtest.simulator import hit_rate, plot
from loadtest.simulator.asked import Asked, SimulationRefused, progress_bar
from loadtest.simulator.block_cache import key_of
from mooncake_store.directory.core.eviction import POLICIES

TRACES = ("conversation", "synthetic")


def answer(asked: Asked) -> Result:
    """Every policy at every size on every trace."""
    started_s = time.monotonic()
    if asked.changes:
        raise SimulationRefused("--set: no conductor decides in hit-rate; leave it out")
    loaded = {name: requests_of(asked, name) for name in asked.traces or TRACES}
    policies = asked.one_of(asked.policies, POLICIES, "policy")
    sizes = sorted(set(asked.blocks or hit_rate.SIZES))
    longest = max(len(keys) for requests in loaded.values() for keys in requests)
    if sizes[0] < longest:
        raise SimulationRefused(f"--blocks {sizes[0]}: a request needs {longest} at once")
    runs: list[hit_rate.Run] = []
    with progress_bar() as begin:
        for name, requests in loaded.items():
            done = begin(name, hit_rate.steps(policies, sizes))
            runs += hit_rate.runs_of(name, requests, policies, sizes, asked.is_directory, done)
    if asked.picture is not None:
        plot.save(asked.picture, runs)
    rows, targets = hit_rate.rows_of(runs), hit_rate.targets_of(runs)
    return Result("hit-rate", time.monotonic() - started_s, rows, targets)


def requests_of(asked: Asked, trace: str) -> list[list[bytes]]:
    """The keys of each request, in order of arrival."""
    return [[key_of(block) for block in row.hash_ids] for row in asked.rows(trace)]
