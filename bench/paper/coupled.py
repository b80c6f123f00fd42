"""Coupled engines, the papers' baselines: prefill and decode on one node, in one batch.

    vllm      continuous batching: waiting prompts are computed whole, before any decode step
    chunked   steps that carry all decodes and fill up with chunks of prompts

Each runs with or without a prefix cache in the GPU's own free memory; the paper's "+ prefix cache"
is `vllm` with it, its "+ chunked prefill" is `chunked` without. A chunk ends at any token, so a
step is full whatever decodes beside it. A step with prompt tokens is charged wholly to them,
because decodes alone would have had a step of their own.

Requests are dispatched to the nodes in turns on arrival and stay there: the papers do not give the
dispatch of their baselines. Each node's queue is FIFO. Memory for prompt and longest answer is
reserved, so nothing is preempted. The cache is the store's LRU order over the blocks that no
request holds. These engines use none of the project's own scheduling.

Consecutive decode steps of the same sequences are computed at once; an arrival cuts them after the
step under way. The result equals that of single steps (tested).

Not here: seconds of a step (loadtest/simulator/cluster/gpu.py), the experiments (experiments/).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from backends.engine.batching.batching import Chunk, Progress, next_chunks
from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.fleet import SimulatedCluster
from loadtest.simulator.cluster.gpu import GpuModel
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.steps import Jitter, Seconds, StepLog, longest_tenth_s
from mooncake_store.directory.core.eviction import make_eviction
from mooncake_store.layout import blocks_touched

ENGINES = ("vllm", "chunked")
TOKEN = 1  # a chunk is a multiple of this
NO_STEPS: Seconds = np.zeros(0)


@dataclass(frozen=True, slots=True)
class CoupledSettings:
    engine: str
    nodes: int = 16
    has_prefix_cache: bool = False
    chunk_tokens: int = 2_048  # of `chunked`: all tokens of a step
    prompts_tokens: int = 131_072  # of `vllm`: prompt tokens of a step, so prompts are whole
    sequences_max: int = 256
    block_tokens: int = 512
    max_tokens: int = 2_000
    jitter: float = 0.05
    seed: int = 0
    steps_at_once: int = 0  # most decode steps computed together; 0: all steps of the same batch

    def __post_init__(self) -> None:
        assert self.engine in ENGINES, self

    @property
    def name(self) -> str:
        """The name in reports."""
        engine = f"chunked {self.chunk_tokens}" if self.engine == "chunked" else "vllm"
        return f"{engine} + prefix cache" if self.has_prefix_cache else engine


@dataclass(slots=True, eq=False)
class CoupledSequence:
    job: SimulatedJob
    first: int  # number of the decode step that gives it its second token


class GpuBlocks:
    """A GPU's memory for KV: blocks in use, and idle ones that are kept as a prefix cache."""

    def __init__(self, blocks_max: int, has_cache: bool) -> None:
        self._blocks_max, self._has_cache = blocks_max, has_cache
        self._users: dict[bytes, int] = {}
        self._idle = make_eviction("lru")
        # blocks that no other request can use: partial ones, and those of answers
        self._private = 0

    def take(self, keys: Sequence[bytes], blocks: int) -> int | None:
        """Reserve that many blocks; returns how many leading ones are cached, or None without
        room.
        """
        keys = keys if self._has_cache else ()
        new = sum(key not in self._users for key in keys)
        private = blocks - len(keys)
        if len(self._users) + new + self._private + private > self._blocks_max:
            return None
        hits = 0
        while hits < len(keys) and (keys[hits] in self._users or keys[hits] in self._idle):
            hits += 1
        for key in keys:
            if key in self._idle:
                self._idle.discard([key])
            self._users[key] = self._users.get(key, 0) + 1
        self._private += private
        while len(self._users) + self._private + len(self._idle) > self._blocks_max:
            coldest = self._idle.take_coldest(1)
            assert coldest, "every block is in use"
        return hits

    def give(self, keys: Sequence[bytes], blocks: int) -> None:
        """The request ended: its full blocks stay as cache, the end of the chain coldest."""
        keys = keys if self._has_cache else ()
        self._private -= blocks - len(keys)
        for key in reversed(keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle.add([key])

    def check(self) -> None:
        assert not self._users and self._private == 0, "a request kept blocks"
        self._idle.check()


class CoupledNode:
    """One engine. `on_end` receives each job that has all its tokens."""

    def __init__(
        self,
        clock: VirtualClock,
        gpu: GpuModel,
        settings: CoupledSettings,
        jitter: Jitter,
        on_end: Callable[[], None],
    ) -> None:
        self._clock, self._gpu, self._settings = clock, gpu, settings
        self._jitter, self._on_end = jitter, on_end
        self._is_chunked = settings.engine == "chunked"
        blocks_max = gpu.pages_bytes // (settings.block_tokens * gpu.token_bytes)
        self._memory = GpuBlocks(blocks_max, settings.has_prefix_cache)
        self._waiting: deque[SimulatedJob] = deque()
        self._computing: dict[str, Progress] = {}
        self._jobs: dict[str, SimulatedJob] = {}  # admitted
        self._running = 0  # sequences that decode
        # a heap, by the step after which a sequence ends
        self._ends: list[tuple[int, int, CoupledSequence]] = []
        self._gaps = StepLog()  # from the end of one decode step to the end of the next
        self._decoded_s = 0.0  # end of the last decode step
        self._steps = self._context = 0
        self._is_busy = False
        self._ends_s: Seconds = NO_STEPS  # of the planned decode steps
        self._plan = 0

    def submit(self, job: SimulatedJob) -> None:
        self._waiting.append(job)
        if not self._is_busy:
            self._begin()
        elif len(self._waiting) == 1:  # earlier waiting requests have cut the plan already
            self._cut_plan()

    def _admit(self) -> None:
        while self._waiting and len(self._jobs) < self._settings.sequences_max:
            job = self._waiting[0]
            hits = self._memory.take(job.keys, self._blocks_of(job))
            if hits is None:
                return
            self._waiting.popleft()
            job.cached_tokens = min(hits * self._settings.block_tokens, job.prompt_tokens - 1)
            job.started_s, name = self._clock.now_s, job.request_id
            self._jobs[name] = job
            self._computing[name] = Progress(name, job.prompt_tokens, job.cached_tokens)

    def _blocks_of(self, job: SimulatedJob) -> int:
        tokens = job.prompt_tokens + job.request.output_tokens_max
        return blocks_touched(tokens, self._settings.block_tokens)

    def _begin(self) -> None:
        """The next step: chunks, decodes, or both; or as many decode steps as have the same
        batch.
        """
        self._admit()
        chunks = self._chunks() if self._computing else []
        self._is_busy = bool(chunks or self._running)
        if not chunks:
            if self._running:
                self._plan_decodes()
            return
        decodes = self._running if self._is_chunked else 0
        spans = [(chunk.start, chunk.tokens) for chunk in chunks]
        factor = float(self._jitter.factors(self._steps, 1)[0])
        seconds = factor * self._gpu.mixed_s(spans, decodes, float(self._context))
        self._steps += 1
        new_tokens = sum(chunk.tokens for chunk in chunks)
        for chunk in chunks:
            self._jobs[chunk.request_id].own_compute_s += seconds * chunk.tokens / new_tokens
        self._clock.after(seconds, self._stepped, chunks, decodes)

    def _chunks(self) -> list[Chunk]:
        settings, computing = self._settings, self._computing.values()
        if self._is_chunked:
            budget = settings.chunk_tokens - self._running
            return next_chunks(computing, budget, TOKEN) if budget > 0 else []
        chunks = next_chunks(computing, settings.prompts_tokens, TOKEN)
        if len(chunks) > 1 and not chunks[-1].is_last:
            del chunks[-1]  # it is computed whole, in a later step
        return chunks

    def _plan_decodes(self) -> None:
        steps = self._ends[0][0] - self._gaps.steps
        steps = min(steps, self._settings.steps_at_once or steps)
        context = self._context + self._running * np.arange(float(steps))
        factors = self._jitter.factors(self._steps, steps)
        seconds = factors * self._gpu.decode_s(self._running, context)
        self._ends_s = np.cumsum(np.concatenate(([self._clock.now_s], seconds)))[1:]
        self._plan += 1
        self._clock.at(float(self._ends_s[-1]), self._planned, self._plan)

    def _cut_plan(self) -> None:
        """A request waits: the decode step under way is the last of the plan."""
        steps = int(np.searchsorted(self._ends_s, self._clock.now_s, side="right")) + 1
        if steps < len(self._ends_s):
            self._ends_s = self._ends_s[:steps]
            self._plan += 1
            self._clock.at(float(self._ends_s[-1]), self._planned, self._plan)

    def _planned(self, plan: int) -> None:
        if plan != self._plan:
            return  # the plan was cut
        self._steps += len(self._ends_s)
        ends_s, self._ends_s = self._ends_s, NO_STEPS
        self._decoded(ends_s)
        self._begin()

    def _stepped(self, chunks: Sequence[Chunk], decodes: int) -> None:
        if decodes:
            self._decoded(np.array([self._clock.now_s]))
        for chunk in chunks:
            self._computing[chunk.request_id].computed_tokens += chunk.tokens
            if chunk.is_last:
                del self._computing[chunk.request_id]
                self._prefilled(self._jobs[chunk.request_id])
        self._begin()

    def _decoded(self, ends_s: Seconds) -> None:
        """Every running sequence has one more token at each of these times."""
        self._gaps.append(np.diff(ends_s, prepend=self._decoded_s))
        self._decoded_s = self._clock.now_s
        self._context += self._running * len(ends_s)
        while self._ends and self._ends[0][0] == self._gaps.steps:
            self._running -= 1
            self._finish(heappop(self._ends)[2])

    def _prefilled(self, job: SimulatedJob) -> None:
        job.prefilled_s = job.first_token_s = self._clock.now_s
        sequence = CoupledSequence(job, self._gaps.steps)
        self._context += job.prompt_tokens + 1
        if job.output_tokens > 1:
            self._running += 1
            last = sequence.first + job.output_tokens - 1
            heappush(self._ends, (last, job.number, sequence))
        else:
            self._finish(sequence)

    def _finish(self, running: CoupledSequence) -> None:
        job, now_s = running.job, self._clock.now_s
        assert job.prefilled_s is not None
        self._context -= job.prompt_tokens + job.output_tokens
        gaps = self._gaps.slice(running.first, self._gaps.steps).copy()
        if len(gaps):  # the first gap began with its own first token
            gaps[0] += now_s - float(gaps.sum()) - job.prefilled_s
        job.tbt_s = job.tbt_decode_s = longest_tenth_s(gaps)
        job.finished_s = now_s
        del self._jobs[job.request_id]
        self._memory.give(job.keys, self._blocks_of(job))
        self._on_end()

    def check(self) -> None:
        assert not self._waiting and not self._jobs and not self._ends
        assert (self._running, self._context) == (0, 0), (self._running, self._context)
        self._memory.check()


class CoupledFleet(SimulatedCluster):
    """Request i goes to node i % nodes on arrival; nothing is rejected."""

    def __init__(self, settings: CoupledSettings, gpu: GpuModel) -> None:
        super().__init__(settings.max_tokens)
        self._nodes = [
            CoupledNode(
                self.clock,
                gpu,
                settings,
                Jitter(settings.jitter, settings.seed, number),
                self._count_over,
            )
            for number in range(settings.nodes)
        ]

    def _decide(self, job: SimulatedJob) -> None:
        self._nodes[job.number % len(self._nodes)].submit(job)

    def check(self) -> None:
        """Assert that every request ended exactly once and left nothing behind."""
        super().check()
        for node in self._nodes:
            node.check()
