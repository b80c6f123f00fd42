"""The conductor's state machine: it turns events, reports and requests into routes and rejections.

The conductor holds all decision state, reads no clock and does no I/O. The same class therefore
runs in the frontend's process and in the simulator. The caller (ClusterView, or the simulator)
serialises the calls with a lock and carries out the results. Threads may read the clock before they
take the lock, so a `now_s` below the largest value so far is raised to that value.

    on_snapshot, on_events, on_silence  receive the directory's state, its events, gaps in events
    on_arrival                          checks the limits of the tenant before a prompt is parsed
    on_charged                          charges the tenant for an invalid request or /tokenize
    on_request                          returns a Route, whose load is reserved, or a Reject
    on_prefill_finished                 moves a request's load from prefill to the decode worker
    on_finished                         drops the reservations of a request that has ended
    on_used                             returns unused tokens to the limit of the tenant
    on_worker_failed                    excludes a worker after a failed call
    on_worker_reached                   excludes a worker without a network path
    on_worker_refused                   marks a decode worker as full after it refused a request
    on_routed_elsewhere, take_notes     receive and send the notes of frontends (notes.py)
    on_tick                             expires old state and suggests copies of hot prefixes
    propose_flip                        names a worker that should change its role
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from conductor.admission.admission import (
    LOAD_POLICIES,
    Gate,
    RejectionCase,
    decode_loads,
    load_reserved,
    pressure_on,
    reject_for,
    reject_untaken,
)
from conductor.admission.fair_share import Pressure
from conductor.admission.limits import ServiceLimits
from conductor.admission.tenant_quotas import TenantQuotas
from conductor.config import ConductorConfig
from conductor.estimates.measured import RelativeErrors
from conductor.load.cluster import Cluster, InFlightRequest
from conductor.load.other_frontends import OtherFrontends
from conductor.messages import (
    Candidate,
    ConductorStats,
    Explanation,
    HeatClass,
    HotPrefix,
    Reject,
    Replicate,
    Request,
    RoleFlip,
    Route,
    TenantLimits,
    WorkerStatus,
    prefilled,
)
from conductor.notes import EndedNote, NoteBatch, OutgoingNotes, PrefilledNote, RoutedNote
from conductor.replication.hotspots import Hotspots
from conductor.roles.balance import RoleBalance
from conductor.routing.compiled import CompiledDecision, RouteQuery
from conductor.routing.routing import DecodeOption, Options, Pair
from conductor.routing.tiers import Tiers
from mooncake_store.prefix_index.prefix_index import PrefixIndex
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    FrontendNoted,
    NodeDown,
    NodeUp,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)


@dataclass(slots=True)
class _Totals:
    """Counters of ConductorStats, where their meaning is described."""

    requests: int = 0
    routed: int = 0
    fetches: int = 0
    fetched_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replicated_blocks: int = 0


FLIPS_KEY = b"role flips"  # hashed to select the one frontend that proposes role flips


class Conductor:
    """Decides without sleeping, sending or reading a clock. Not thread-safe."""

    def __init__(self, config: ConductorConfig, frontend: str = "") -> None:
        """`frontend`: name of this frontend's incarnation; needed where several frontends run."""
        problems = config.problems()
        assert not problems, "invalid ConductorConfig: " + "; ".join(problems)
        self.config = config
        self._tiers = Tiers(PrefixIndex(config.index_blocks_max))
        self._cluster = Cluster(config)
        self._others = OtherFrontends(self._cluster, config.frontend_silent_s_max)
        self._noted = OutgoingNotes(frontend)
        self._hotspots = Hotspots(config)
        self._quotas = TenantQuotas(config.request_s_max)
        self._prefill_errors, self._ttft_errors = RelativeErrors(), RelativeErrors()
        self._limits = limits = ServiceLimits(config, self._cluster)
        self._gate = Gate(config, limits)
        self._balance = None if config.role_flips == "off" else RoleBalance(self._cluster, limits)
        is_reserved = LOAD_POLICIES[config.admission] is load_reserved
        self._loads = None if is_reserved else decode_loads  # None: the pool has the reserved loads
        self._compiled = CompiledDecision.of(self._cluster)
        self._now_s = float("-inf")
        self._totals = _Totals()
        self._rejected: Counter[str] = Counter()
        self._advised: Counter[str] = Counter()

    # Directory events

    def on_snapshot(self, snapshot: Snapshot, now_s: float) -> None:
        """Replace the known cluster by a snapshot. Workers in the snapshot keep reservations."""
        now_s = self._advance(now_s)
        nodes = {info.node_id: info.incarnation for info in snapshot.nodes}
        for node_id, known in list(self._cluster.nodes.items()):
            if nodes.get(node_id) != known.incarnation:
                self._node_down(node_id, known.incarnation)
        keys = {(info.worker_id, info.incarnation) for info in snapshot.workers}
        for key in [known for known in self._cluster.workers if known not in keys]:
            self._cluster.worker_down(key)
        self._tiers.clear()
        for block_key, holders in snapshot.holders:
            for node_id in holders:
                self._tiers.add_many((block_key,), node_id)
                self._hotspots.arrived((block_key,), node_id)
        self.on_events([NodeUp(info) for info in snapshot.nodes], now_s)
        self.on_events([WorkerUp(info) for info in snapshot.workers], now_s)
        self.on_events([WorkerReported(report) for report in snapshot.reports], now_s)

    def on_events(self, events: Iterable[Event], now_s: float) -> None:
        """Apply events in order. Consecutive block events of one type and node are batched."""
        now_s = self._advance(now_s)
        kind: type[BlockAdded] | type[BlockRemoved] = BlockAdded
        node_id = ""  # of the collected block events
        keys: list[bytes] = []
        for event in events:
            if event.__class__ is BlockAdded or event.__class__ is BlockRemoved:
                if event.__class__ is not kind or event.node_id != node_id:
                    if keys:
                        self._index(kind, keys, node_id)
                    kind, keys, node_id = event.__class__, [], event.node_id
                keys.append(event.key)
                continue
            if keys:
                self._index(kind, keys, node_id)
                keys = []
            if isinstance(event, WorkerReported):
                self._cluster.worker_reported(event.report, now_s)
            elif isinstance(event, WorkerUp):
                self._cluster.worker_up(event.info, now_s)
            elif isinstance(event, WorkerDown):
                self._cluster.worker_down((event.worker_id, event.incarnation))
            elif isinstance(event, NodeUp):
                self._cluster.node_up(event.info)
            elif isinstance(event, NodeDown):
                self._node_down(event.node_id, event.incarnation)
            elif isinstance(event, FrontendNoted):
                pass  # the caller decodes the notes and calls on_routed_elsewhere
            else:
                raise TypeError(f"{type(event).__name__} is not a directory event")
        if keys:
            self._index(kind, keys, node_id)

    def _index(
        self, kind: type[BlockAdded] | type[BlockRemoved], keys: Sequence[bytes], node_id: str
    ) -> None:
        if kind is BlockRemoved:
            self._tiers.remove_many(keys, node_id)
            return
        self._tiers.add_many(keys, node_id)
        self._hotspots.arrived(keys, node_id)

    def on_silence(self, seconds: float, now_s: float) -> None:
        """Extend all report deadlines by `seconds`, during which the directory sent no events."""
        self._cluster.excuse(seconds, self._advance(now_s))

    def _node_down(self, node_id: str, incarnation: str) -> None:
        if self._cluster.node_down(node_id, incarnation):
            self._tiers.drop_holder(node_id)
            self._hotspots.node_down(node_id)

    # Requests

    def on_arrival(
        self, tenant: str, limits: TenantLimits, in_flight: int | None, now_s: float, asked: int = 1
    ) -> Reject | None:
        """The rejection of `asked` unparsed requests by their tenant's limits; None: none.

        `in_flight`: the tenant's requests at this frontend, including requests still being parsed.
        None for a call that generates nothing, such as /tokenize.
        """
        now_s = self._advance(now_s)
        if in_flight is not None:
            in_flight += self._others.in_flight_of(tenant)
        used_up = self._quotas.arrival_rejection(tenant, limits, in_flight, now_s, asked)
        if used_up is None:
            return None
        self._totals.requests += 1
        return self._refuse(used_up)

    def on_charged(self, tenant: str, now_s: float) -> None:
        """Charge the tenant one request, for an invalid request or a call of /tokenize."""
        usage = self._quotas.charged(tenant, self._advance(now_s))
        if self._others:
            self._noted.add(usage)

    def on_request(self, request: Request, now_s: float) -> Route | Reject:
        """The route of this request, or its rejection. Both outcomes drop the reservations of an
        earlier request with the same request_id."""
        assert request.prompt_tokens > 0 and request.output_tokens_max >= 0, request
        now_s = self._advance(now_s)
        self._drop(request.request_id, now_s)
        self._totals.requests += 1
        elsewhere = self._others.in_flight_of(request.tenant)
        if used_up := self._quotas.rejection(request, elsewhere, now_s):
            return self._refuse(used_up)
        options = self._options(request, now_s)
        if isinstance(options, Reject):
            return self._refuse(options)
        pair = options.best()
        if self._balance is not None:
            prefill_s = pair.predicted.prefill_s * (not request.is_prefilled)
            self._balance.demand.asked(prefill_s, request.prompt_tokens, pair.decode.worker, now_s)
        self._limits.note(options.limits)
        pressure = self._pressure(options, pair.decode)
        kind, advice = self._gate.rejection(pair, request, pressure, options.limits), None
        if kind:
            shed = self._gate.shed(pair, request, pressure) if kind == "fair_share" else None
            rejection = reject_for(
                kind, RejectionCase(pair, options, request, shed, now_s, self._cluster)
            )
            if not self.config.advisory:
                self._gate.note(pair, request, pressure, now_s, kind)
                return self._refuse(rejection)
            advice = rejection
            self._advised[kind] += 1
        self._gate.note(pair, request, pressure, now_s, "")
        return self._reserve_route(request, pair, options, advice, now_s)

    def explain(self, request: Request, now_s: float, count_max: int | None = None) -> Explanation:
        """At most `count_max` pairs (None: all) with predictions and verdicts: the chosen pair, and
        then the others by TTFT. Empty if a role has no usable worker. Reserves nothing."""
        now_s = max(now_s, self._now_s)
        options = self._options(request, now_s)
        if isinstance(options, Reject):
            return Explanation((), 0)
        chosen = options.best()
        best = (chosen.prefill.worker, chosen.decode.worker)
        ranked = [
            (
                (prefill.worker, decode.worker) != best,
                prefill.start_s + options.handover_s(prefill, decode),
                decode.tbt_s,
                (prefill, decode),
            )
            for prefill, decode in itertools.product(options.prefills, options.decodes)
        ]
        shown = len(ranked) if count_max is None else min(count_max, len(ranked))
        candidates = []
        for is_other, _, _, (prefill, decode) in heapq.nsmallest(shown, ranked, lambda r: r[:3]):
            pair = options.pair(prefill, decode)
            pressure = self._pressure(options, decode)
            verdict = self._gate.rejection(pair, request, pressure, options.limits)
            candidates.append(_candidate(pair, verdict or ("slower" if is_other else "chosen")))
        return Explanation(tuple(candidates), len(ranked) - shown, options.limits)

    def _pressure(self, options: Options, decode: DecodeOption) -> Pressure:
        return pressure_on(options, decode, self._limits, self._others.wanted_of)

    def _options(self, request: Request, now_s: float) -> Options | Reject:
        """The predicted times of each usable worker, or the rejection if a role has none."""
        cluster, excluded = self._cluster, request.excluded_workers
        tokens, prefills, decodes = request.prompt_tokens, cluster.prefills, cluster.decodes
        cluster.look(now_s)
        usable = prefills.usable(now_s, tokens, excluded)
        if not prefills.count(usable):
            return reject_untaken(cluster, "prefill", request, now_s)
        joinable = decodes.usable(now_s, tokens + request.output_tokens_max, excluded)
        if not decodes.count(joinable):
            return reject_untaken(cluster, "decode", request, now_s)
        limits = self._gate.limits(request)
        order = self._gate.order(request, limits)
        query = RouteQuery(cluster, request, (usable, joinable), self._loads, order, limits, now_s)
        return Options.predicted(query, self._tiers, self._compiled)

    def _refuse(self, rejection: Reject) -> Reject:
        self._rejected[rejection.kind] += 1
        return rejection

    def _reserve_route(
        self, request: Request, pair: Pair, options: Options, advice: Reject | None, now_s: float
    ) -> Route:
        prefill, decode = pair.prefill, pair.decode
        route = Route(
            request_id=request.request_id,
            prefill=prefill.worker.ref,
            decode=decode.worker.ref,
            cached_tokens=prefill.cached_tokens,
            local_blocks=prefill.local_blocks,
            fetch_blocks=prefill.fetch_blocks,
            fetch_node=prefill.fetch_node,
            predicted=pair.predicted,
            advice=advice,
            order_key_s=options.order.key_s(now_s, prefill.terms.prefill_s),
            restore_blocks=prefill.restore_blocks,
            second_fetch_node=options.second_fetch_node(prefill),
            limits=options.limits,
        )
        route = prefilled(route, request) if request.is_prefilled else route
        workers = (prefill.worker, decode.worker)
        self._cluster.reserve(route, workers, request, prefill.terms.fetch_s, now_s)
        usage = self._quotas.admitted(request, now_s)
        if self._others:
            self._note_routed(route, request, prefill.terms.fetch_s, now_s)
            if usage is not None:
                self._noted.add(usage)
        totals = self._totals
        totals.routed += 1
        if request.is_prefilled:
            return route
        self._hotspots.note(request.block_keys, prefill.local_blocks + route.fetch_blocks, now_s)
        totals.prompt_tokens += request.prompt_tokens
        totals.cached_tokens += prefill.cached_tokens
        if prefill.source is not None:
            totals.fetches += 1
            totals.fetched_blocks += route.fetch_blocks
        return route

    def on_prefill_finished(
        self, request_id: str, now_s: float, cached_tokens: int, seconds: float | None = None
    ) -> None:
        """Move the load of a request from prefill to decode, after its first token. `seconds`:
        prefill time, None if not reported. Unknown requests and repeated calls are ignored."""
        now_s = self._advance(now_s)
        routed = self._cluster.in_flight.get(request_id)
        if routed is None or routed.prefill_done:
            return
        if not routed.request.is_prefilled:
            self._learn(routed, cached_tokens, seconds, now_s)
        self._cluster.prefill_finished(routed, now_s)
        if self._others:
            took_s = (seconds or 0.0) * (not routed.request.is_prefilled)
            self._noted.add(PrefilledNote(routed.number, now_s, cached_tokens, took_s))

    def _learn(
        self, routed: InFlightRequest, cached_tokens: int, seconds: float | None, now_s: float
    ) -> None:
        """Record the errors of the predicted prefill time and TTFT, and the prefill worker's speed.
        The TTFT here ends with the prefill, so it excludes the hand-over."""
        predicted = routed.route.predicted
        predicted_s, took_s = predicted.ttft_s - predicted.handover_s, now_s - routed.routed_at_s
        self._ttft_errors.add(predicted_s, took_s)
        self._gate.margin.learn(routed.request.prompt_tokens, predicted_s, took_s, now_s)
        if seconds is not None and seconds > 0:
            self._prefill_errors.add(predicted.prefill_s, seconds)
            self._cluster.learn_prefill(routed, cached_tokens, seconds, now_s, now_s)

    def on_finished(self, request_id: str, now_s: float, output_tokens: int | None = None) -> None:
        """Drop all reservations of a completed, failed or cancelled request. Idempotent.

        `output_tokens`: length of a complete answer. None if the request failed or was cancelled,
        or if the length is unknown."""
        now_s = self._advance(now_s)
        routed = self._drop(request_id, now_s, output_tokens)
        if routed is not None:
            self._cluster.learn_decode(routed, output_tokens, now_s)
            if self._balance is not None and output_tokens is not None:
                self._balance.demand.ended(output_tokens, now_s)

    def on_used(self, request_id: str, now_s: float, tokens: int) -> None:
        """Return unused tokens to the tenant's limit, after all attempts of a request have ended.
        `tokens`: prompt and output tokens used. `request_id`: id of the attempt that was charged.
        """
        now_s = self._advance(now_s)
        usage = self._quotas.ended(request_id, tokens, now_s)
        if usage is not None and self._others:
            self._noted.add(usage)

    def _drop(
        self, request_id: str, now_s: float, output_tokens: int | None = None
    ) -> InFlightRequest | None:
        """Drop the reservations of the request, and note its end for other frontends."""
        routed = self._cluster.drop(request_id, now_s)
        if routed is not None and self._others and not routed.is_elsewhere:
            length = -1 if output_tokens is None else output_tokens
            self._noted.add(EndedNote(routed.number, now_s, length))
        return routed

    def on_worker_failed(self, worker_id: str, incarnation: str, now_s: float) -> None:
        """Exclude the worker for failed_mark_s. A report that arrives more than report_lag_s from
        now ends the exclusion earlier."""
        now_s = self._advance(now_s)
        self._cluster.worker_failed((worker_id, incarnation), now_s)

    def on_worker_reached(
        self, worker_id: str, incarnation: str, is_reached: bool, now_s: float
    ) -> None:
        """Exclude the worker while this frontend has no network path to it (`is_reached` False)."""
        self._advance(now_s)
        self._cluster.worker_reached((worker_id, incarnation), is_reached)

    def on_worker_refused(self, worker_id: str, incarnation: str, now_s: float) -> None:
        """Mark a decode worker as full, because it refused an arriving request (arrival_check.py).
        The mark ends after overload_mark_s, or with a report more than report_lag_s from now. A
        marked worker with an empty batch does not count as full."""
        now_s = self._advance(now_s)
        self._cluster.worker_refused((worker_id, incarnation), now_s)
        self._gate.decode_was_short()

    # Notes of other frontends

    def on_routed_elsewhere(self, batch: NoteBatch, now_s: float) -> None:
        """Apply a batch of another frontend's notes; a batch of this frontend is ignored."""
        now_s = self._advance(now_s)
        if batch.frontend != self._noted.frontend:
            if self._others.on_batch(batch, now_s):
                offset_s = now_s - batch.sent_s  # sender's clock to this one; assumes no delay
                for usage in batch.usage:
                    self._quotas.used_elsewhere(usage, usage.at_s + offset_s, now_s)
            if self._balance is not None:
                self._balance.on_batch(batch, now_s)

    def take_notes(self, now_s: float, count_max: int, is_last: bool = False) -> NoteBatch:
        """The `count_max` oldest notes for the other frontends. An empty batch is sent too, as a
        heartbeat. A batch that the caller does not send is lost."""
        now_s = self._advance(now_s)
        return self._noted.take(now_s, count_max, self._gate.wanted_of(now_s), is_last)

    @property
    def notes_waiting(self) -> int:
        """Number of notes not yet taken. No note is added while no other frontend is known."""
        return len(self._noted)

    @property
    def frontends_known(self) -> int:
        """Number of other frontends that sent a batch within frontend_silent_s_max."""
        return len(self._others)

    def _note_routed(self, route: Route, request: Request, send_s: float, now_s: float) -> None:
        predicted, prefill, decode = route.predicted, route.prefill, route.decode
        self._noted.add(
            RoutedNote(
                number=self._cluster.in_flight[route.request_id].number,
                at_s=now_s,
                prefill=(prefill.worker_id, prefill.incarnation),
                decode=(decode.worker_id, decode.incarnation),
                new_tokens=request.prompt_tokens - route.cached_tokens,
                cached_tokens=route.cached_tokens,
                output_tokens_max=request.output_tokens_max,
                order_key_s=route.order_key_s,
                queue_s=predicted.queue_s,
                transfer_s=predicted.transfer_s,
                prefill_s=predicted.prefill_s,
                tbt_s=predicted.tbt_s,
                send_s=send_s,
                fetch_node=route.fetch_node or "",
                tenant=request.tenant,
            )
        )

    # Housekeeping and views

    def on_tick(
        self, now_s: float, held: Callable[[], Collection[str]] = frozenset
    ) -> list[Replicate]:
        """Expire old state, and suggest copies of hot prefixes. To be called about twice a second.

        A suggestion that is not carried out is repeated after replicate_s_max. `held` returns the
        request ids of the attempts that the frontend still holds. These requests do not expire.
        """
        now_s = self._advance(now_s)
        self._gate.margin.fade(now_s)
        self._quotas.tick(now_s, held)
        self._cluster.prepare(now_s)
        if self._compiled is not None:
            self._compiled.prepare()
        overdue = self._cluster.overdue(now_s)
        kept = held() if overdue else ()
        for request_id in overdue:
            if request_id not in kept:
                self._drop(request_id, now_s)
        self._others.expire(now_s)
        if not self.config.replicate:
            return []
        targets = {worker.info.node_id for worker in self._cluster.takers("prefill", now_s)}
        suggestions = self._hotspots.suggest(self._tiers.dram, targets, now_s, self._turn)
        self._totals.replicated_blocks += sum(len(s.block_keys) for s in suggestions)
        return suggestions

    def copies_by_heat(self, now_s: float) -> tuple[HeatClass, ...]:
        """Counts of hot blocks and their DRAM copies, by class of hit rate, in ascending order. The
        hit rates count this frontend's requests up to the latest tick."""
        return self._hotspots.copies_by_heat(self._tiers.dram, self._advance(now_s))

    def hot_prefixes(self, now_s: float, count_max: int) -> list[HotPrefix]:
        """The hottest prefixes of recent requests, hottest first."""
        return self._hotspots.hottest(self._tiers.dram, self._advance(now_s), count_max)

    def propose_flip(self, now_s: float) -> RoleFlip | None:
        """A worker that should change its role now, or None. To be called about twice a second.
        Where several frontends run, one of them proposes."""
        now_s = self._advance(now_s)
        if self._balance is None:
            return None
        return self._balance.propose(self._turn(FLIPS_KEY) == 0, now_s)

    def _turn(self, key: bytes) -> int:
        return self._others.turn(self._noted.frontend, key)

    def stats(self) -> ConductorStats:
        balance = self._balance
        ttft_slo_s, tbt_slo_s = self._limits.recent
        return ConductorStats(
            **asdict(self._totals),
            rejected=dict(self._rejected),
            advised=dict(self._advised),
            in_flight=sum(not r.is_elsewhere for r in self._cluster.in_flight.values()),
            prefill_error=self._prefill_errors.mean,
            ttft_error=self._ttft_errors.mean,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            frontends_known=len(self._others),
            routed_elsewhere=self._others.requests,
            note_batches_received=self._others.batches_received,
            note_batches_missed=self._others.batches_missed,
            workers_wanted=balance.workers_wanted(self._now_s) if balance is not None else {},
            flips_proposed=balance.flips_proposed if balance is not None else {},
        )

    def status(self, now_s: float) -> list[WorkerStatus]:
        """The state of every known worker, ordered by name and incarnation."""
        now_s = max(now_s, self._now_s)
        found = []
        for _, worker in sorted(self._cluster.workers.items()):
            is_prefill = worker.info.role == "prefill"
            why_not = self._cluster.why_not(worker, now_s)
            load = worker.batch.load_now()
            found.append(
                WorkerStatus(
                    worker=worker.ref,
                    role=worker.info.role,
                    takes_requests=not why_not,
                    why_not=why_not,
                    queue_s=worker.queue.work_s(now_s) if is_prefill else 0.0,
                    requests=worker.queue.requests if is_prefill else load.sequences,
                    speed_ratio=worker.speed_ratio(now_s, self.config),
                    pipeline_stages=len(worker.stages),
                )
            )
        return found

    def check(self) -> None:
        self._cluster.check(self._now_s)
        self._hotspots.check()
        self._others.check()
        self._noted.check()
        self._gate.check()
        self._quotas.check()
        if self._balance is not None:
            self._balance.check()
        self._tiers.check()
        routed_or_not = self._totals.routed + sum(self._rejected.values())
        assert routed_or_not == self._totals.requests, "a request was neither routed nor rejected"

    def _advance(self, now_s: float) -> float:
        """Raise the conductor's time to `now_s` if that is later. Return the conductor's time."""
        self._now_s = max(now_s, self._now_s)
        return self._now_s


def _candidate(pair: Pair, verdict: str) -> Candidate:
    prefill = pair.prefill
    return Candidate(
        prefill=prefill.worker.ref,
        decode=pair.decode.worker.ref,
        cached_tokens=prefill.cached_tokens,
        local_blocks=prefill.local_blocks,
        fetch_blocks=prefill.fetch_blocks,
        fetch_node=prefill.fetch_node,
        predicted=pair.predicted,
        verdict=verdict,
        pipeline_stages=len(prefill.worker.stages),
    )
