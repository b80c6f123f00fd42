"""The real Conductor in front of Dynamo's engine.

It hears what it hears in production: the blocks that come to and go from each prefill worker's
cache, a report of every worker each second, and when a prefill starts and ends and an answer ends.
It is asked about each request when it arrives, and its route names both workers and the place in
the queue. Between what is asked and what is answered nothing is translated but units.

What the engine has not, the conductor must not count on. The hand-over is free, so decode workers
measured a link of RATE_FREE from everywhere. There is nothing to fetch with (Dynamo's workers have
their own cache and no other), so prefill workers measured a link of RATE_NONE from each other: with
it no fetch is ever predicted to pay, under any policy.

The coefficients are fitted, by the conductor's own fit, to the times of single prompts and of some
batches, as `mooncake profile` would measure them on an idle worker.

Not here: the engine (replay.py), which policy and limits (experiments/dynamo_replay.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conductor import Conductor, ConductorConfig, Reject, Request
from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    Fit,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.dynamo.blocks import Watcher
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.replay import Replay
from loadtest.simulator.dynamo.timing import (
    BLOCK_TOKENS,
    SEQUENCES_MAX,
    Steps,
    alone_s,
)
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
MAX_TOKENS = 2_000  # what clients ask for; the longest answer of the conversation trace
LENGTHS = (64, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def profile_prefill() -> Fit[PrefillEstimate]:
    """Alone and behind a prefix that is cached; this engine computes as if there were none."""
    return fit_prefill([
        PrefillSample(new_tokens, prefix, alone_s(new_tokens))
        for new_tokens in LENGTHS
        for prefix in (0, new_tokens)
    ])  # fmt: skip


def profile_decode(blocks: int) -> Fit[DecodeEstimate]:
    """Batches of contexts of several lengths, as far as they fit."""
    room = blocks * BLOCK_TOKENS
    return fit_decode([
        DecodeSample(count, count * tokens, Steps.of(count, count * tokens, room).first_s)
        for count in BATCHES
        for tokens in LENGTHS
        if count * tokens <= room
    ])  # fmt: skip


@dataclass
class ConductorScheduler:
    """Feeds the conductor and carries out what it answers."""

    config: ConductorConfig
    rejected: dict[str, int] = field(default_factory=dict)  # by kind
    errors: list[tuple[Job, float]] = field(default_factory=list)  # with the predicted TTFT

    def __post_init__(self) -> None:
        self.conductor = Conductor(self.config)
        self._keys: dict[int, bytes] = {}
        self._events: list[Event] = []

    def watcher(self, prefill: int) -> Watcher | None:
        node_id = f"p{prefill}"

        def watch(key: int, is_there: bool) -> None:
            name = self._key(key)
            event = BlockAdded(name, node_id) if is_there else BlockRemoved(name, node_id)
            self._events.append(event)

        return watch

    def attach(self, replay: Replay) -> None:
        self._replay = replay
        blocks = replay.prefills[0].pool.blocks
        names = [f"p{p.number}" for p in replay.prefills] + [f"d{d.number}" for d in replay.decodes]
        prefill, decode = profile_prefill().estimate, profile_decode(blocks).estimate
        self._tell([NodeUp(_node(name)) for name in names])
        self._tell([WorkerUp(_worker(name, names, blocks, prefill, decode)) for name in names])
        self._report()

    def arrive(self, job: Job, now_s: float) -> bool:
        self.flush()
        answer = self.conductor.on_request(self.request_of(job), now_s)
        if isinstance(answer, Reject):
            self.rejected[answer.kind] = self.rejected.get(answer.kind, 0) + 1
            return False
        job.prefill = int(answer.prefill.worker_id[1:])
        job.decode = int(answer.decode.worker_id[1:])
        job.order_key_s = answer.order_key_s
        self.errors.append((job, answer.predicted.ttft_s))
        return True

    def request_of(self, job: Job) -> Request:
        keys = [self._key(key) for key in job.keys]
        most = max(MAX_TOKENS, job.output_tokens)  # how long an answer will be, nobody knows
        return Request(str(job.line), job.prompt_tokens, keys, most)

    def prefilled(self, job: Job, now_s: float) -> None:
        seconds = now_s - job.started_s
        self.conductor.on_prefill_finished(str(job.line), now_s, job.cached_tokens, seconds)

    def finished(self, job: Job, now_s: float) -> None:
        self.conductor.on_finished(str(job.line), now_s, job.output_tokens)

    def _key(self, key: int) -> bytes:
        name = self._keys.get(key)
        if name is None:
            name = self._keys[key] = key_of(key)
        return name

    def _tell(self, events: list[Event]) -> None:
        self.conductor.on_events(events, self._replay.now_s)

    def flush(self) -> None:
        """Tell the conductor what the caches did since the last time."""
        if self._events:
            events, self._events = self._events, []
            self._tell(events)

    def _report(self) -> None:
        """Every second, as workers do, until the last answer has ended."""
        replay, said = self._replay, []
        for prefill in replay.prefills:
            said.append(WorkerReport(
                f"p{prefill.number}", "1", prefill.requests, prefill.queue_tokens,
                int(prefill.is_busy), prefill.pool.blocks - prefill.pool.room, 0, 0.0, False,
            ))  # fmt: skip
        for decode in replay.decodes:
            said.append(WorkerReport(
                f"d{decode.number}", "1", len(decode.pending) + len(decode.waiting), 0,
                len(decode.batch),
                decode.pool.blocks - decode.pool.room, decode.context_at(replay.now_s),
                decode.step_s, False,
            ))  # fmt: skip
        self.flush()
        self._tell([WorkerReported(report) for report in said])
        self.conductor.on_tick(replay.now_s)
        if replay.unfinished or not replay.now_s:
            replay.at(replay.now_s + REPORT_S, self._report)


def _node(name: str) -> NodeInfo:
    return NodeInfo(name, "1", name, "", 0, "", b"", 0)


def _worker(
    name: str, names: list[str], blocks: int, prefill: PrefillEstimate, decode: DecodeEstimate
) -> WorkerInfo:
    is_prefill = name.startswith("p")
    rate = RATE_NONE if is_prefill else RATE_FREE
    return WorkerInfo(
        worker_id=name, incarnation="1", role="prefill" if is_prefill else "decode", node_id=name,
        fingerprint="dynamo", description="", inbox="", block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES, context_tokens_max=blocks * BLOCK_TOKENS, pages_max=blocks,
        slots_max=1_000_000 if is_prefill else SEQUENCES_MAX,
        prefill_coefficients=prefill.coefficients, decode_coefficients=decode.coefficients,
        transfer_bytes_per_s=dict.fromkeys(names, rate),
        transfer_latency_s=dict.fromkeys(names, 0.0),
    )  # fmt: skip
