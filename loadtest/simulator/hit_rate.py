"""How many block references does a cache of a given size find, under each policy of eviction?

Only the order of the requests counts: no clock, no GPU, one global cache. The traces have blocks of
512 tokens, so 5,859 blocks are the 3 M tokens of the paper's Figure 9.

Targets: an unlimited cache finds 36.6 % of the references of the conversation trace and 64.0 % of
the synthetic one. LRU with 3 M tokens finds 48 % of that on the synthetic trace. The better policy
gains half a point over LRU at three of four sizes on each trace, and never loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.harness.result import Target
from loadtest.simulator.block_cache import BlockCache, DirectoryCache, Hits, best_hits, key_of, play
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions, SimulationRefused
from mooncake_store.directory.core.eviction import POLICIES

TRACES = ("conversation", "synthetic")
SIZES = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
PAPER_BLOCKS = 5_859  # 3 M tokens
PLAIN, BETTER, OPTIMUM = "lru", "density", "optimum"
UNLIMITED_PERCENT = {"conversation": 36.6, "synthetic": 64.0}
ROUNDING_POINTS = 0.05
LRU_OF_UNLIMITED = {"conversation": 37.0, "synthetic": 48.0}  # percent, with PAPER_BLOCKS
GAIN_SIZES = (1_000, 5_859, 10_000, 30_000)
GAIN_POINTS, GAINS_MIN = 0.5, 3

Requests = Sequence[Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class HitRateRun:
    trace: str
    blocks: int | None  # None: unlimited
    policy: str
    result: Hits


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    if options.changes:
        raise SimulationRefused("--set: no conductor decides in hit-rate; leave it out")
    loaded = {name: requests_of(options, name) for name in options.traces or TRACES}
    policies = options.one_of(options.policies, POLICIES, "policy")
    sizes = sorted(set(options.blocks or SIZES))
    longest = max(len(keys) for requests in loaded.values() for keys in requests)
    if sizes[0] < longest:
        raise SimulationRefused(f"--blocks {sizes[0]}: a request needs {longest} at once")
    runs: list[HitRateRun] = []
    for name, requests in loaded.items():
        done = begin(name, steps(policies, sizes))
        runs += runs_of(name, requests, policies, sizes, options.is_directory, done)
    return rows_of(runs), targets_of(runs)


def requests_of(options: SimulationOptions, trace: str) -> list[list[bytes]]:
    return [[key_of(block) for block in row.hash_ids] for row in options.rows(trace)]


def steps(policies: Sequence[str], sizes: Sequence[int]) -> int:
    return len(sizes) * (len(policies) + 1) + 1


def runs_of(
    trace: str,
    requests: Requests,
    policies: Sequence[str],
    sizes: Sequence[int],
    is_directory: bool,
    done: Callable[[], None],
) -> list[HitRateRun]:
    """Every policy and the optimum at every size, then an unlimited cache."""
    maker = DirectoryCache if is_directory else BlockCache
    runs = []
    for blocks in sizes:
        for policy in policies:
            cache = maker(blocks, policy)
            runs.append(HitRateRun(trace, blocks, policy, play(cache, requests)))
            cache.check()
            done()
        runs.append(HitRateRun(trace, blocks, OPTIMUM, best_hits(requests, blocks)))
        done()
    distinct = len({key for keys in requests for key in keys})
    runs.append(HitRateRun(trace, None, PLAIN, play(BlockCache(distinct, PLAIN), requests)))
    done()
    return runs


def rows_of(runs: Sequence[HitRateRun]) -> Rows:
    """The hits of every run, and the share of the possible gain over LRU that it reached."""
    percent = {(run.trace, run.blocks, run.policy): run.result.percent for run in runs}
    rows: Rows = []
    for run in runs:
        here = run.result.percent
        plain = percent.get((run.trace, run.blocks, PLAIN))
        best = percent.get((run.trace, run.blocks, OPTIMUM))
        gain = None if plain is None else here - plain
        room = None if plain is None or best is None else best - plain
        rows.append(
            {
                "trace": run.trace,
                "blocks": run.blocks,
                "policy": run.policy,
                "references": run.result.references,
                "hits": run.result.hits,
                "hit_percent": round(here, 3),
                "percent_of_unlimited": round(100 * here / percent[run.trace, None, PLAIN], 2),
                "gain_points": None if gain is None else round(gain, 3),
                "percent_of_possible_gain": round(100 * gain / room, 1)
                if room and gain is not None
                else None,
                "behind_holes": run.result.behind_holes,
            }
        )
    return rows


def targets_of(runs: Sequence[HitRateRun]) -> list[Target]:
    percent = {(run.trace, run.blocks, run.policy): run.result.percent for run in runs}
    targets = []
    for trace in dict.fromkeys(run.trace for run in runs):
        if trace not in UNLIMITED_PERCENT:
            continue
        unlimited = percent[trace, None, PLAIN]
        said = UNLIMITED_PERCENT[trace]
        targets.append(
            Target(
                f"unlimited_{trace}_points_from_{said}",
                round(abs(unlimited - said), 4),
                "<=",
                ROUNDING_POINTS,
                f"{unlimited:.2f} % of the block references",
            )
        )
        plain = percent.get((trace, PAPER_BLOCKS, PLAIN))
        share = None if plain is None else round(100 * plain / unlimited, 3)
        targets.append(
            Target(
                f"lru_{PAPER_BLOCKS}_{trace}_percent_of_unlimited",
                share,
                ">=",
                LRU_OF_UNLIMITED[trace],
                f"{PAPER_BLOCKS} blocks were not run" * (share is None),
            )
        )
        targets += _gains(trace, percent)
    return targets


def _gains(trace: str, percent: dict[tuple[str, int | None, str], float]) -> list[Target]:
    """BETTER against PLAIN; without values when one of the sizes was not run."""
    both = {
        blocks: percent[trace, blocks, BETTER] - percent[trace, blocks, PLAIN]
        for of, blocks, policy in percent
        if of == trace and policy == BETTER and (trace, blocks, PLAIN) in percent
        if blocks is not None
    }
    counted = sorted((both[blocks] for blocks in GAIN_SIZES if blocks in both), reverse=True)
    is_whole = len(counted) == len(GAIN_SIZES)
    why = "" if is_whole else f"needs {PLAIN} and {BETTER} at {GAIN_SIZES}"
    least = round(min(both.values()), 4) if is_whole else None
    third = round(counted[GAINS_MIN - 1], 4) if is_whole else None
    return [
        Target(f"{BETTER}_gain_points_{trace}_third_best_of_four", third, ">=", GAIN_POINTS, why),
        Target(f"{BETTER}_gain_points_{trace}_least", least, ">=", 0.0, why),
    ]
