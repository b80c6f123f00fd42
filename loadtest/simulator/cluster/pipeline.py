"""Pipeline groups: prefill nodes that each have a share of the layers (FAST'25, 3.3).

Stage 0 is a prefill worker like any other: queue, batching, pages and the store's blocks are its
own. When it has computed its layers of a step it sends the hidden states to the next stage and
begins the next step, of the same prompt or of others. A stage computes the steps in the order in
which they come. What a later stage makes of the KV goes over the network to the node of stage 0,
whose blocks are whole; and what of a prefix is cached there goes from it to each stage, its layers.
A step is over when the last stage has computed it and all of its KV is there.

A stage takes its share of what all layers take: weights, KV and arithmetic are divided alike. What
stands before the first and after the last layer is left out.

Not here: which group a prompt goes to (the Conductor), a worker alone (prefill_node.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.engine.batching.batching import Chunk
from conductor.estimates.estimates import PrefillEstimate
from conductor.estimates.pipeline import PipelineEstimate
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.prefill_node import PrefillNode, PromptComputer
from loadtest.simulator.cluster.site import SimulatedSite
from loadtest.simulator.cluster.steps import Jitter
from mooncake_store.records.membership import WorkerReport


@dataclass(slots=True, eq=False)
class PipelinedStep:
    """One step of stage 0 on its way through the others."""

    chunks: Sequence[Chunk]
    jobs: Sequence[SimulatedJob | None]  # of these chunks; None: it was given up
    began_s: float
    computed_s: dict[str, float]  # of all steps: when a request's latest one was computed
    kv_under_way: int = 0  # sends to the node of stage 0
    is_computed: bool = False  # by all stages

    def end_computing(self, now_s: float) -> None:
        """Steps of one prompt overlap: what was counted for the one before does not count again."""
        self.is_computed = True
        for job in self.jobs:
            if job is not None:
                job.compute_s += now_s - max(self.began_s, self.computed_s.get(job.request_id, 0.0))
                self.computed_s[job.request_id] = now_s

    @property
    def is_over(self) -> bool:
        return self.is_computed and not self.kv_under_way

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


def stage_estimate(whole: PrefillEstimate, stages: int) -> PrefillEstimate:
    """Of one stage of so many."""
    return PrefillEstimate(*(part / stages for part in whole.coefficients))


def hop_s(site: SimulatedSite) -> float:
    """A full chunk's hidden states, with nobody else on the network."""
    network, chunk_bytes = site.network, site.settings.chunk_tokens * site.gpu.hidden_bytes
    return network.latency_s + chunk_bytes / network.bytes_per_s


class PipelineStage(PromptComputer):
    """A stage after the first."""

    def __init__(
        self, worker_id: str, node_id: str, site: SimulatedSite, jitter: Jitter, share: float
    ) -> None:
        super().__init__(worker_id, node_id, site, jitter)
        self.share = share
        self._queue: deque[PipelinedStep] = deque()
        self.home = ""  # the node of stage 0
        self._on_step: Callable[[], None] = lambda: None
        self.following: PipelineStage | None = None

    def join(self, home: str, on_step: Callable[[], None]) -> None:
        """`on_step`: something of a step has come about."""
        self.home, self._on_step = home, on_step

    def report(self) -> WorkerReport:
        return WorkerReport(
            self.worker_id,
            self.incarnation,
            0,
            0,
            len(self._queue) + self._is_busy,
            0,
            0,
            self._steps.recent_s,
            False,
        )

    def take(self, step: PipelinedStep) -> None:
        """Its hidden states have come."""
        self._queue.append(step)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        self._turn_busy(bool(self._queue))
        if not self._queue:
            return
        step = self._queue.popleft()
        seconds = self._step_s(step.chunks)
        self._site.clock.after(seconds, self._stepped, step, seconds)

    def _stepped(self, step: PipelinedStep, seconds: float) -> None:
        site = self._site
        self._took(seconds, step.chunks, step.jobs)
        step.kv_under_way += 1
        kv_bytes = int(step.tokens * site.gpu.token_bytes * self.share)
        site.network.send(self.node_id, self.home, kv_bytes, lambda: self._sent(step))
        if self.following is None:
            step.end_computing(site.clock.now_s)
        else:
            send_hidden(site, self.node_id, self.following, step)
        self._begin()

    def _sent(self, step: PipelinedStep) -> None:
        step.kv_under_way -= 1
        self._on_step()

    def check(self) -> None:
        """Nothing is left to compute."""
        assert not self._queue and not self._is_busy, f"{self.worker_id} kept steps"


def send_hidden(site: SimulatedSite, node_id: str, to: PipelineStage, step: PipelinedStep) -> None:
    size_bytes = step.tokens * site.gpu.hidden_bytes
    site.network.send(node_id, to.node_id, size_bytes, lambda: to.take(step))


class PipelineHead(PrefillNode):
    """Stage 0 of a group, with the other stages."""

    def __init__(
        self,
        worker_id: str,
        node_id: str,
        site: SimulatedSite,
        jitter: Jitter,
        whole: PrefillEstimate,
        stages: int,
        on_begin: Callable[[SimulatedJob], None],
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        """`whole`: of all `stages` on one node."""
        estimate = stage_estimate(whole, stages)
        super().__init__(worker_id, node_id, site, jitter, estimate, on_begin, on_end)
        self.share = 1 / stages
        self.others: list[PipelineStage] = []
        self._pipeline = PipelineEstimate.of(
            [estimate] * stages, site.settings.chunk_tokens, (stages - 1) * hop_s(site)
        )
        self._under_way: deque[PipelinedStep] = deque()
        self._computed_s: dict[str, float] = {}

    def add(self, stage: PipelineStage) -> None:
        """The next one."""
        stage.join(self.node_id, self._end_steps)
        if self.others:
            self.others[-1].following = stage
        self.others.append(stage)

    def paced_s(self, job: SimulatedJob) -> float:
        return self._pipeline.seconds(job.prompt_tokens - job.cached_tokens, job.cached_tokens)

    def _read(self, job: SimulatedJob, blocks: int) -> None:
        """Each stage its layers: this one from its DRAM, the others over the network."""
        site, size_bytes = self._site, int(blocks * self._site.block_bytes * self.share)
        left = 1 + len(self.others)

        def came() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._read_in(job, blocks)

        site.clock.after(size_bytes / site.settings.host_to_gpu_bytes_per_s, came)
        for stage in self.others:
            if blocks:
                site.network.send(self.node_id, stage.node_id, size_bytes, came)
            else:
                came()

    def _computed(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Its own layers are: the next step may begin, this one goes on."""
        jobs = [self._jobs.get(chunk.request_id) for chunk in chunks]
        began_s = self._site.clock.now_s - seconds
        step = PipelinedStep(chunks, jobs, began_s, self._computed_s)
        self._under_way.append(step)
        send_hidden(self._site, self.node_id, self.others[0], step)

    def _end_steps(self) -> None:
        while self._under_way and self._under_way[0].is_over:
            self._end_chunks(self._under_way.popleft().chunks)
            if not self.is_dead:
                self._wake()

    def check(self) -> None:
        super().check()
        assert not self._under_way, f"{self.worker_id} has steps that never ended"
