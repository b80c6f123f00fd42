"""The frontend's view of the cluster: the Conductor, updated by the directory's events.

The Conductor (conductor/) chooses the workers of each request, or rejects the request. One lock
guards the Conductor, because many threads call it.

The Conductor suggests one more copy of a hot prefix on another node, and HotCopies carries this
out. The target node reads the blocks from a node that has them (StoreClient.change_replica). No
worker takes part, so no prompt waits for the copy. When too many suggestions wait, a new one is
dropped. If the prefix stays hot, the Conductor repeats the suggestion after replicate_s_max.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backends.errors import InvalidRequest
from backends.frontend.decisions.fields import ClusterReading
from backends.frontend.decisions.latest import NOT_EXPLAINED, Decided, LatestDecisions
from backends.frontend.routing_notes import NoteSender, unpack_notes
from conductor.conductor import Conductor
from conductor.config import ConductorConfig
from conductor.messages import (
    ConductorStats,
    HeatClass,
    Reject,
    Replicate,
    Request,
    RoleFlip,
    Route,
    TenantLimits,
)
from conductor.notes import NoteBatch
from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.errors import StoreError
from mooncake_store.process.self_check import SelfCheck, is_switched_on
from mooncake_store.records.events import FrontendNoted, WorkerDown, WorkerReported, WorkerUp
from mooncake_store.records.membership import WorkerInfo

log = logging.getLogger(__name__)
TICK_S = 0.5  # period of Conductor.on_tick
CANDIDATES_MAX = 16  # pairs of workers listed with a decision, best first; a fleet has thousands
PAIRS_EXPLAINED_MAX = 512  # with more pairs, status pages list none; 512 hold the lock for 1 ms
HOT_PREFIXES_MAX = 8  # hot prefixes on status pages
COPIES_WAITING_MAX = 16  # waiting suggestions of copies
COPY_S_MAX = 5.0  # timeout of one copy, in seconds
# The directory sends at least one message a second. While it is silent for longer than the first
# and less than the second of these times, ticks extend the deadlines of reports (report_s_max).
DIRECTORY_SILENT_S, DIRECTORY_SILENT_S_MAX = 1.5, 10.0
# A worker that a snapshot lacks is lost after this time in seconds, the default of worker_ttl_s.
MISSING_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """The model that the live workers serve."""

    fingerprint: str  # of the newest worker; workers with equal fingerprints can share KV
    block_tokens: int  # tokens in a block of the newest worker
    context_tokens_max: int  # smallest limit of all live workers
    workers: tuple[str, ...]  # names of all live workers, sorted


class ClusterView:
    """Thread-safe access to the Conductor, and to the directory's list of workers."""

    def __init__(self, config: ConductorConfig, directory: str, events: str) -> None:
        # Frontend sets the next three. on_worker_down gets worker, incarnation, last report's time.
        self.on_worker_down: Callable[[str, str, float], None] = lambda *_: None
        self.on_flip: Callable[[RoleFlip], None] = lambda flip: None  # sends the flip to its worker
        self.held: Callable[[], set[str]] = set  # returns the ids of the frontend's open attempts
        self.config = config
        self.copies_by_heat: Sequence[HeatClass] = ()  # hot blocks and their copies, at last tick
        self._latest = LatestDecisions()
        self._lock = threading.Lock()
        self._conductor = Conductor(config, frontend=uuid.uuid4().hex[:12])
        self._workers: dict[tuple[str, str], WorkerInfo] = {}
        # Workers missing in the latest snapshot -> time of the first snapshot without them.
        self._missing_s: dict[tuple[str, str], float] = {}
        self._seen_s: dict[tuple[str, str], float] = {}  # time of latest report or registration
        self._copies = HotCopies(directory)
        self.self_check = SelfCheck(self._check, is_switched_on())
        self._is_closing = threading.Event()
        self.client = DirectoryClient(directory)
        self.notes = NoteSender(directory, self)
        self._feed = EventFeed(directory, events, self._on_snapshot, self._on_events)
        self._ticker = threading.Thread(target=self._tick_loop, name="conductor-tick", daemon=True)
        self._ticker.start()

    def served(self) -> Served | None:
        """The served model; None without workers."""
        with self._lock:
            workers = list(self._workers.values())
        if not workers:
            return None
        newest = workers[-1]
        return Served(
            fingerprint=newest.fingerprint,
            block_tokens=newest.block_tokens,
            context_tokens_max=min(worker.context_tokens_max for worker in workers),
            workers=tuple(sorted({worker.worker_id for worker in workers})),
        )

    def wait_for_a_pair(self, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait for a worker of each role. False: timed out, or `is_over` returned True."""
        give_up_s = time.monotonic() + timeout_s
        while not (self.workers_live("prefill") and self.workers_live("decode")):
            if time.monotonic() > give_up_s or is_over():
                return False
            time.sleep(0.05)
        return True

    def workers_live(self, role: str) -> int:
        """Number of a role's workers. While a worker reloads, its two processes count as one."""
        with self._lock:
            return len({w.worker_id for w in self._workers.values() if w.role == role})

    def inboxes(self, worker_id: str) -> list[str]:
        """Inboxes of a worker's live processes: two while its config.pbtxt reloads."""
        with self._lock:
            return [w.inbox for (name, _), w in self._workers.items() if name == worker_id]

    def grpc_addresses(self) -> set[str]:
        with self._lock:
            return {worker.grpc_address for worker in self._workers.values()}

    def grpc_address(self, worker_id: str, incarnation: str) -> str | None:
        """The address of this process's Triton; None if the process is gone."""
        with self._lock:
            worker = self._workers.get((worker_id, incarnation))
            return worker.grpc_address if worker is not None else None

    def excluded_by_pins(
        self, prefill_worker: str, decode_worker: str
    ) -> frozenset[tuple[str, str]]:
        """For each role with a pinned worker, all other workers of the role. "" pins no worker.
        Raises InvalidRequest if a pinned worker is not registered, or is a later pipeline stage."""
        with self._lock:
            workers = list(self._workers.values())
        excluded = set()
        for role, pinned in (("prefill", prefill_worker), ("decode", decode_worker)):
            names = {w.worker_id for w in workers if w.role == role and w.is_called}
            if pinned and pinned not in names:
                raise InvalidRequest(
                    f"{role}_worker {pinned!r} is not serving; serving are: {sorted(names)}"
                )
            excluded |= {
                (worker.worker_id, worker.incarnation)
                for worker in workers
                if pinned and worker.role == role and worker.worker_id != pinned
            }
        return frozenset(excluded)

    def decide(self, request: Request, wants_candidates: bool = False) -> Decided | Reject:
        """Route or reject. `wants_candidates`: also list the best pairs of workers."""
        with self._lock:
            now_s = time.monotonic()
            explained = NOT_EXPLAINED
            if wants_candidates or self._is_time_to_explain(now_s):
                explained = self._conductor.explain(request, now_s, CANDIDATES_MAX)
            decision = self._conductor.on_request(request, now_s)
            notes_waiting = self._conductor.notes_waiting
        if notes_waiting:
            self.notes.on_routed(notes_waiting)
        made: Decided | Reject = decision
        if isinstance(decision, Route):
            shown = explained if wants_candidates else NOT_EXPLAINED
            made = Decided(decision, now_s, shown)
        self._latest.add(request, made, explained, now_s)
        return made

    def _is_time_to_explain(self, now_s: float) -> bool:
        """Whether to list the best pairs of workers of this decision for status pages."""
        if not self._latest.wants_candidates(now_s):
            return False
        roles = [worker.role for worker in self._workers.values()]
        return roles.count("prefill") * roles.count("decode") <= PAIRS_EXPLAINED_MAX

    def prefill_finished(self, request_id: str, cached_tokens: int, seconds: float) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._conductor.on_prefill_finished(request_id, now_s, cached_tokens, seconds)
        self._latest.prefilled(request_id, cached_tokens, seconds, now_s)

    def finished(self, request_id: str, output_tokens: int | None = None) -> None:
        """End an attempt. `output_tokens`: length of a complete answer; else None."""
        with self._lock:
            self._conductor.on_finished(request_id, time.monotonic(), output_tokens)

    def arrived(
        self, tenant: str, limits: TenantLimits, in_flight: int | None, answers: int = 1
    ) -> Reject | None:
        with self._lock:
            now_s = time.monotonic()
            return self._conductor.on_arrival(tenant, limits, in_flight, now_s, answers)

    def charged(self, tenant: str) -> None:
        with self._lock:
            self._conductor.on_charged(tenant, time.monotonic())

    def used(self, request_id: str, tokens: int) -> None:
        """Return the charged tokens of an ended request, except `tokens`, to its tenant's limit.
        `request_id`: the id of the attempt that was charged."""
        with self._lock:
            self._conductor.on_used(request_id, time.monotonic(), tokens)

    def release(self, owner: str) -> None:
        """Release the leases of an attempt. If the directory does not answer, they expire."""
        try:
            self.client.release(owner)
        except StoreError as error:
            log.warning("leases of %s were not released and will expire: %s", owner, error)

    def worker_failed(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._conductor.on_worker_failed(worker_id, incarnation, time.monotonic())

    def worker_reached(self, worker_id: str, incarnation: str, is_reached: bool) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._conductor.on_worker_reached(worker_id, incarnation, is_reached, now_s)

    def worker_refused(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._conductor.on_worker_refused(worker_id, incarnation, time.monotonic())

    def notes_waiting(self) -> tuple[int, int]:
        """(number of routing notes not yet taken, number of other frontends known)."""
        with self._lock:
            return self._conductor.notes_waiting, self._conductor.frontends_known

    @property
    def has_other_frontends(self) -> bool:
        """Whether other frontends use the same workers. It is read without the lock."""
        return self._conductor.frontends_known > 0

    def take_notes(self, count_max: int, is_last: bool = False) -> NoteBatch:
        with self._lock:
            return self._conductor.take_notes(time.monotonic(), count_max, is_last)

    def reading(self) -> ClusterReading:
        """Workers, hot prefixes and the latest decisions, for status pages."""
        served, now_s = self.served(), time.monotonic()
        with self._lock:
            workers = self._conductor.status(now_s)
            hot = self._conductor.hot_prefixes(now_s, HOT_PREFIXES_MAX)
            stats = self._conductor.stats()
        return ClusterReading(
            now_s,
            workers,
            hot,
            self._latest.newest_first(),
            served.block_tokens if served else 0,
            served.context_tokens_max if served else 0,
            (stats.ttft_slo_s, stats.tbt_slo_s),
        )

    def stats(self) -> ConductorStats:
        with self._lock:
            return self._conductor.stats()

    def _check(self) -> None:
        with self._lock:
            self._conductor.check()

    def close(self) -> None:
        self._is_closing.set()
        self._feed.close()
        self._ticker.join(timeout=2.0)
        self.notes.close()
        self._copies.close()
        self.client.close()

    def _on_snapshot(self, snapshot: Any) -> None:
        now_s = time.monotonic()
        with self._lock:
            missing = dict.fromkeys(self._workers, now_s) | self._missing_s
            self._workers = {(w.worker_id, w.incarnation): w for w in snapshot.workers}
            # Workers register one by one at a restarted directory. A worker that has not registered
            # yet gets no new requests, but its current requests continue for MISSING_S_MAX.
            self._missing_s = {w: at_s for w, at_s in missing.items() if w not in self._workers}
            known = self._workers.keys() | self._missing_s.keys()
            self._seen_s = {worker: self._seen_s.get(worker, now_s) for worker in known}
            self._conductor.on_snapshot(snapshot, now_s)

    def _on_events(self, events: Sequence[Any]) -> None:
        gone, now_s = [], time.monotonic()
        noted = [unpack_notes(event) for event in events if isinstance(event, FrontendNoted)]
        with self._lock:
            for event in events:
                if isinstance(event, WorkerReported):
                    worker = (event.report.worker_id, event.report.incarnation)
                    if worker in self._seen_s:  # a late report may arrive after WorkerDown
                        self._seen_s[worker] = now_s
                elif isinstance(event, WorkerUp):
                    worker = (event.info.worker_id, event.info.incarnation)
                    self._workers[worker], self._seen_s[worker] = event.info, now_s
                    self._missing_s.pop(worker, None)
                elif isinstance(event, WorkerDown):
                    worker = (event.worker_id, event.incarnation)
                    self._workers.pop(worker, None)
                    gone.append((*worker, self._seen_s.pop(worker, now_s)))
            self._conductor.on_events(events, now_s)
            for batch in noted:
                if batch is not None:
                    self._conductor.on_routed_elsewhere(batch, now_s)
        for worker_id, incarnation, seen_s in gone:
            self.on_worker_down(worker_id, incarnation, seen_s)

    def _tick_loop(self) -> None:
        ticked_s = time.monotonic()
        while not self._is_closing.wait(TICK_S):
            before_s, ticked_s = ticked_s, time.monotonic()
            try:
                self._tick(ticked_s - before_s)
            except Exception:  # Catch all: one failed tick must not end the ticks
                log.exception("a tick failed")
            self.self_check.run(time.monotonic())

    def _tick(self, seconds: float) -> None:
        """`seconds`: time since the previous tick."""
        with self._lock:
            # Without on_silence, the Conductor would take the workers for dead and reject requests,
            # because workers report through the directory.
            if DIRECTORY_SILENT_S < self._feed.silent_s() < DIRECTORY_SILENT_S_MAX:
                self._conductor.on_silence(seconds, time.monotonic())
            suggestions = self._conductor.on_tick(time.monotonic(), self.held)
            self.copies_by_heat = self._conductor.copies_by_heat(time.monotonic())
            flip = self._conductor.propose_flip(time.monotonic())
            lost = self._take_missing(time.monotonic())
        for worker_id, incarnation, seen_s in lost:
            self.on_worker_down(worker_id, incarnation, seen_s)
        if flip is not None:
            name, mode = flip.worker.worker_id, self.config.role_flips
            log.info("role_flips %s: %s to %s: %s", mode, name, flip.role, flip.reason)
            if mode == "on":
                self.on_flip(flip)
        for suggestion in suggestions:
            log.info("replicate %s", suggestion.reason)
            self._copies.carry_out(suggestion)

    def _take_missing(self, now_s: float) -> list[tuple[str, str, float]]:
        """Remove the workers that did not register at a new directory within MISSING_S_MAX. Returns
        (worker, incarnation, time of last report) of each. The caller holds the lock."""
        lost = [w for w, since_s in self._missing_s.items() if now_s - since_s > MISSING_S_MAX]
        for worker in lost:
            del self._missing_s[worker]
        return [(*worker, self._seen_s.pop(worker, now_s)) for worker in lost]


class HotCopies:
    """Carries out suggestions to copy hot prefixes, one after the other, in its own thread."""

    def __init__(self, directory: str) -> None:
        self._address = directory
        self._waiting: queue.Queue[Replicate | None] = queue.Queue(COPIES_WAITING_MAX)
        self._client: StoreClient | None = None  # made for the first copy
        self._thread = threading.Thread(target=self._run, name="hot-copies", daemon=True)
        self._thread.start()

    def carry_out(self, suggestion: Replicate) -> None:
        try:
            self._waiting.put_nowait(suggestion)
        except queue.Full:
            log.info("dropped a copy, the queue is full: %s", suggestion.reason)

    def close(self) -> None:
        """Drop waiting suggestions. Wait for the running copy, which takes COPY_S_MAX at most."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)
        self._thread.join(timeout=COPY_S_MAX + 1.0)

    def _run(self) -> None:
        while (suggestion := self._waiting.get()) is not None:
            try:
                self._copy(suggestion)
            except StoreError as error:
                log.warning("a hot prefix was not copied: %s", error)
            except Exception:  # Catch all: one bad suggestion must not end the copying
                log.exception("a hot prefix was not copied")
        if self._client is not None:
            self._client.close()

    def _copy(self, suggestion: Replicate) -> None:
        if self._client is None:
            self._client = StoreClient(self._address)
        started_s = time.monotonic()
        done = self._client.change_replica(
            suggestion.block_keys,
            add=[suggestion.target_node],
            deadline_s=COPY_S_MAX,
            source=suggestion.source_node,
        )
        log.info(
            "copied blocks=%d of %d from %s to %s in %.3f s: %s",
            sum(done),
            len(done),
            suggestion.source_node,
            suggestion.target_node,
            time.monotonic() - started_s,
            suggestion.reason,
        )
