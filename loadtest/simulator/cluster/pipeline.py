"""Pipeline groups: prefill nodes that each compute a share of the layers (FAST'25, 3.3).

Stage 0 is a normal prefill worker with a queue, batching, pages and the store's blocks. After it
has computed its layers of a step, it sends the hidden states to the next stage and begins the next
step, of the same prompt or of others. A stage computes steps in the order of their arrival. A later
stage sends its KV over the network to the node of stage 0, which stores whole blocks. A prefix that
is cached there is sent from that node to each stage, by layers. A step ends when the last stage has
computed it and all of its KV has reached stage 0.

A stage takes its share of the time of all layers: weights, KV and arithmetic are divided evenly.
Embedding and output layers are left out.

Not here: choosing the group of a prompt (the Conductor), a worker alone (prefill_node.py).
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
    """One step of stage 0 on its way through the other stages."""

    chunks: Sequence[Chunk]
    jobs: Sequence[SimulatedJob | None]  # the job of each chunk; None: it was cancelled
    began_s: float
    # by request: when its latest step was computed; shared by all steps
    computed_s: dict[str, float]
    kv_under_way: int = 0  # KV transfers to the node of stage 0 that have not ended
    is_computed: bool = False  # all stages have computed it

    def end_computing(self, now_s: float) -> None:
        """Add this step's compute time, without time counted for an overlapping step."""
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
    return PrefillEstimate(*(part / stages for part in whole.coefficients))


def hop_s(site: SimulatedSite) -> float:
    """Seconds to send a full chunk's hidden states over an idle network."""
    network, chunk_bytes = site.network, site.settings.chunk_tokens * site.gpu.hidden_bytes
    return network.latency_s + chunk_bytes / network.bytes_per_s


class PipelineStage(PromptComputer):
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
        """`on_step`: called when a stage or a KV transfer of a step ends."""
        self.home, self._on_step = home, on_step

    def report(self) -> WorkerReport:
        running, step_s = len(self._queue) + self._is_busy, self._steps.recent_s
        return WorkerReport(
            self.worker_id, self.incarnation, 0, 0, running, 0, 0, step_s, is_draining=False
        )

    def take(self, step: PipelinedStep) -> None:
        """Queue a step whose hidden states have arrived."""
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
        assert not self._queue and not self._is_busy, f"{self.worker_id} kept steps"


def send_hidden(site: SimulatedSite, node_id: str, to: PipelineStage, step: PipelinedStep) -> None:
    size_bytes = step.tokens * site.gpu.hidden_bytes
    site.network.send(node_id, to.node_id, size_bytes, lambda: to.take(step))


class PipelineHead(PrefillNode):
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
        """`whole`: the estimate of all `stages` on one node."""
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
        stage.join(self.node_id, self._end_steps)
        if self.others:
            self.others[-1].following = stage
        self.others.append(stage)

    def paced_s(self, job: SimulatedJob) -> float:
        return self._pipeline.seconds(job.prompt_tokens - job.cached_tokens, job.cached_tokens)

    def _read(self, job: SimulatedJob, blocks: int) -> None:
        """Send each stage its layers: from DRAM on this node, over the network to the others."""
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
        """Stage 0 has computed its layers: pass the step on; the next step may begin."""
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
