"""A simulated cluster: the real Conductor and Directory, simulated workers, one virtual clock.

The order of calls is that of the front (backends/frontend/generation.py,
backends/frontend/cluster_view.py): decide, prefill, tell the conductor that it finished, decode,
tell it that all is over; a request whose worker was lost is tried again elsewhere. Workers report
every second; what the directory announces reaches the conductor at once; its suggestions for hot
prefixes are carried out.

Not here: what is offered and what is asked of the outcome (experiments/), a worker's own work
(prefill_node.py, decode_node.py), what breaks when (faults.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conductor import Conductor, ConductorConfig, Reject, Replicate, Request
from loadtest.replay.trace import TraceRow
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.clock import Clock
from loadtest.simulator.cluster.cores import Cores
from loadtest.simulator.cluster.decode_node import DecodeNode
from loadtest.simulator.cluster.jitter import Jitter
from loadtest.simulator.cluster.job import Job
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.prefill_node import PrefillNode
from loadtest.simulator.cluster.settings import Settings
from loadtest.simulator.cluster.site import Site
from loadtest.simulator.cluster.store import SimulatedStore
from loadtest.simulator.gpu.steps import Calibration, GpuModel, calibrate, prompt_s
from mooncake_store.records.events import Event
from mooncake_store.records.membership import WorkerInfo

LIFE = "life1"
CONTEXT_TOKENS_MAX = 1_000_000  # no prompt of a published trace is longer
WORKER_TTL_S = 5.0  # the directory's own


@dataclass(frozen=True, slots=True)
class Offered:
    """One request of a trace, ready to be sent: its keys are made once for many runs."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]  # of the full blocks


def offered_of(rows: Sequence[TraceRow], block_tokens: int) -> list[Offered]:
    return [
        Offered(
            number, row.timestamp_ms / 1e3, row.input_tokens, max(1, row.output_tokens),
            [key_of(block) for block in row.hash_ids[: row.input_tokens // block_tokens]],
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip


class Fleet:
    """One run. Not to be used twice."""

    def __init__(self, config: ConductorConfig, settings: Settings, gpu: GpuModel) -> None:
        self.config, self.settings = config, settings
        self.clock = Clock()
        self.conductor = Conductor(config)
        store = SimulatedStore(self.clock, self._on_events, settings.eviction, WORKER_TTL_S)
        network = Network(self.clock, settings.nic_bytes_per_s, settings.nic_latency_s)
        self.site = Site(
            self.clock, store, network, gpu, settings,
            Cores(settings.shared_prefill, settings.shared_decode),
        )  # fmt: skip
        self.prefills: dict[str, PrefillNode] = {}
        self.decodes: dict[str, DecodeNode] = {}
        self.jobs: list[Job] = []
        self.reported: Callable[[Fleet], None] = lambda fleet: None  # called each report_s
        self._on_over: Callable[[], None] = lambda: None
        self._alive = 0
        self._copies = 0
        self._make_workers(calibrate(gpu, settings.chunk_tokens))

    @property
    def _workers(self) -> list[PrefillNode | DecodeNode]:
        return [*self.prefills.values(), *self.decodes.values()]

    def _make_workers(self, calibration: Calibration) -> None:
        settings = self.settings
        nodes = [f"s{number}" for number in range(settings.prefills + settings.decodes)]
        for node_id in nodes:
            self.site.store.add_node(node_id, settings.node_blocks)
        for number, node_id in enumerate(nodes):
            is_prefill = number < settings.prefills
            name = f"p{number}" if is_prefill else f"d{number - settings.prefills}"
            jitter = Jitter(settings.jitter, settings.seed, number)
            if is_prefill:
                self.prefills[name] = PrefillNode(
                    name,
                    LIFE,
                    node_id,
                    self.site,
                    jitter,
                    calibration.prefill.estimate,
                    self._begun,
                    self._prefilled,
                )
            else:
                estimate = calibration.decode.estimate
                self.decodes[name] = DecodeNode(
                    name, LIFE, node_id, self.site, jitter, estimate, self._over
                )
            self.site.store.add_worker(self._info(name, node_id, nodes, is_prefill, calibration))

    def _info(
        self, name: str, node_id: str, nodes: Sequence[str], is_prefill: bool, fits: Calibration
    ) -> WorkerInfo:
        settings, site = self.settings, self.site
        rates = dict.fromkeys(nodes, settings.nic_bytes_per_s)
        rates[node_id] = settings.host_to_gpu_bytes_per_s
        return WorkerInfo(
            worker_id=name, incarnation=LIFE, role="prefill" if is_prefill else "decode",
            node_id=node_id, fingerprint="print", description="", inbox=name,
            block_tokens=settings.block_tokens, block_bytes=site.block_bytes,
            context_tokens_max=CONTEXT_TOKENS_MAX, pages_max=site.pages_max,
            slots_max=settings.waiting_max if is_prefill else settings.decode_slots,
            prefill_coefficients=fits.prefill.estimate.coefficients,
            decode_coefficients=fits.decode.estimate.coefficients,
            transfer_bytes_per_s=rates,
            transfer_latency_s=dict.fromkeys(nodes, settings.nic_latency_s),
        )  # fmt: skip

    def run(
        self,
        offered: Sequence[Offered],
        speed: float = 1.0,
        on_over: Callable[[], None] = lambda: None,
    ) -> list[Job]:
        """Replay, `speed` times as fast as recorded, until the last request is over."""
        assert not self.jobs and speed > 0, "a fleet runs once"
        self._alive, self._on_over = len(offered), on_over
        for one in offered:
            self.clock.at(one.at_s / speed, self._arrive, one)
        self.clock.after(self.settings.tick_s, self._tick)
        self.clock.after(self.settings.report_s, self._report)
        self.clock.run()
        self.check()
        return self.jobs

    # -- a request's way

    def _arrive(self, one: Offered) -> None:
        request = Request(
            f"r{one.number}-1", one.prompt_tokens, one.keys,
            max(self.settings.max_tokens, one.output_tokens),
        )  # fmt: skip
        job = Job(one.number, request, one.output_tokens, self.clock.now_s)
        self.jobs.append(job)
        self._decide(job)

    def _decide(self, job: Job) -> None:
        decision = self.conductor.on_request(job.request, self.clock.now_s)
        if isinstance(decision, Reject):
            job.reject = decision
            self._count_over()
            return
        job.route = decision
        self.prefills[decision.prefill.worker_id].submit(job, decision.order_key_s)

    def _begun(self, job: Job) -> None:
        """The first layers will be there soon: decode may reserve a place and read along."""
        assert job.route is not None
        if job.output_tokens > 1:
            paced_s = prompt_s(
                self.site.gpu, job.cached_tokens, job.prompt_tokens, self.settings.chunk_tokens
            )
            decode = self.decodes[job.route.decode.worker_id]
            decode.expect(job, job.route.prefill.node_id, paced_s)

    def _prefilled(self, job: Job) -> None:
        """The first token is there, or the worker could not make it."""
        assert job.route is not None
        decode, now_s = self.decodes[job.route.decode.worker_id], self.clock.now_s
        if job.refused:
            decode.forget(job.request_id)
            self._over(job)
            return
        self.conductor.on_prefill_finished(job.request_id, now_s, job.cached_tokens, job.compute_s)
        if job.output_tokens <= 1:
            job.finished_s = now_s
            self._over(job)
            return
        if decode.is_dead:
            self.conductor.on_worker_failed(decode.worker_id, decode.incarnation, now_s)
            self.lost([job], decode.worker_id)
        elif not decode.submit(job, self.config.arrival_tbt_slo_s):
            self.conductor.on_worker_refused(decode.worker_id, decode.incarnation, now_s)
            self._over(job)

    def _over(self, job: Job) -> None:
        """All tokens are there, or the request was refused on its way."""
        self.site.store.release(job.request_id)
        output_tokens = None if job.refused else job.output_tokens
        self.conductor.on_finished(job.request_id, self.clock.now_s, output_tokens)
        self._count_over()

    def _count_over(self) -> None:
        self._alive -= 1
        self._on_over()

    def lost(self, jobs: Sequence[Job], worker_id: str) -> None:
        """These jobs' worker is gone: another try elsewhere, or the end of it."""
        for job in jobs:
            assert job.route is not None
            self.decodes[job.route.decode.worker_id].forget(job.request_id)
            self.site.store.release(job.request_id)
            self.conductor.on_finished(job.request_id, self.clock.now_s)
            if job.tries == self.settings.attempts_max:
                job.refused = "worker_lost"
                self._count_over()
                continue
            job.tries += 1
            job.lost_compute_s = job.own_compute_s
            job.request = replace(
                job.request, request_id=f"r{job.number}-{job.tries}",
                excluded_workers=job.request.excluded_workers | {(worker_id, LIFE)},
            )  # fmt: skip
            job.started_s = job.prefilled_s = job.joined_s = None
            self._decide(job)

    # -- what goes on beside

    def _on_events(self, events: Sequence[Event]) -> None:
        self.conductor.on_events(events, self.clock.now_s)

    def _report(self) -> None:
        self.site.store.report([w.report() for w in self._workers if not w.is_dead])
        self.reported(self)
        if self._alive:
            self.clock.after(self.settings.report_s, self._report)

    def _tick(self) -> None:
        for suggestion in self.conductor.on_tick(self.clock.now_s):
            self._copy(suggestion)
        if self._alive:
            self.clock.after(self.settings.tick_s, self._tick)

    def _copy(self, suggestion: Replicate) -> None:
        """The target node brings the blocks there itself (backends/frontend/hot_copies.py)."""
        self._copies += 1
        owner, site = f"copy-{self._copies}", self.site
        found = site.store.find(suggestion.block_keys, suggestion.target_node, owner)
        keys = suggestion.block_keys[: len(found.copies)]
        source = suggestion.source_node

        def arrived() -> None:
            site.store.put(keys, suggestion.target_node, owner)
            site.store.release(owner)

        if keys and source != suggestion.target_node:
            size_bytes = len(keys) * site.block_bytes
            site.network.send(source, suggestion.target_node, size_bytes, arrived)
        else:
            site.store.release(owner)

    def check(self) -> None:
        """Every request ended exactly once, and nothing of it stayed anywhere."""
        assert self._alive == 0, f"{self._alive} requests never ended"
        assert all(job.is_over for job in self.jobs)
        for worker in self._workers:
            worker.check()
        self.site.network.check()
        self.conductor.check()
        self.site.store.directory.check()
        stats = self.site.store.directory.stats(self.clock.now_s)
        assert (stats.leases, stats.ephemeral) == (0, 0), "leases or objects stayed behind"
