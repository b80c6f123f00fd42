"""Simulated clusters: the real Conductor, simulated workers, one virtual clock.

`SimulatedCluster` has what all kinds share: requests of a trace arrive, are decided on, and end.
`SimulatedFleet` has the workers of this project, with the real Directory. The order of calls is
that of the frontend (backends/frontend): decide, prefill, report its end to the conductor, decode,
report the end. A request whose worker was lost is retried on another worker. With several frontends
each decides on its own requests and sends what it routed to the others as notes. Workers report
every second, events of the directory reach the conductors at once, and their suggestions for hot
prefixes are carried out.

Faults are a list of what breaks, and when: a worker gets slow, is killed, or its host is lost.

    slow   every step takes `factor` times as long from then on; 1.0 ends the fault
    kill   the worker's process ends; its frontend notices and retries its requests elsewhere, the
           directory misses its reports after the TTL; blocks on its node stay
    host   the same, and the blocks of its storage node are lost

A lost attempt begins again from its prompt, while the real frontend resumes after the tokens that
the client has. Its prefix is in the store unless the host was lost too.

Not here: what an experiment reads from the outcome (experiments/), a worker's own work
(prefill_node.py, decode_node.py), Dynamo's workers (../dynamo).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from backends.frontend.lifecycle.attempts import WORKER_FULL_KINDS
from backends.frontend.routing_notes import ALIVE_S, NOTES_MAX, NOTES_S
from conductor import Conductor, ConductorConfig, Reject, Replicate, Request
from conductor.notes import NoteBatch
from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.decode_node import DecodeNode
from loadtest.simulator.cluster.gpu import GpuModel, calibrate
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.pipeline import PipelineHead, PipelineStage, hop_s, stage_estimate
from loadtest.simulator.cluster.prefill_node import PrefillNode
from loadtest.simulator.cluster.site import ClusterSettings, Cores, SimulatedSite, SimulatedWorker
from loadtest.simulator.cluster.ssd import SimulatedSsds
from loadtest.simulator.cluster.steps import Jitter
from loadtest.simulator.cluster.store import INCARNATION, SimulatedStore
from mooncake_store.records.events import Event
from mooncake_store.records.membership import WorkerInfo

# Workers report how fast each node reaches them. All paths are equal here, and a larger fleet would
# have millions of them, so there the conductor gets one configured number.
PATHS_NODES_MAX = 256
DRAIN_LOOK_S, IDLE_S = 0.25, 1.0
CONTEXT_TOKENS_MAX = 1_000_000  # no prompt of a published trace is longer


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    worker_id: str
    kind: Literal["slow", "kill", "host"]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Flip:
    worker_id: str
    role: str  # its new role
    began_s: float  # start of draining
    ended_s: float


class SimulatedCluster:
    """One run: requests arrive, are decided on and end. Used once."""

    def __init__(
        self, max_tokens: int, config: ConductorConfig | None = None, frontends: int = 1
    ) -> None:
        """Without a `config` no conductor decides."""
        self.config = config or ConductorConfig()
        self.clock = VirtualClock()
        self.conductors = [
            Conductor(self.config, frontend=f"f{number}") for number in range(frontends)
        ]
        self.jobs: list[SimulatedJob] = []
        self._max_tokens = max_tokens  # output limit that clients send, unless the answer is longer
        self._alive = 0  # requests that have not ended
        self._on_over: Callable[[], None] = lambda: None

    def run(
        self,
        offered: Sequence[Offered],
        speed: float = 1.0,
        on_over: Callable[[], None] = lambda: None,
    ) -> list[SimulatedJob]:
        """Replay, `speed` times as fast as recorded, until the last request has ended."""
        assert not self.jobs and speed > 0, "a cluster runs once"
        self._alive, self._on_over = len(offered), on_over
        for at_s, came in itertools.groupby(offered, lambda one: one.at_s):
            self.clock.at(at_s / speed, self._arrive, list(came))
        self._begin_reports()
        self.clock.run()
        self.check()
        return self.jobs

    @property
    def conductor(self) -> Conductor:
        """The only conductor, or the first of several."""
        return self.conductors[0]

    def _of(self, job: SimulatedJob) -> Conductor:
        """The conductor of the request's frontend; frontends get requests in turns."""
        return self.conductors[job.number % len(self.conductors)]

    def _arrive(self, came: Sequence[Offered]) -> None:
        for one in came:
            tokens_max = max(self._max_tokens, one.output_tokens)
            request = Request(f"r{one.number}-1", one.prompt_tokens, one.keys, tokens_max)
            job = SimulatedJob(one.number, request, one.output_tokens, self.clock.now_s)
            self.jobs.append(job)
            self._decide(job)

    def _decide(self, job: SimulatedJob) -> None:
        decision = self._of(job).on_request(job.request, self.clock.now_s)
        if isinstance(decision, Reject):
            job.reject = decision
            self._count_over()
            return
        job.route = decision
        job.prefill, job.decode = decision.prefill.worker_id, decision.decode.worker_id
        self._submit(job, decision.order_key_s)

    def _submit(self, job: SimulatedJob, order_key_s: float) -> None:
        raise NotImplementedError

    def _begin_reports(self) -> None:
        """Start periodic actions, which run while requests are left."""

    def _count_over(self) -> None:
        self._alive -= 1
        self._on_over()

    def check(self) -> None:
        """Assert that every request ended exactly once."""
        assert self._alive == 0, f"{self._alive} requests never ended"
        assert all(job.is_over for job in self.jobs)
        for one in self.conductors:
            one.check()


class SimulatedFleet(SimulatedCluster):
    """Workers of this project, each with its node of the real store."""

    def __init__(
        self,
        config: ConductorConfig,
        settings: ClusterSettings,
        gpu: GpuModel,
        faults: Sequence[Fault] = (),
    ) -> None:
        nodes = settings.prefills + settings.decodes
        if nodes > PATHS_NODES_MAX:
            config = replace(
                config,
                transfer_bytes_per_s=settings.nic_bytes_per_s,
                transfer_latency_s=settings.nic_latency_s,
            )
        super().__init__(settings.max_tokens, config, settings.frontends)
        self.settings = settings
        store = SimulatedStore(
            self.clock,
            self._on_events,
            settings.eviction,
            nodes,
            max(settings.node_blocks, settings.pipeline_home_blocks) + settings.ssd_blocks,
        )
        network = Network(self.clock, settings.nic_bytes_per_s, settings.nic_latency_s)
        self.site = SimulatedSite(
            self.clock,
            store,
            network,
            gpu,
            settings,
            Cores(settings.sharing, settings.workers_at_once),
            SimulatedSsds(
                self.clock, store, settings.disk_rates, settings.block_tokens * gpu.token_bytes
            ),
        )
        self.prefills: dict[str, PrefillNode] = {}  # prefill workers that requests are sent to
        self.stages: dict[str, PipelineStage] = {}  # later stages of pipeline groups
        self.decodes: dict[str, DecodeNode] = {}
        # called every report_s seconds
        self.reported: Callable[[SimulatedFleet], None] = lambda fleet: None
        self._copies = 0
        self.refusals = 0  # refusals that led to another worker
        self.flips: list[Flip] = []  # ordered by their end
        self._alive_due_s = dict.fromkeys(self.conductors, 0.0)
        self._node_ids = [f"s{number}" for number in range(nodes)]
        self._calibration = calibrate(gpu, settings.chunk_tokens)
        self._make_workers()
        for fault in faults:
            assert fault.worker_id in self.prefills or fault.worker_id in self.decodes, fault
            assert fault.factor > 0, fault
            self.clock.at(fault.at_s, self._inject, fault)

    @property
    def _workers(self) -> list[PrefillNode | PipelineStage | DecodeNode]:
        return [*self.prefills.values(), *self.stages.values(), *self.decodes.values()]

    def _make_workers(self) -> None:
        settings = self.settings
        staged = settings.pipeline_groups * settings.pipeline_stages
        for number, node_id in enumerate(self._node_ids):
            blocks = settings.node_blocks
            if number < staged and number % settings.pipeline_stages == 0:
                blocks = settings.pipeline_home_blocks or blocks
            self.site.store.add_node(node_id, blocks, settings.ssd_blocks)
        for number, node_id in enumerate(self._node_ids):
            is_prefill = number < settings.prefills
            name = f"p{number}" if is_prefill else f"d{number - settings.prefills}"
            if number < staged:
                self._add_stage(name, node_id, number)
            else:
                self._add_worker(name, node_id, "prefill" if is_prefill else "decode", INCARNATION)

    def _site_of(self, worker_id: str) -> SimulatedSite:
        """The site as this worker uses it."""
        return self.site

    def _add_stage(self, name: str, node_id: str, number: int) -> None:
        """This prefill node computes a share of the layers."""
        settings, whole = self.settings, self._calibration.prefill.estimate
        count = settings.pipeline_stages
        group, stage = divmod(number, count)
        what = name, node_id, self.site, Jitter(settings.jitter, settings.seed, number)
        if stage == 0:
            head = PipelineHead(*what, whole, count, self._begun, self._prefilled)
            self.prefills[name] = head
            info = self._info(head, "prefill")
        else:
            follower = self.stages[name] = PipelineStage(*what, 1 / count)
            first = self.prefills[f"p{group * count}"]
            assert isinstance(first, PipelineHead), first
            first.add(follower)
            info = self._info(follower, "prefill")
        self.site.store.add_worker(
            replace(
                info,
                pipeline_group=f"g{group}",
                pipeline_stage=stage,
                pipeline_stages=count,
                pipeline_hop_s=hop_s(self.site),
                chunk_tokens=settings.chunk_tokens,
                prefill_coefficients=stage_estimate(whole, count).coefficients,
            )
        )

    def _add_worker(self, name: str, node_id: str, role: str, incarnation: str) -> None:
        settings, fits = self.settings, self._calibration
        jitter = Jitter(settings.jitter, settings.seed, int(node_id[1:]))
        what = name, node_id, self._site_of(name), jitter
        if role == "prefill":
            worker: PrefillNode | DecodeNode = PrefillNode(
                *what, fits.prefill.estimate, self._begun, self._prefilled
            )
            self.prefills[name] = worker
        else:
            worker = self.decodes[name] = DecodeNode(*what, fits.decode.estimate, self._over)
        worker.incarnation = incarnation
        self.site.store.add_worker(self._info(worker, role))

    def _info(self, worker: SimulatedWorker, role: str) -> WorkerInfo:
        settings, site, fits = self.settings, self.site, self._calibration
        far = self._node_ids if len(self._node_ids) <= PATHS_NODES_MAX else ()
        rates = dict.fromkeys(far, settings.nic_bytes_per_s)
        rates[worker.node_id] = settings.host_to_gpu_bytes_per_s
        return WorkerInfo(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            role=role,
            node_id=worker.node_id,
            fingerprint="print",
            description="",
            inbox=worker.worker_id,
            block_tokens=settings.block_tokens,
            block_bytes=site.block_bytes,
            is_native=True,  # the simulated nodes count blocks, whatever their bytes
            context_tokens_max=CONTEXT_TOKENS_MAX,
            pages_max=site.pages_max,
            slots_max=settings.waiting_max if role == "prefill" else settings.decode_slots,
            prefill_coefficients=fits.prefill.estimate.coefficients,
            decode_coefficients=fits.decode.estimate.coefficients,
            transfer_bytes_per_s=rates,
            transfer_latency_s=dict.fromkeys(far, settings.nic_latency_s),
            can_flip=True,  # where role_flips is on
        )

    # -- the path of a request

    def _submit(self, job: SimulatedJob, order_key_s: float) -> None:
        if self.settings.serving_s:
            self.clock.after(self.settings.serving_s, self._came, job, order_key_s)
        else:
            self._came(job, order_key_s)

    def _came(self, job: SimulatedJob, order_key_s: float) -> None:
        """Submit to the prefill worker, which may have died while the request was on its way."""
        worker = self.prefills[job.prefill]
        if worker.is_dead:
            self._lost([job], worker.worker_id, worker.incarnation)
        else:
            worker.submit(job, order_key_s)

    def _begun(self, job: SimulatedJob) -> None:
        """The first layers will be announced soon: decode may reserve a slot and read along."""
        assert job.route is not None
        decode = self._decode_of(job)
        if job.output_tokens > 1 and decode is not None:
            paced_s = self.prefills[job.prefill].paced_s(job)
            decode.expect(job, job.route.prefill.node_id, paced_s)

    def _decode_of(self, job: SimulatedJob) -> DecodeNode | None:
        """The worker that generates the answer; None when that worker has changed its role."""
        decode = self.decodes.get(job.decode)
        assert job.route is not None
        is_it = decode is not None and decode.incarnation == job.route.decode.incarnation
        return decode if is_it else None

    def _prefilled(self, job: SimulatedJob) -> None:
        """The first token is computed, or the worker failed."""
        decode, now_s = self._decode_of(job), self.clock.now_s
        if job.refused:
            self._forget(job)
            self._refused(job, job.prefill)
            return
        conductor = self._of(job)
        conductor.on_prefill_finished(job.request_id, now_s, job.cached_tokens, job.compute_s)
        if job.output_tokens <= 1:
            job.first_token_s = job.finished_s = now_s
            self._over(job)
            return
        if decode is None:
            assert job.route is not None
            self._lost([job], job.route.decode.worker_id, job.route.decode.incarnation)
        elif decode.is_dead:
            conductor.on_worker_failed(decode.worker_id, decode.incarnation, now_s)
            self._lost([job], decode.worker_id, decode.incarnation)
        elif not decode.submit(job, self.config.arrival_tbt_slo_s(job.route.limits)):
            conductor.on_worker_refused(decode.worker_id, decode.incarnation, now_s)
            self._refused(job, decode.worker_id)

    def _refused(self, job: SimulatedJob, worker_id: str) -> None:
        """A worker's limits were reached: with several frontends another worker is tried."""
        is_full = job.refused in WORKER_FULL_KINDS and len(self.conductors) > 1
        if is_full and job.attempts < self.settings.attempts_max:
            self.refusals += 1
            job.refused = ""
            self._lost([job], worker_id, INCARNATION)
        else:
            self._over(job)

    def _over(self, job: SimulatedJob) -> None:
        """The request has all tokens, or was refused on its way."""
        self.site.store.release(job.request_id)
        output_tokens = None if job.refused else job.output_tokens
        self._of(job).on_finished(job.request_id, self.clock.now_s, output_tokens)
        self._count_over()

    def _forget(self, job: SimulatedJob) -> None:
        if (decode := self._decode_of(job)) is not None:
            decode.forget(job.request_id)

    def _lost(self, jobs: Sequence[SimulatedJob], worker_id: str, incarnation: str) -> None:
        """The worker of these jobs is gone: retry each on another worker, or end it."""
        for job in jobs:
            self._forget(job)
            self.site.store.release(job.request_id)
            self._of(job).on_finished(job.request_id, self.clock.now_s)
            if job.attempts == self.settings.attempts_max:
                job.refused = "worker_lost"
                self._count_over()
                continue
            job.attempts += 1
            job.lost_compute_s = job.own_compute_s
            job.request = replace(
                job.request,
                request_id=f"r{job.number}-{job.attempts}",
                excluded_workers=job.request.excluded_workers | {(worker_id, incarnation)},
            )
            job.started_s = job.prefilled_s = job.first_token_s = job.joined_s = None
            job.load_began_s, job.loading_s = None, 0.0
            self._decide(job)

    def _inject(self, fault: Fault) -> None:
        worker = self.prefills.get(fault.worker_id) or self.decodes[fault.worker_id]
        if fault.kind == "slow":
            worker.slowness = fault.factor
            return
        if worker.is_dead:
            return
        jobs = worker.die()
        for one in self.conductors:
            one.on_worker_failed(worker.worker_id, worker.incarnation, self.clock.now_s)
        if fault.kind == "host":
            self.site.store.lose_node(worker.node_id)
        self._lost(jobs, worker.worker_id, worker.incarnation)

    # -- role changes

    def flip(self, worker_id: str) -> None:
        """Drain a worker and restart it in the other role; the blocks on its node stay."""
        worker = self.prefills.get(worker_id) or self.decodes[worker_id]
        assert not worker.is_draining and not worker.is_dead, worker_id
        worker.is_draining = True
        self.site.store.report([worker.report()])
        self._drain(worker, self.clock.now_s, self.clock.now_s)

    def _drain(self, worker: PrefillNode | DecodeNode, began_s: float, idle_since_s: float) -> None:
        """Poll until the worker has been idle for IDLE_S, then change its role."""
        if worker.is_dead:
            return
        name, now_s = worker.worker_id, self.clock.now_s
        if not worker.is_idle:
            idle_since_s = now_s
        if now_s - idle_since_s < IDLE_S:
            if self._alive:
                self.clock.after(DRAIN_LOOK_S, self._drain, worker, began_s, idle_since_s)
            return
        role = "prefill" if name in self.decodes else "decode"
        worker.check()
        worker.is_dead = True
        (self.decodes if role == "prefill" else self.prefills).pop(name)
        self.site.store.remove_worker(name, worker.incarnation)
        self.flips.append(Flip(name, role, began_s, now_s))
        self._add_worker(name, worker.node_id, role, f"incarnation{len(self.flips) + 1}")

    # -- periodic actions

    def _on_events(self, events: Sequence[Event]) -> None:
        for one in self.conductors:
            one.on_events(events, self.clock.now_s)

    def _begin_reports(self) -> None:
        if self.settings.notes_latency_s is not None and len(self.conductors) > 1:
            self._tell(self.settings.notes_latency_s)
        self.clock.after(self.settings.tick_s, self._tick)
        self.clock.after(self.settings.report_s, self._report)
        if self.settings.ssd_blocks:
            nodes = [worker.node_id for worker in self._workers]
            self.site.ssds.spill_all(nodes, lambda: not self._alive)

    def _report(self) -> None:
        self.site.store.report([w.report() for w in self._workers if self._speaks(w)])
        self.reported(self)
        if self._goes_on():
            self.clock.after(self.settings.report_s, self._report)

    def _speaks(self, worker: PrefillNode | DecodeNode) -> bool:
        return not worker.is_dead

    def _goes_on(self) -> bool:
        return bool(self._alive)

    def _tick(self) -> None:
        for one in self.conductors:
            for suggestion in one.on_tick(self.clock.now_s):
                self._copy(suggestion)
            proposed = one.propose_flip(self.clock.now_s)
            if proposed is not None and self.config.role_flips == "on":
                self.flip(proposed.worker.worker_id)
        if self._goes_on():
            self.clock.after(self.settings.tick_s, self._tick)

    def _tell(self, latency_s: float) -> None:
        """Send each frontend's notes to all others, as in backends/frontend/routing_notes.py."""
        now_s = self.clock.now_s
        for one in self.conductors:
            if one.notes_waiting or now_s >= self._alive_due_s[one]:
                self._alive_due_s[one] = now_s + ALIVE_S
                self.clock.after(latency_s, self._hear, one, one.take_notes(now_s, NOTES_MAX))
        if self._alive or any(one.notes_waiting for one in self.conductors):
            self.clock.after(NOTES_S, self._tell, latency_s)

    def _hear(self, teller: Conductor, notes: NoteBatch) -> None:
        for one in self.conductors:
            if one is not teller:
                one.on_routed_elsewhere(notes, self.clock.now_s)

    def _copy(self, suggestion: Replicate) -> None:
        """The target node copies the blocks itself (backends/frontend/cluster_view.py)."""
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
        """Assert that every request ended exactly once and left nothing behind."""
        super().check()
        for worker in self._workers:
            worker.check()
        self.site.network.check()
        self.site.ssds.check()
        self.site.store.directory.check()
        assert all(one.stats().routed_elsewhere == 0 for one in self.conductors)
        stats = self.site.store.directory.stats(self.clock.now_s)
        assert (stats.leases, stats.ephemeral) == (0, 0), "leases or objects stayed behind"
