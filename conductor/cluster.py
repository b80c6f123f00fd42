"""Who is there, what they are charged with, and which of them may be given work.

The cluster is the conductor's memory: nodes and workers as the directory announces them, and one
*flight* for each request that was routed and has not finished. A flight holds at most one charge
in a prefill queue, one in a decode batch and one send at the node that its prefix is fetched from;
`drop` takes all three away, once, however often and for whatever reason it is called.

A worker takes requests when all of these hold; `why_not` names the first that does not:
its node is up; it is the newest incarnation of its name (while Triton reloads a model the old one
finishes its streams, but new calls reach the new one); it reported within report_s_max; it is not
draining; and no call to it failed since its last report (a mark that also expires by itself, so a
quiet worker is never shut out for good).

Not here: choosing among workers (routing.py), where blocks are (mooncake_store.prefix_index).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conductor.config import ConductorConfig
from conductor.decode_batch import DecodeBatch
from conductor.decode_forecast import Answer, DecodeForecast, ForecastTable
from conductor.estimates import DecodeEstimate, PrefillEstimate
from conductor.lengths import OutputLengths
from conductor.messages import Route, WorkerRef
from conductor.prefill_queue import PrefillQueue
from conductor.speed import SpeedRatio
from mooncake_store.layout import blocks_touched
from mooncake_store.membership import NodeInfo, WorkerInfo, WorkerReport

WorkerKey = tuple[str, str]  # (worker_id, incarnation)
RESIDENCE_WEIGHT = 0.05  # of one finished request in the expected decode time


class Worker:
    """One life of one worker: what it said, what it is charged with."""

    def __init__(self, info: WorkerInfo, now_s: float, preempts: bool) -> None:
        self.info = info
        self.ref = WorkerRef(info.worker_id, info.incarnation, info.node_id, info.inbox)
        self.key: WorkerKey = (info.worker_id, info.incarnation)
        self.prefill_estimate = PrefillEstimate.of(info.prefill_coefficients)
        self.decode_estimate = DecodeEstimate.of(info.decode_coefficients)
        self.queue = PrefillQueue(self.prefill_estimate, now_s, preempts)
        self.batch = DecodeBatch()
        self.speed = SpeedRatio()
        self.reported_at_s = now_s  # registering is the first sign of life
        self.is_draining = False
        self.failed_at_s: float | None = None
        self._prefilled_at_s = -math.inf  # when its last prefill ended
        self.routed_at = 0  # number of the last request routed here, 0 before the first

    def on_report(self, report: WorkerReport, now_s: float, config: ConductorConfig) -> None:
        self.reported_at_s = now_s
        self.is_draining = report.is_draining
        if self.failed_at_s is not None and now_s > self.failed_at_s + config.report_lag_s:
            self.failed_at_s = None
        if self.info.role == "prefill":
            requests = max(report.queue_requests, report.running)  # the queue's head runs
            self.queue.on_report(report.queue_tokens, requests, now_s, config.report_lag_s)
            self.queue.step_s = report.step_s
            return
        self.batch.on_report(report, now_s, config.report_lag_s)
        estimated_s = self.decode_estimate.step_s(report.running, report.context_tokens)
        if report.running and report.step_s > 0 and estimated_s > 0:
            self.speed.learn(report.step_s / estimated_s, 1.0, now_s)

    def prefilled(self, began_s: float, seconds: float, estimated_s: float, now_s: float) -> None:
        """Learn from a prefill. Prompts that shared steps each say the seconds of all of them, so
        time that an earlier one has already accounted for does not count again."""
        free_s = max(began_s, self._prefilled_at_s)
        self.speed.learn(min(seconds, max(0.0, now_s - free_s)), estimated_s, now_s)
        self._prefilled_at_s = now_s

    def speed_ratio(self, now_s: float, config: ConductorConfig) -> float:
        return self.speed.at(now_s) if config.learn_speed else 1.0


@dataclass(slots=True)
class Flight:
    """One routed request, until it finishes."""

    route: Route
    prefill: Worker  # a worker that went away keeps its charges to itself
    decode: Worker
    prompt_tokens: int
    output_tokens_max: int
    routed_at_s: float
    answer: Answer
    joined_at_s: float | None = None  # when its prefill ended

    @property
    def prefill_done(self) -> bool:
        return self.joined_at_s is not None


class Cluster:
    """Nodes, workers and flights. Every change of a charge goes through here."""

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        self.nodes: dict[str, NodeInfo] = {}
        self.workers: dict[WorkerKey, Worker] = {}
        self._newest: dict[str, WorkerKey] = {}  # by worker_id
        self.flights: dict[str, Flight] = {}
        self._sends: dict[str, dict[str, float]] = {}  # node -> request -> when its send ends
        self._routed = 0
        self.decode_s = config.decode_s_expected  # a request's time in decoding, as observed
        self.lengths = OutputLengths(config.output_tokens_expected)
        learns = config.admission == "predictive_lengths"
        self.forecasts = ForecastTable(config.decode_room_sigma) if learns else None

    # Membership

    def node_up(self, info: NodeInfo) -> None:
        self.nodes[info.node_id] = info

    def node_down(self, node_id: str, incarnation: str) -> bool:
        """False when a newer life of the node has already registered."""
        known = self.nodes.get(node_id)
        if known is None or known.incarnation != incarnation:
            return False
        del self.nodes[node_id]
        self._sends.pop(node_id, None)
        return True

    def worker_up(self, info: WorkerInfo, now_s: float) -> None:
        key = (info.worker_id, info.incarnation)
        if key not in self.workers:
            worker = self.workers[key] = Worker(info, now_s, self.config.queue_preempts)
            if self.forecasts is not None and info.role == "decode":
                step_s = worker.decode_estimate.step_s(1, 0)
                worker.batch.forecast = DecodeForecast(self.forecasts, self.lengths, step_s)
        self._newest[info.worker_id] = key

    def worker_down(self, key: WorkerKey) -> None:
        """Its charges go with it; its flights stay until their front finishes or retries them."""
        worker = self.workers.pop(key, None)
        if worker is not None and worker.batch.forecast is not None:
            worker.batch.forecast.close()
            worker.batch.forecast = None
        if self._newest.get(key[0]) == key:
            del self._newest[key[0]]
            left = [other for other in self.workers if other[0] == key[0]]
            if left:
                self._newest[key[0]] = left[-1]

    def worker_reported(self, report: WorkerReport, now_s: float) -> None:
        worker = self.workers.get((report.worker_id, report.incarnation))
        if worker is not None:
            worker.on_report(report, now_s, self.config)

    def worker_failed(self, key: WorkerKey, now_s: float) -> None:
        worker = self.workers.get(key)
        if worker is not None:
            worker.failed_at_s = now_s

    def why_not(self, worker: Worker, now_s: float) -> str:
        """Why this worker gets no new request; empty when it does."""
        if worker.info.node_id not in self.nodes:
            return f"its storage node {worker.info.node_id} is down"
        if self._newest[worker.info.worker_id] != worker.key:
            return "replaced by a newer incarnation"
        if now_s - worker.reported_at_s > self.config.report_s_max:
            return f"no report for more than {self.config.report_s_max:g} s"
        if worker.is_draining:
            return "draining"
        failed_at_s = worker.failed_at_s
        if failed_at_s is not None and now_s - failed_at_s < self.config.failed_mark_s:
            return "a call to it failed"
        return ""

    def takers(
        self, role: str, now_s: float, excluded: frozenset[WorkerKey] = frozenset()
    ) -> list[Worker]:
        """The workers of a role that may be given a request now."""
        return [
            worker
            for worker in self.workers.values()
            if worker.info.role == role
            and worker.key not in excluded
            and not self.why_not(worker, now_s)
        ]

    # Flights

    def depart(
        self,
        route: Route,
        pair: tuple[Worker, Worker],
        prompt_tokens: int,
        output_tokens_max: int,
        send_s: float,
        now_s: float,
        tenant: str = "",
    ) -> None:
        """Charge both workers, and the sender of a fetch, with what was predicted."""
        prefill, decode = pair
        predicted = route.predicted
        self._routed += 1
        prefill.routed_at = decode.routed_at = self._routed
        new_tokens = prompt_tokens - route.cached_tokens
        prefill.queue.charge(
            route.request_id, new_tokens, route.cached_tokens, now_s, route.order_key_s
        )
        pages = blocks_touched(prompt_tokens + output_tokens_max, decode.info.block_tokens)
        prefill_end_s = now_s + predicted.queue_s + predicted.transfer_s + predicted.prefill_s
        answer = Answer(self.lengths.class_of(prompt_tokens, tenant), output_tokens_max)
        decode.batch.charge(route.request_id, prompt_tokens, pages, prefill_end_s, answer, now_s)
        if route.fetch_node is not None:
            sends = self._sends.setdefault(route.fetch_node, {})
            sends[route.request_id] = now_s + send_s
        self.flights[route.request_id] = Flight(
            route, prefill, decode, prompt_tokens, output_tokens_max, now_s, answer
        )

    def prefill_started(self, request_id: str, cached_tokens: int, now_s: float) -> None:
        """The fetch is over; what was really found cached replaces what was predicted."""
        flight = self.flights.get(request_id)
        if flight is not None and not flight.prefill_done:
            self._drop_send(flight.route)
            flight.prefill.queue.start(request_id, cached_tokens, now_s)

    def prefill_finished(self, flight: Flight, leave_s: float, now_s: float) -> None:
        """The charge moves from the prefill queue to the decode batch."""
        assert not flight.prefill_done, f"{flight.route.request_id} was prefilled twice"
        flight.joined_at_s = now_s
        self._drop_send(flight.route)
        flight.prefill.queue.drop(flight.route.request_id, now_s)
        flight.decode.batch.join(flight.route.request_id, now_s, leave_s)

    def drop(self, request_id: str, now_s: float) -> Flight | None:
        """The request is over: no charge of it is left anywhere. None when it was unknown."""
        flight = self.flights.pop(request_id, None)
        if flight is not None:
            self._drop_send(flight.route)
            flight.prefill.queue.drop(request_id, now_s)
            flight.decode.batch.drop(request_id)
        return flight

    def learn_decode(self, flight: Flight, output_tokens: int | None, now_s: float) -> None:
        """A cancelled answer leaves the batch too, so it belongs into the expectation. Without
        `output_tokens`, as many as steps of the predicted length fit into its time there."""
        if flight.joined_at_s is None:
            return
        decoded_s = max(now_s - flight.joined_at_s, 1e-3)
        self.decode_s += RESIDENCE_WEIGHT * (decoded_s - self.decode_s)
        if self.forecasts is not None:
            tokens_max = max(1, flight.output_tokens_max)
            tokens = decoded_s / max(flight.route.predicted.tbt_s, 1e-6)
            tokens = min(tokens_max, tokens if output_tokens is None else output_tokens)
            self.lengths.learn(flight.answer.key, tokens, tokens >= tokens_max, now_s)

    def overdue_flights(self, now_s: float) -> list[str]:
        """Requests that nobody finished for request_s_max; oldest first."""
        found = []
        for request_id, flight in self.flights.items():  # in order of routing
            if now_s - flight.routed_at_s < self.config.request_s_max:
                break
            found.append(request_id)
        return found

    def send_wait_s(self, node_id: str, now_s: float) -> float:
        """How long the sends already charged to this node will take."""
        sends = self._sends.get(node_id)
        return max(0.0, max(sends.values()) - now_s) if sends else 0.0

    def _drop_send(self, route: Route) -> None:
        if route.fetch_node is not None:
            sends = self._sends.get(route.fetch_node)
            if sends is not None:
                sends.pop(route.request_id, None)
                if not sends:
                    del self._sends[route.fetch_node]

    def check(self) -> None:
        """Prove the invariants: every charge belongs to a flight, and every flight is charged."""
        self.lengths.check()
        queued = batched = 0
        for key, worker in self.workers.items():
            worker.queue.check()
            worker.batch.check()
            queued += len(worker.queue)
            batched += len(worker.batch)
            assert self._newest[key[0]] in self.workers, f"the newest {key[0]} is not there"
        for request_id, flight in self.flights.items():
            assert (request_id in flight.prefill.queue) == (not flight.prefill_done), request_id
            assert request_id in flight.decode.batch, request_id
            if self.workers.get(flight.prefill.key) is flight.prefill:
                queued -= not flight.prefill_done
            if self.workers.get(flight.decode.key) is flight.decode:
                batched -= 1
        assert queued == 0 and batched == 0, f"{queued} + {batched} charges without a flight"
        for node_id, sends in self._sends.items():
            for request_id in sends:
                sender = self.flights[request_id]
                assert sender.route.fetch_node == node_id and not sender.prefill_done, request_id
