"""The shared parts of a simulated cluster: shape, clock, store, network, GPU and cores.

Each setting states the reason for its number; one set serves every experiment. Workers that share
the cores of one machine slow each other down. With a GPU for each worker all factors are 1. On a
small machine each other computing worker lengthens a step by a cost that `mooncake profile`
measures for every pair of roles. If the number of workers that the cores compute at once is known,
a step takes at least its even share of the cores. A change acts from the next decode step on; a
prefill step keeps the factor with which it began. Each computing worker lengthens a hand-over, too.

Not here: the conductor's settings (ConductorConfig), the time of a step alone (gpu.py).
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
    prefills: int = 8  # The paper does not give the split of its 16 nodes; its best is near 1:1.
    decodes: int = 8
    # This many of the prefill nodes are groups of `pipeline_stages`, with a share of the layers on
    # each.
    pipeline_groups: int = 0
    pipeline_stages: int = 2
    pipeline_home_blocks: int = 0  # blocks on the first node of a group; 0: node_blocks
    seed: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    # 3 M tokens of KV in a node's DRAM (Fig 10): 3 M * 320 KiB = 983 GB, a host of 1 TB.
    node_blocks: int = 5_859
    eviction: str = "density"  # the directory's default
    # Blocks on a node's SSDs; 0: no SSD. The rates are those of two data-centre NVMe SSDs of 3.84
    # to 7.68 TB: each reads 6.5 and writes 3.5 GB/s by its data sheet, here 6 and 3.
    ssd_blocks: int = 0
    ssd_read_bytes_per_s: float = 12e9
    ssd_write_bytes_per_s: float = 6e9
    ssd_latency_s: float = 0.0001
    # A prefill step. The paper: prefill_chunk is "larger than 1,000 tokens".
    chunk_tokens: int = 2_048
    waiting_max: int = 100_000  # prompts in a prefill queue: the conductor rejects, not the worker
    decode_slots: int = 256  # vLLM's max_num_seqs
    # output limit that clients send; the longest answer of the conversation trace
    max_tokens: int = 2_000
    nic_bytes_per_s: float = 100e9  # 800 Gb/s
    nic_latency_s: float = 0.001
    host_to_gpu_bytes_per_s: float = 128e9  # B_h2d of the paper
    report_s: float = 1.0  # between a worker's reports
    frontends: int = 1  # requests go to them in turns; each has its own conductor
    # Latency of a frontend's notes to the others, besides the wait until notes are sent together;
    # None: frontends exchange no notes.
    notes_latency_s: float | None = 0.005
    tick_s: float = 0.5  # between ticks of the conductor, as in the frontend
    sharing: Sharing = NOBODY_BESIDE  # how much other workers on the same cores slow a step
    workers_at_once: float = 0.0  # workers that the machine's cores compute at once; 0: unknown
    # Seconds added on the way through the frontend to prefill, and from prefill to decode. The
    # hand-over takes `handover_beside_s` more for each computing worker. On GPUs only the network
    # counts.
    serving_s: float = 0.0
    handover_s: float = 0.0
    handover_beside_s: float = 0.0
    # Seconds added to each prompt while others wait: the work of frontend, store and client for it.
    # They share the cores, so the cost grows with each further prefill worker.
    queued_prompt_s: float = 0.0
    jitter: float = 0.05  # each step is up to this share longer or shorter than the model predicts
    steps_at_once: int = 0  # most decode steps computed together; 0: all steps of the same batch
    worker: MeasuredWorker | None = None  # instead of the roofline of a node (profiled.py)
    attempts_max: int = 3  # attempts of a request whose workers were lost

    def gpu(self) -> GpuModel:
        return self.worker or Roofline()

    @property
    def disk_rates(self) -> DiskRates:
        return DiskRates(self.ssd_read_bytes_per_s, self.ssd_write_bytes_per_s, self.ssd_latency_s)

    def __post_init__(self) -> None:
        assert self.chunk_tokens % self.block_tokens == 0, "a chunk must end at a block boundary"
        assert min(self.prefills, self.decodes, self.node_blocks) > 0 <= self.ssd_blocks
        assert 0 <= self.jitter < 1
        assert 0 <= self.pipeline_groups * self.pipeline_stages <= self.prefills
        assert self.pipeline_stages > 1, "a group has at least two stages"


class Cores:
    """Which workers compute now. All workers of the cluster share the cores of one machine."""

    def __init__(self, sharing: Sharing = NOBODY_BESIDE, at_once: float = 0.0) -> None:
        """`at_once`: workers that the cores compute at full speed; 0: unknown."""
        self._at_once = at_once
        # (role of a step, role of another computing worker) -> relative extra time
        self._costs = {
            ("prefill", "prefill"): sharing.second_prefill - 1.0,
            ("prefill", "decode"): sharing.prefill - 1.0,
            ("decode", "prefill"): sharing.decode - 1.0,
            ("decode", "decode"): sharing.second_decode - 1.0,
        }
        assert min(self._costs.values()) >= 0.0, "sharing cores cannot make a step faster"
        self._computing = {"prefill": 0, "decode": 0}
        # Called when the speed of decode steps changes.
        self.on_pace: list[Callable[[], None]] = []

    def computing(self, *roles: str) -> int:
        return sum(self._computing[role] for role in roles)

    def factor(self, role: str) -> float:
        """Of a step that begins now. The worker that calls this is one of those that compute."""
        others = {**self._computing, role: max(0, self._computing[role] - 1)}
        slower = 1.0 + sum(self._costs[role, other] * others[other] for other in others)
        share = (1 + sum(others.values())) / self._at_once if self._at_once else 0.0
        return max(slower, share)

    def compute(self, role: str, is_computing: bool) -> None:
        """A worker of this role begins or ends to compute; called at changes only."""
        before = self.factor("decode")
        self._computing[role] += 1 if is_computing else -1
        assert self._computing[role] >= 0, f"more {role} workers ended than began"
        if self.factor("decode") != before:
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
        """Most blocks of KV that fit the GPU's memory."""
        return self.gpu.pages_bytes // self.block_bytes


class CountedPages(PagePool):
    """Pages without memory: pages taken together are one range, and no number is used twice."""

    def __init__(self, pages_max: int) -> None:
        assert pages_max > 0, pages_max
        self.pages_max = pages_max
        self._taken: dict[int, int] = {}  # first page of a range -> its length
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
        if not pages:  # the request left before it had pages
            return
        assert self._taken.pop(pages[0], 0) == len(pages), "released twice, or not as taken"
        self._used -= len(pages)

    def check(self) -> None:
        assert self._used == sum(self._taken.values()) <= self.pages_max, "a page is lost"


class SimulatedWorker:
    """The common part of prefill and decode workers: one process on one node, in one role."""

    def __init__(self, worker_id: str, node_id: str, site: SimulatedSite, jitter: Jitter) -> None:
        self.worker_id, self.node_id = worker_id, node_id
        self.incarnation = INCARNATION  # changes with each change of role
        self.is_draining = False  # it finishes its requests and then takes the other role
        self.slowness = 1.0  # 2.0: every step takes twice as long (Fault)
        self.busy_s = 0.0
        self.is_dead = False
        self._site, self._jitter = site, jitter
        self._pool = CountedPages(site.pages_max)
