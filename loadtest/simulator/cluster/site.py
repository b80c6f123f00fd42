"""What the nodes of a simulated cluster share: its shape, clock, store, network, GPU and cores.

The settings give the reason for each number; one set serves every experiment. Workers that share
the cores of one machine slow each other down: on a machine with a GPU for each worker all factors
are 1 and nothing happens. On a small one a step takes longer by what each other worker that
computes meanwhile costs it, which `mooncake profile` measures for every pair of roles; and where it
is known how many workers the cores compute at once, never less than an even share of them. A
change acts from the next decode step on, and a prefill step keeps the factor with which it began.
A hand-over takes longer for each worker that computes meanwhile.

Not here: what the conductor is told (ConductorConfig), how long a step takes alone (gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.engine.batching.pages import PagePool
from loadtest.profile.profile import Sharing
from loadtest.replay.trace import TRACE_BLOCK_TOKENS
from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.gpu import GpuModel, MeasuredWorker, Roofline
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.ssd import DiskRates, SimulatedSsds
from loadtest.simulator.cluster.steps import Jitter
from loadtest.simulator.cluster.store import INCARNATION, SimulatedStore

NOBODY_BESIDE = Sharing()


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    prefills: int = 8  # the paper does not say how its 16 nodes are split; its best is near 1:1
    decodes: int = 8
    # So many of the prefill nodes are groups of `pipeline_stages`, a share of the layers on each.
    pipeline_groups: int = 0
    pipeline_stages: int = 2
    pipeline_home_blocks: int = 0  # of the first node of a group; 0: node_blocks, as of any node
    seed: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    # 3 M tokens of KV in a node's DRAM (Fig 10): 3 M * 320 KiB = 983 GB, a host of 1 TB.
    node_blocks: int = 5_859
    eviction: str = "density"  # the directory's default
    # Blocks on a node's SSDs; 0: it has none. Two NVMe SSDs for data centres, of 3.84 to 7.68 TB:
    # each reads 6.5 and writes 3.5 GB/s by its data sheet, here 6 and 3.
    ssd_blocks: int = 0
    ssd_read_bytes_per_s: float = 12e9
    ssd_write_bytes_per_s: float = 6e9
    ssd_latency_s: float = 0.0001
    # A prefill step. The paper: prefill_chunk is "larger than 1,000 tokens".
    chunk_tokens: int = 2_048
    waiting_max: int = 100_000  # prompts in a prefill queue: the conductor rejects, not the worker
    decode_slots: int = 256  # vLLM's max_num_seqs
    max_tokens: int = 2_000  # what clients ask for; the longest answer of the conversation trace
    nic_bytes_per_s: float = 100e9  # 800 Gb/s
    nic_latency_s: float = 0.001
    host_to_gpu_bytes_per_s: float = 128e9  # B_h2d of the paper
    report_s: float = 1.0  # between a worker's reports
    frontends: int = 1  # requests come to them in turns; each has its own conductor
    # From a frontend to the directory and to the others, beside what notes wait to be sent
    # together; None: they tell each other nothing.
    notes_latency_s: float | None = 0.005
    tick_s: float = 0.5  # between ticks of the conductor, as the frontend does
    sharing: Sharing = NOBODY_BESIDE  # how much slower a step is beside others on the same cores
    workers_at_once: float = 0.0  # that the machine's cores compute; 0: it is not known
    # What the ways of a request add: through the frontend to prefill, and from prefill to decode,
    # the latter more for each worker that computes meanwhile. On GPUs the network is all of it.
    serving_s: float = 0.0
    handover_s: float = 0.0
    handover_beside_s: float = 0.0
    # Of each prompt while others wait, on top of its steps: what frontend, store and client do for
    # it, on the same cores, so with each further prefill worker it takes as much longer.
    queued_prompt_s: float = 0.0
    jitter: float = 0.05  # each step takes up to so much more or less than the model says
    steps_at_once: int = 0  # most decode steps taken together; 0: as many as are alike
    worker: MeasuredWorker | None = None  # instead of the roofline of a node (profiled.py)
    attempts_max: int = 3  # attempts of a request whose worker was lost

    def gpu(self) -> GpuModel:
        """What every worker computes on."""
        return self.worker.gpu() if self.worker else Roofline()

    @property
    def disk_rates(self) -> DiskRates:
        return DiskRates(self.ssd_read_bytes_per_s, self.ssd_write_bytes_per_s, self.ssd_latency_s)

    def __post_init__(self) -> None:
        assert self.chunk_tokens % self.block_tokens == 0, "a chunk would end inside a block"
        assert min(self.prefills, self.decodes, self.node_blocks) > 0 <= self.ssd_blocks
        assert 0 <= self.jitter < 1
        assert 0 <= self.pipeline_groups * self.pipeline_stages <= self.prefills
        assert self.pipeline_stages > 1, "a group of one stage is a worker alone"


class Cores:
    """Who computes now. All workers of the cluster are on this one machine."""

    def __init__(self, sharing: Sharing = NOBODY_BESIDE, at_once: float = 0.0) -> None:
        """`at_once`: workers that the cores compute; 0: not known."""
        self._at_once = at_once
        # (a step of this role, beside a worker of this one) -> how much longer it takes
        self._costs = {
            ("prefill", "prefill"): sharing.second_prefill - 1.0,
            ("prefill", "decode"): sharing.prefill - 1.0,
            ("decode", "prefill"): sharing.decode - 1.0,
            ("decode", "decode"): sharing.second_decode - 1.0,
        }
        assert min(self._costs.values()) >= 0.0, "nobody gets faster by sharing"
        self._computing = {"prefill": 0, "decode": 0}
        # Called when decode steps get slower or quicker.
        self.on_pace: list[Callable[[], None]] = []

    def computing(self, *roles: str) -> int:
        """Workers of these roles that compute now."""
        return sum(self._computing[role] for role in roles)

    def prefill_factor(self) -> float:
        """Of a prefill step that begins now."""
        return self._factor("prefill")

    def decode_factor(self) -> float:
        """Of the decode steps from now on."""
        return self._factor("decode")

    def _factor(self, role: str) -> float:
        """Who asks is one of those that compute."""
        others = {**self._computing, role: max(0, self._computing[role] - 1)}
        slower = 1.0 + sum(self._costs[role, other] * others[other] for other in others)
        share = (1 + sum(others.values())) / self._at_once if self._at_once else 0.0
        return max(slower, share)

    def compute(self, role: str, is_computing: bool) -> None:
        """A worker of this role begins (or ends) to compute; only called at a change."""
        before = self.decode_factor()
        self._computing[role] += 1 if is_computing else -1
        assert self._computing[role] >= 0, f"more {role} workers ended than began"
        if self.decode_factor() != before:
            for changed in self.on_pace:
                changed()


@dataclass(frozen=True, slots=True)
class SimulatedSite:
    clock: VirtualClock
    store: SimulatedStore
    network: Network
    gpu: GpuModel
    settings: ClusterSettings
    cores: Cores
    ssds: SimulatedSsds

    @property
    def block_bytes(self) -> int:
        return self.settings.block_tokens * self.gpu.token_bytes

    @property
    def pages_max(self) -> int:
        """Blocks of KV that a GPU has memory for."""
        return self.gpu.pages_bytes // self.block_bytes


class CountedPages(PagePool):
    """Pages without memory: nothing depends on which ones a request has, so a thousand are taken as
    one range. No number is given out twice, so no two requests have the same page."""

    def __init__(self, pages_max: int) -> None:
        assert pages_max > 0, pages_max
        self.pages_max = pages_max
        self._taken: dict[int, int] = {}  # the first of what was taken together -> how many
        self._next = self._used = 0

    @property
    def free_pages(self) -> int:
        return self.pages_max - self._used

    @property
    def used_pages(self) -> int:
        return self._used

    def take(self, pages: int) -> Sequence[int] | None:  # type: ignore[override]
        assert pages > 0, pages
        if pages > self.free_pages:
            return None
        first, self._next = self._next, self._next + pages
        self._taken[first] = pages
        self._used += pages
        return range(first, self._next)

    def release(self, pages: Sequence[int]) -> None:
        if not pages:  # of a request that left before it had any
            return
        assert self._taken.pop(pages[0], 0) == len(pages), "released twice, or not as taken"
        self._used -= len(pages)

    def check(self) -> None:
        assert self._used == sum(self._taken.values()) <= self.pages_max, "a page is lost"


class SimulatedWorker:
    """What a prefill and a decode worker have in common: one process on one node, in one role."""

    def __init__(self, worker_id: str, node_id: str, site: SimulatedSite, jitter: Jitter) -> None:
        self.worker_id, self.node_id = worker_id, node_id
        self.incarnation = INCARNATION  # another one after each change of role
        self.is_draining = False  # it finishes what it has and will take the other role
        self.slowness = 1.0  # 2.0: every step takes twice as long (Fault)
        self.busy_s = 0.0
        self.is_dead = False
        self._site, self._jitter = site, jitter
        self._pool = CountedPages(site.pages_max)
