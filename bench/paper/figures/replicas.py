"""How many copies do hot blocks get, and when? FAST'25, Figure 11.

The conversation trace runs at recorded speed on 8 + 8 nodes. Under `cache_aware` nothing is
fetched, so a block is on another node only if that node computed it too. Under `kvcache_centric` a
request that goes to a less loaded node brings the prefix there. Copies on prefill nodes are counted
every few minutes, for the blocks that rank 1st, 10th, ... by the number of requests with them.

Targets: the 100 hottest blocks have more copies on average under `kvcache_centric`, and the hottest
is on all 8 prefill nodes in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.paper import constants
from bench.paper.experiments.scheduling import config_for
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all
from mooncake_store.records.events import BlockAdded, BlockRemoved, Event

TRACE = "conversation"
POLICIES = ("cache_aware", "kvcache_centric")
RANKS = (1, 10, 100, 1_000, 10_000)
HOTTEST = 100
EVERY_S = 300.0
STRICTLY_MORE = 1.0001


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    policy: str
    at_s: float
    of_rank: tuple[int, ...]  # as RANKS
    hottest_mean: float  # of the HOTTEST


class WatchedFleet(SimulatedFleet):
    """Counts the copies of some blocks on prefill nodes, from the directory's events."""

    def __init__(
        self, policy: str, config: ConductorConfig, shape: ClusterSettings, ranked: Sequence[bytes]
    ) -> None:
        self.copies = dict.fromkeys(ranked, 0)
        self.counts: list[ReplicaCount] = []
        self._policy, self._ranked = policy, ranked
        self._nodes = {f"s{number}" for number in range(shape.prefills)}
        super().__init__(config, shape, shape.gpu())
        self.reported = lambda fleet: self._count()

    def _on_events(self, events: Sequence[Event]) -> None:
        super()._on_events(events)
        for event in events:
            if isinstance(event, BlockAdded | BlockRemoved) and event.key in self.copies:
                change = 1 if isinstance(event, BlockAdded) else -1
                self.copies[event.key] += change * (event.node_id in self._nodes)

    def _count(self) -> None:
        """At the first report of every EVERY_S."""
        if self.clock.now_s >= EVERY_S * (len(self.counts) + 1):
            self.count()

    def count(self) -> None:
        hottest = [self.copies[key] for key in self._ranked[:HOTTEST]]
        of_rank = tuple(
            self.copies[self._ranked[rank - 1]] if rank <= len(self._ranked) else 0
            for rank in RANKS
        )
        mean = sum(hottest) / max(1, len(hottest))
        self.counts.append(ReplicaCount(self._policy, self.clock.now_s, of_rank, mean))


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    policies = options.one_of(options.policies, POLICIES, "policy")
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)
    shape = options.settings()
    planned = []
    for policy in policies:
        # The figure leaves out copies that the conductor suggests.
        config = options.changed(replace(config_for(policy), replicate=False))
        planned.append(PlannedRun(policy, source, run, (policy, config, shape)))
    counts = [
        count for counts in run_all(planned, begin, options.jobs, options.kept) for count in counts
    ]
    return rows_of(counts), targets_of(counts, shape, why_not)


def run(
    offered: Sequence[Offered],
    policy: str,
    config: ConductorConfig,
    shape: ClusterSettings,
    on_over: Callable[[], None] = lambda: None,
) -> list[ReplicaCount]:
    fleet = WatchedFleet(policy, config, shape, hottest_first(offered))
    fleet.run(offered, constants.REPLAY_SPEED, on_over)
    fleet.count()
    return fleet.counts


def hottest_first(offered: Sequence[Offered]) -> list[bytes]:
    """Blocks by their number of requests; equal ones in order of appearance."""
    uses = Counter(key for one in offered for key in one.keys)
    return [key for key, _ in uses.most_common(max(RANKS))]


def rows_of(counts: Sequence[ReplicaCount]) -> Rows:
    return [
        {
            "policy": count.policy,
            "at_s": round(count.at_s, 1),
            **{
                f"copies_of_rank_{rank}": copies
                for rank, copies in zip(RANKS, count.of_rank, strict=True)
            },
            f"copies_mean_of_top_{HOTTEST}": round(count.hottest_mean, 3),
            "paper": "almost every prefill node" if count.policy == POLICIES[1] else None,
        }
        for count in counts
    ]


def targets_of(
    counts: Sequence[ReplicaCount], shape: ClusterSettings, why_not: str = ""
) -> list[Target]:
    last = {count.policy: count for count in counts if not why_not}
    local, ours = (last.get(policy) for policy in POLICIES)
    why = why_not or "this policy was not run"
    ratio = round(ours.hottest_mean / local.hottest_mean, 4) if local and ours else None
    everywhere = ours.of_rank[0] if ours else None
    return [
        Target(
            f"copies of the top {HOTTEST}, mean at the end, {POLICIES[1]} / {POLICIES[0]}",
            ratio,
            ">=",
            STRICTLY_MORE,
            "" if ratio is not None else why,
        ),
        Target(
            f"prefill nodes that have the hottest block under {POLICIES[1]}",
            everywhere,
            ">=",
            shape.prefills,
            "" if ours else why,
        ),
    ]
