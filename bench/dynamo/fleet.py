"""NVIDIA Dynamo's engine as another kind of workers of the simulated cluster.

`DynamoFleet` puts the real Conductor in front of it, with the events of production: blocks added to
and removed from each prefill worker's cache, a report of every worker each second, and the start
and end of a prefill and the end of an answer. The Conductor decides on each request when it
arrives; its route names both workers and the queue position. `RoundRobinFleet` has Dynamo's round
robin instead and no part of ours: the gate compares it with Dynamo.

The conductor must not count on what the engine lacks. The hand-over is free, so decode workers
report a link of RATE_FREE from everywhere. Dynamo's workers have no cache but their own, so prefill
workers report a link of RATE_NONE from each other: no policy predicts a gain from a fetch.

The coefficients are fitted, by the conductor's own fit, to the times of single prompts and of some
batches, as `mooncake profile` would measure them on an idle worker.

Not here: the engine's rules (prefill_worker.py, decode_worker.py, blocks.py, timing.py), policies
and limits (bench/paper/experiments/dynamo_replay.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bench.dynamo.blocks import BlockPool, Key, Watcher
from bench.dynamo.decode_worker import DynamoDecodeWorker
from bench.dynamo.prefill_worker import DynamoPrefillWorker
from bench.dynamo.timing import BLOCK_TOKENS, SEQUENCES_MAX, Steps, alone_s
from conductor import ConductorConfig
from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    Fit,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from conductor.queue_order import ALWAYS
from loadtest.simulator.cluster.fleet import SimulatedCluster
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeUp,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

RATE_FREE, RATE_NONE = 1e18, 1e-3  # bytes/s
BLOCK_BYTES = BLOCK_TOKENS * 327_680  # LLaMA3-70B in bf16; only ratios to the rates above matter
REPORT_S = 1.0
MAX_TOKENS = 2_000  # output limit that clients send; the longest answer of the conversation trace
LENGTHS = (64, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def profile_prefill() -> Fit[PrefillEstimate]:
    """Alone and after a cached prefix; this engine computes as if there were none."""
    return fit_prefill(
        [
            PrefillSample(new_tokens, prefix, alone_s(new_tokens))
            for new_tokens in LENGTHS
            for prefix in (0, new_tokens)
        ]
    )


def profile_decode(blocks: int) -> Fit[DecodeEstimate]:
    """Batches of contexts of several lengths, as far as they fit."""
    room = blocks * BLOCK_TOKENS
    return fit_decode(
        [
            DecodeSample(count, count * tokens, Steps.of(count, count * tokens, room).first_s)
            for count in BATCHES
            for tokens in LENGTHS
            if count * tokens <= room
        ]
    )


class DynamoFleet(SimulatedCluster):
    """Workers with a cache each and nothing else; `blocks` is the size of a worker's memory."""

    def __init__(
        self,
        config: ConductorConfig | None,
        blocks: int,
        prefills: int = 2,
        decodes: int = 2,
        overhead_tokens: float = ALWAYS,
    ) -> None:
        super().__init__(MAX_TOKENS, config)
        self._blocks = blocks
        self._events: list[Event] = []  # events of the caches that the conductor has not received
        self.prefills = {
            name: DynamoPrefillWorker(name, blocks, self._watcher(name), overhead_tokens)
            for name in (f"p{number}" for number in range(prefills))
        }
        self.decodes = {
            name: DynamoDecodeWorker(name, blocks)
            for name in (f"d{number}" for number in range(decodes))
        }

    @property
    def pools(self) -> list[BlockPool]:
        workers = self.prefills.values(), self.decodes.values()
        return [worker.pool for of_role in workers for worker in of_role]

    # -- the path of a request

    def _arrive(self, came: Sequence[Offered]) -> None:
        """All requests of one moment are queued before a pass starts."""
        super()._arrive(came)
        for worker in self.prefills.values():
            self._start_pass(worker)

    def _decide(self, job: SimulatedJob) -> None:
        self.flush()
        super()._decide(job)

    def _submit(self, job: SimulatedJob, order_key_s: float) -> None:
        self.prefills[job.prefill].add(job, order_key_s)

    def _start_pass(self, worker: DynamoPrefillWorker) -> None:
        if worker.is_busy:
            return
        seconds = worker.start_pass(self.clock.now_s)
        if worker.is_busy:
            self.clock.after(seconds, self._end_pass, worker)

    def _end_pass(self, worker: DynamoPrefillWorker) -> None:
        # Prompts that end at one moment are pending before a decode worker plans.
        chosen: dict[DynamoDecodeWorker, None] = {}
        for job in worker.end_pass():
            job.prefilled_s = self.clock.now_s
            self._prefilled(job)
            decode = self.decodes[job.decode]
            decode.pending.append(job)
            chosen[decode] = None
        for decode in chosen:
            if decode.is_idle:
                self._plan_span(decode)
            else:
                self._await_span(decode, decode.cut(self.clock.now_s))
        self._start_pass(worker)

    def _plan_span(self, worker: DynamoDecodeWorker) -> None:
        """At a boundary: admit, free the sources, and plan the next steps."""
        came, end_s = worker.plan(self.clock.now_s)
        for job in came:
            source = self.prefills[job.prefill]
            source.release(job)
            self._start_pass(source)
        if end_s is not None:
            self._await_span(worker, end_s)

    def _await_span(self, worker: DynamoDecodeWorker, end_s: float) -> None:
        self.clock.at(end_s, self._end_span, worker, worker.span)

    def _end_span(self, worker: DynamoDecodeWorker, span: int) -> None:
        if span != worker.span:
            return  # the span was cut
        for job in worker.end_span(self.clock.now_s):
            self._finished(job)
            self._count_over()
        self._plan_span(worker)

    # -- events for the conductor

    def _prefilled(self, job: SimulatedJob) -> None:
        assert job.started_s is not None
        now_s = self.clock.now_s
        seconds = now_s - job.started_s
        self.conductor.on_prefill_finished(job.request_id, now_s, job.cached_tokens, seconds)

    def _finished(self, job: SimulatedJob) -> None:
        self.conductor.on_finished(job.request_id, self.clock.now_s, job.output_tokens)

    def _watcher(self, node_id: str) -> Watcher | None:
        """Records the blocks of this prefill worker's cache."""

        def watch(key: Key, is_there: bool) -> None:
            assert isinstance(key, bytes), "a prefill worker has blocks of prompts only"
            event = BlockAdded(key, node_id) if is_there else BlockRemoved(key, node_id)
            self._events.append(event)

        return watch

    def flush(self) -> None:
        """Send the caches' events since the last call to the conductor."""
        if self._events:
            events, self._events = self._events, []
            self.conductor.on_events(events, self.clock.now_s)

    def _begin_reports(self) -> None:
        names = [*self.prefills, *self.decodes]
        prefill, decode = profile_prefill().estimate, profile_decode(self._blocks).estimate
        now_s = self.clock.now_s
        self.conductor.on_events([NodeUp(_node(name)) for name in names], now_s)
        self.conductor.on_events(
            [WorkerUp(_worker(name, names, self._blocks, prefill, decode)) for name in names], now_s
        )
        self._report()

    def _report(self) -> None:
        """Every second, as workers do, until the last answer has ended."""
        now_s, said = self.clock.now_s, []
        for prefill in self.prefills.values():
            said.append(
                WorkerReport(
                    prefill.name,
                    "1",
                    prefill.requests,
                    prefill.queue_tokens,
                    int(prefill.is_busy),
                    prefill.pool.blocks - prefill.pool.room,
                    0,
                    0.0,
                    False,
                )
            )
        for decode in self.decodes.values():
            said.append(
                WorkerReport(
                    decode.name,
                    "1",
                    len(decode.pending) + len(decode.waiting),
                    0,
                    len(decode.batch),
                    decode.pool.blocks - decode.pool.room,
                    decode.context_at(now_s),
                    decode.step_s,
                    False,
                )
            )
        self.flush()
        self.conductor.on_events([WorkerReported(report) for report in said], now_s)
        self.conductor.on_tick(now_s)
        if self._alive:
            self.clock.after(REPORT_S, self._report)

    def check(self) -> None:
        """Assert that every request ended exactly once, and check every worker's blocks."""
        super().check()
        for pool in self.pools:
            pool.check()


class RoundRobinFleet(DynamoFleet):
    """Prefill workers in turn by arrival, decode workers in turn by completion; no Conductor."""

    def __init__(
        self, blocks: int, prefills: int = 2, decodes: int = 2, overhead_tokens: float = ALWAYS
    ) -> None:
        super().__init__(None, blocks, prefills, decodes, overhead_tokens)
        self._next_prefill = itertools.cycle(list(self.prefills))
        self._next_decode = itertools.cycle(list(self.decodes))

    def _decide(self, job: SimulatedJob) -> None:
        job.prefill = next(self._next_prefill)
        self._submit(job, 0.0)

    def _prefilled(self, job: SimulatedJob) -> None:
        job.decode = next(self._next_decode)

    def _finished(self, job: SimulatedJob) -> None:
        """No conductor needs it."""

    def _watcher(self, node_id: str) -> Watcher | None:
        return None

    def _begin_reports(self) -> None:
        """No conductor needs reports."""


def _node(name: str) -> NodeInfo:
    return NodeInfo(name, "1", name, "", 0, "", b"", 0)


def _worker(
    name: str, names: list[str], blocks: int, prefill: PrefillEstimate, decode: DecodeEstimate
) -> WorkerInfo:
    is_prefill = name.startswith("p")
    rate = RATE_NONE if is_prefill else RATE_FREE
    return WorkerInfo(
        worker_id=name,
        incarnation="1",
        role="prefill" if is_prefill else "decode",
        node_id=name,
        fingerprint="dynamo",
        description="",
        inbox="",
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        context_tokens_max=blocks * BLOCK_TOKENS,
        pages_max=blocks,
        slots_max=1_000_000 if is_prefill else SEQUENCES_MAX,
        prefill_coefficients=prefill.coefficients,
        decode_coefficients=decode.coefficients,
        transfer_bytes_per_s=dict.fromkeys(names, rate),
        transfer_latency_s=dict.fromkeys(names, 0.0),
    )
