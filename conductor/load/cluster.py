"""The cluster state: nodes, workers, in-flight requests, and which workers take requests.

Nodes and workers are known from directory events. A request is *in flight* from its routing to its
end. It holds at most three reservations: in a prefill queue, in a decode batch, and as a send at
the node from which its prefix is fetched. `drop` removes all of them, and is idempotent.

A worker takes requests if all of these conditions hold. `why_not` names the first one that fails:

- Its node is up.
- It is the newest incarnation of its name. While Triton reloads a model, the old incarnation
  finishes its streams, and new calls reach the new incarnation.
- It sent a report within report_s_max.
- It is not draining.
- This frontend has a network path to it, according to the latest call of `worker_reached`.
- No call to it failed recently. A failed call marks the worker for failed_mark_s, or until a report
  arrives more than report_lag_s after the call.

The prefill workers of a pipeline group each hold a share of the layers. Stage 0 takes requests if
all stages of the group are registered and meet these conditions. No request is routed to the other
stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from conductor.config import PREDICTIVE, ConductorConfig
from conductor.estimates.lengths import OutputLengths
from conductor.load.decode_forecast import (
    DecodeForecast,
    ExpectedAnswer,
    ExpectedArrivals,
    ForecastTable,
)
from conductor.load.decode_pool import DecodePool
from conductor.load.pipeline_groups import form_groups
from conductor.load.pool import RATIO_FRESH_S, Pool
from conductor.load.prefill_pool import PrefillPool
from conductor.load.worker import WorkerKey, WorkerState, warm_up
from conductor.messages import Request, Route
from mooncake_store.layout import blocks_touched, geometry
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

PATHS_PER_TICK = 64  # transfer paths computed per tick and role; a path takes up to 0.1 ms
RESIDENCE_WEIGHT = 0.05  # weight of one finished request in the moving mean `Cluster.decode_s`


@dataclass(slots=True)
class InFlightRequest:
    """A routed request until it finishes."""

    route: Route
    prefill: WorkerState  # both objects and their reservations stay after the worker is down
    decode: WorkerState
    request: Request
    routed_at_s: float
    answer: ExpectedAnswer | None  # None unless the admission policy is predictive_lengths
    number: int  # unique and increasing, in the order of routing
    joined_at_s: float | None = None  # end of its prefill, None before
    is_elsewhere: bool = False  # True if another frontend routed it (other_frontends.py)

    @property
    def prefill_done(self) -> bool:
        return self.joined_at_s is not None


class Cluster:
    """Nodes, workers and in-flight requests. Only this class changes reservations."""

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        self.nodes: dict[str, NodeInfo] = {}
        self.workers: dict[WorkerKey, WorkerState] = {}
        self._newest: dict[str, WorkerKey] = {}  # by worker_id
        self.in_flight: dict[str, InFlightRequest] = {}
        self._sends: dict[str, dict[str, float]] = {}  # node -> request -> predicted end of send
        self._routed = 0
        self._warming_up_since_s: dict[WorkerKey, float] = {}
        self._refused_at_s: dict[WorkerKey, float] = {}
        self.decode_s = config.decode_s_expected  # mean decode time of a request, in seconds
        self.lengths = OutputLengths(config.output_tokens_expected)
        learns = config.admission == "predictive_lengths"
        self.forecasts = ForecastTable(config.decode_room_sigma) if learns else None
        self.expected_arrivals: ExpectedArrivals | None = None  # only with predictive policies
        if config.admission in PREDICTIVE:
            self.expected_arrivals = ExpectedArrivals(
                config.expected_arrivals_share, config.demand_half_life_s
            )
        self.prefills, self.decodes = PrefillPool(config), DecodePool(config)
        self._pools: dict[str, Pool] = {"prefill": self.prefills, "decode": self.decodes}
        self.is_beside_decode = np.zeros(0, bool)  # mask: prefill workers on a decode worker's node
        self._is_stale = True  # True if members changed since the pools were built
        self._looked_s = -math.inf  # time at which columns with decaying ratios were refreshed
        self.largest_seen: dict[str, int] = {}  # role -> highest tokens_max so far

    # Membership

    def node_up(self, info: NodeInfo) -> None:
        self.nodes[info.node_id] = info
        self._is_stale = True

    def node_down(self, node_id: str, incarnation: str) -> bool:
        """Remove the node. False if the node is unknown or has another incarnation now."""
        known = self.nodes.get(node_id)
        if known is None or known.incarnation != incarnation:
            return False
        del self.nodes[node_id]
        self._is_stale = True
        self._sends.pop(node_id, None)
        return True

    def worker_up(self, info: WorkerInfo, now_s: float) -> None:
        key = (info.worker_id, info.incarnation)
        if key not in self.workers:
            if any(
                other.info.role == info.role and now_s - other.joined_s >= self.config.slow_start_s
                for other in self.workers.values()
            ):
                self._warming_up_since_s[key] = now_s
            worker = self.workers[key] = WorkerState(info, now_s)
            if self.forecasts is not None and info.role == "decode":
                step_s = worker.decode_estimate.step_s(1, 0)
                worker.batch.forecast = DecodeForecast(self.forecasts, self.lengths, step_s)
        self._newest[info.worker_id] = key
        self._is_stale = True

    def worker_down(self, key: WorkerKey) -> None:
        """Remove the worker. Its in-flight requests stay until a frontend ends or retries them."""
        worker = self.workers.pop(key, None)
        if worker is not None:
            worker.row, self._is_stale = -1, True
            if worker.batch.forecast is not None:
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
            if self._refused_at_s.get(worker.key, now_s) < now_s - self.config.report_lag_s:
                del self._refused_at_s[worker.key]
            pool = self._pools[worker.info.role]
            pool.reported(worker.leader)
            pool.measured(worker, now_s)

    def excuse(self, seconds: float, now_s: float) -> None:
        """Extend the report deadlines of all workers by `seconds` without directory events."""
        for worker in self.workers.values():
            worker.reported_at_s = min(now_s, worker.reported_at_s + seconds)
            self._pools[worker.info.role].reported(worker.leader)

    def worker_failed(self, key: WorkerKey, now_s: float) -> None:
        worker = self.workers.get(key)
        if worker is not None:
            worker.failed_at_s = now_s
            self._pools[worker.info.role].reported(worker.leader)

    def worker_reached(self, key: WorkerKey, is_reached: bool) -> None:
        """Record whether this frontend has a network path to the worker. Reports do not use this
        path, because the directory forwards them."""
        worker = self.workers.get(key)
        if worker is not None:
            worker.is_unreached = not is_reached
            self._pools[worker.info.role].reported(worker.leader)

    def worker_refused(self, key: WorkerKey, now_s: float) -> None:
        """Mark the worker as full, because it refused an arriving request (arrival_check.py)."""
        if key in self.workers:
            self._refused_at_s[key] = now_s

    def overloaded(self, now_s: float) -> list[WorkerState]:
        """Decode workers that count as full, because they refused an arriving request. The mark of
        a refusal ends after overload_mark_s, or with a report that arrives more than report_lag_s
        after it. Marked workers with an empty batch are not included."""
        if not self._refused_at_s:
            return []
        expired_s = now_s - self.config.overload_mark_s
        self._refused_at_s = {
            key: at_s
            for key, at_s in self._refused_at_s.items()
            if at_s > expired_s and key in self.workers
        }
        marked = [self.workers[key] for key in self._refused_at_s]
        return [worker for worker in marked if worker.batch.load_reserved().sequences > 0]

    def warming_up(self, role: str, now_s: float) -> list[tuple[WorkerState, float]]:
        """Workers of this role in warm-up, each with the remaining part of its warm-up (1 to 0)."""
        if not self._warming_up_since_s:
            return []
        slow_s = self.config.slow_start_s
        found = {
            key: warm_up(at_s, now_s, slow_s) for key, at_s in self._warming_up_since_s.items()
        }
        self._warming_up_since_s = {
            key: at_s
            for key, at_s in self._warming_up_since_s.items()
            if found[key] > 0 and key in self.workers
        }
        workers = [(self.workers[key], found[key]) for key in self._warming_up_since_s]
        return [row for row in workers if row[0].info.role == role and row[0].row >= 0]

    def why_not(self, worker: WorkerState, now_s: float) -> str:
        """Why this worker takes no new requests; "" if it does."""
        self.look(now_s)
        if why := self._why_not_itself(worker, now_s):
            return why
        if worker.is_follower:
            group = worker.info.pipeline_group
            return f"stage {worker.info.pipeline_stage} of pipeline group {group}"
        if worker.broken:
            return worker.broken
        for number, stage in enumerate(worker.stages):
            if why := self._why_not_itself(stage, now_s):
                return f"stage {number} of its pipeline group: {why}"
        return ""

    def _why_not_itself(self, worker: WorkerState, now_s: float) -> str:
        if worker.info.node_id not in self.nodes:
            return f"its storage node {worker.info.node_id} is down"
        if self._newest[worker.info.worker_id] != worker.key:
            return "replaced by a newer incarnation"
        if now_s - worker.reported_at_s > self.config.report_s_max:
            return f"no report for more than {self.config.report_s_max:g} s"
        if worker.is_draining:
            return "draining"
        if worker.is_unreached:
            return "not reached from here"
        failed_at_s = worker.failed_at_s
        if failed_at_s is not None and now_s - failed_at_s < self.config.failed_mark_s:
            return "a call to it failed"
        return ""

    def look(self, now_s: float) -> None:
        """Rebuild the pools if members changed. Refresh ratios older than RATIO_FRESH_S."""
        if self._is_stale:
            self._is_stale, self._looked_s = False, -math.inf
            newest = (self.workers[key] for key in self._newest.values())
            form_groups((w for w in newest if w.info.role == "prefill"), self.config)
            for role, pool in self._pools.items():
                members = [
                    w for w in self.workers.values() if w.info.role == role and not w.is_follower
                ]
                pool.build(members, self._is_in, self.tokens_max)
                largest = max(pool.tokens_max.tolist(), default=0)
                self.largest_seen[role] = max(self.largest_seen.get(role, 0), largest)
            self.is_beside_decode = self.prefills.has_neighbour(self.decodes)
        if not now_s - self._looked_s <= RATIO_FRESH_S:
            self._looked_s = now_s
            self.prefills.look(now_s)
            self.decodes.look(now_s)

    def prepare(self, now_s: float) -> None:
        """Refresh columns and transfer paths, so that decisions find them. Called on each tick."""
        self._looked_s = -math.inf
        self.look(now_s)
        for pool in self._pools.values():
            pool.prepare(self.nodes, PATHS_PER_TICK)

    def _is_in(self, worker: WorkerState) -> bool:
        return not worker.broken and all(
            stage.info.node_id in self.nodes and self._newest.get(stage.info.worker_id) == stage.key
            for stage in worker.stages
        )

    def tokens_max(self, info: WorkerInfo) -> int:
        """The most tokens of one request that the worker can hold when it is empty."""
        blocks = min(info.pages_max, self.node_blocks(info))
        return int(min(info.context_tokens_max, blocks * info.block_tokens))

    def node_blocks(self, info: WorkerInfo) -> float:
        """Blocks that the worker's node can hold. Infinite if the node is unknown, or if the prompt
        needs no room on it: for decode workers, and for engines that transfer KV themselves."""
        node = self.nodes.get(info.node_id)
        if info.role != "prefill" or info.is_native or node is None or not node.segment_bytes:
            return math.inf
        units = geometry(node.segment_bytes, node.unit_bytes).units
        return units // -(-info.block_bytes // node.unit_bytes)

    def takers(self, role: str, now_s: float) -> list[WorkerState]:
        """The workers of a role that take requests."""
        self.look(now_s)
        pool = self._pools[role]
        return [pool.workers[row] for row in pool.takers(now_s).nonzero()[0].tolist()]

    # In-flight requests

    def reserve(
        self,
        route: Route,
        pair: tuple[WorkerState, WorkerState],
        request: Request,
        send_s: float,
        now_s: float,
    ) -> None:
        """Reserve the predicted load at both workers, and at the sender of a fetch for `send_s`."""
        prefill, decode = pair
        predicted, prompt_tokens = route.predicted, request.prompt_tokens
        self._routed += 1
        prefill.routed_at = decode.routed_at = self._routed
        new_tokens = prompt_tokens - route.cached_tokens
        prefill.queue.reserve(
            route.request_id, new_tokens, route.cached_tokens, now_s, route.order_key_s
        )
        pages = blocks_touched(prompt_tokens + request.output_tokens_max, decode.info.block_tokens)
        prefill_end_s = now_s + predicted.queue_s + predicted.transfer_s + predicted.prefill_s
        answer = None
        if self.forecasts is not None:
            key = self.lengths.class_of(prompt_tokens, request.tenant)
            answer = ExpectedAnswer(key, request.output_tokens_max)
        decode.batch.reserve(route.request_id, prompt_tokens, pages, prefill_end_s, answer, now_s)
        if self.expected_arrivals is not None:
            self.expected_arrivals.admitted(prefill_end_s - now_s, prompt_tokens, pages, now_s)
        self.prefills.refresh(prefill)
        self.decodes.reserve_one(decode, prompt_tokens, pages)
        if route.fetch_node is not None:
            sends = self._sends.setdefault(route.fetch_node, {})
            sends[route.request_id] = now_s + send_s
        self.in_flight[route.request_id] = InFlightRequest(
            route=route,
            prefill=prefill,
            decode=decode,
            request=request,
            routed_at_s=now_s,
            answer=answer,
            number=self._routed,
        )

    def prefill_finished(self, routed: InFlightRequest, now_s: float) -> None:
        """Move the reservation from the prefill queue to the decode batch."""
        assert not routed.prefill_done, f"{routed.route.request_id} was prefilled twice"
        routed.joined_at_s = now_s
        # An answer takes `decode_s` seconds on average, and at most max_tokens steps.
        longest_s = routed.request.output_tokens_max * routed.route.predicted.tbt_s
        leave_s = now_s + min(self.decode_s, longest_s)
        self._drop_send(routed.route)
        routed.prefill.queue.drop(routed.route.request_id, now_s)
        routed.decode.batch.join(routed.route.request_id, now_s, leave_s)
        self._refresh(routed)

    def drop(self, request_id: str, now_s: float) -> InFlightRequest | None:
        """Drop all reservations of the request. None if it was unknown."""
        routed = self.in_flight.pop(request_id, None)
        if routed is not None:
            self._drop_send(routed.route)
            routed.prefill.queue.drop(request_id, now_s)
            routed.decode.batch.drop(request_id, now_s)
            self._refresh(routed)
        return routed

    def attribute(self, routed: InFlightRequest, since_s: float, now_s: float) -> None:
        """Prevent that another frontend's request counts twice, after its note arrived. The request
        was routed, or joined its batch, at `since_s`. A report after `since_s` has counted the
        request as unattributed work, so as much unattributed work is removed."""
        if not routed.prefill_done and since_s < routed.prefill.reported_at_s:
            routed.prefill.queue.attribute(now_s)
        if since_s < routed.decode.reported_at_s:
            routed.decode.batch.attribute()
        self._refresh(routed)

    def disown(self, request_id: str, now_s: float) -> None:
        """Turn the reservations of another frontend's request into unattributed work, because no
        note of its end will arrive."""
        routed = self.in_flight.pop(request_id, None)
        if routed is not None:
            self._drop_send(routed.route)
            routed.prefill.queue.disown(request_id, now_s)
            routed.decode.batch.disown(request_id)
            self._refresh(routed)

    def _refresh(self, routed: InFlightRequest) -> None:
        self.prefills.refresh(routed.prefill)
        self.decodes.refresh(routed.decode)

    def learn_prefill(
        self,
        routed: InFlightRequest,
        cached_tokens: int,
        seconds: float,
        ended_s: float,
        now_s: float,
    ) -> None:
        """Learn the speed of the prefill worker. `seconds` <= 0: no measurement."""
        if seconds <= 0:
            return
        # With the measured cached tokens, a cache miss does not count as a slow worker.
        new_tokens = max(1, routed.request.prompt_tokens - cached_tokens)
        began_s = routed.routed_at_s + routed.route.predicted.transfer_s
        pipeline = routed.prefill.pipeline
        work_s = pipeline.work_s(new_tokens, cached_tokens)
        fill_s = pipeline.fill_s(new_tokens, cached_tokens)
        routed.prefill.prefilled(began_s, seconds, work_s, ended_s, fill_s)
        self.prefills.measured(routed.prefill, now_s)

    def learn_decode(
        self, routed: InFlightRequest, output_tokens: int | None, now_s: float
    ) -> None:
        """Learn decode time and answer length, if the request joined the batch. Cancelled answers
        count too. Without `output_tokens`, the length is the decode time / the predicted TBT."""
        if routed.joined_at_s is None:
            return
        decoded_s = max(now_s - routed.joined_at_s, 1e-3)
        self.decode_s += RESIDENCE_WEIGHT * (decoded_s - self.decode_s)
        if routed.answer is not None:
            tokens_max = max(1, routed.request.output_tokens_max)
            tokens = decoded_s / max(routed.route.predicted.tbt_s, 1e-6)
            tokens = min(tokens_max, tokens if output_tokens is None else output_tokens)
            self.lengths.learn(routed.answer.key, tokens, tokens >= tokens_max, now_s)

    def overdue(self, now_s: float) -> list[str]:
        """Requests not finished for request_s_max, oldest first."""
        found = []
        for request_id, routed in self.in_flight.items():  # in the order of their reservation here
            if now_s - routed.routed_at_s < self.config.request_s_max:
                break
            found.append(request_id)
        return found

    def send_wait_s(self, node_id: str, now_s: float) -> float:
        """Seconds until the sends reserved at this node are predicted to end."""
        sends = self._sends.get(node_id)
        return max(0.0, max(sends.values()) - now_s) if sends else 0.0

    def _drop_send(self, route: Route) -> None:
        sends = self._sends.get(route.fetch_node or "")
        if sends is not None:
            sends.pop(route.request_id, None)
            if not sends:
                del self._sends[route.fetch_node or ""]

    def check(self, now_s: float) -> None:
        """Assert that reservations match in-flight requests, and that columns match workers."""
        self.lengths.check()
        self.look(now_s)
        for pool in self._pools.values():
            if pool.workers:
                pool.check(now_s, self.why_not)
        queued = batched = 0
        for key, worker in self.workers.items():
            worker.queue.check()
            worker.batch.check()
            queued += len(worker.queue)
            batched += len(worker.batch)
            assert self._newest[key[0]] in self.workers, f"the newest {key[0]} is not registered"
        for request_id, routed in self.in_flight.items():
            assert (request_id in routed.prefill.queue) == (not routed.prefill_done), request_id
            assert request_id in routed.decode.batch, request_id
            if self.workers.get(routed.prefill.key) is routed.prefill:
                queued -= not routed.prefill_done
            if self.workers.get(routed.decode.key) is routed.decode:
                batched -= 1
        assert queued == 0 and batched == 0, f"{queued} + {batched} reservations without a request"
        for node_id, sends in self._sends.items():
            for request_id in sends:
                sender = self.in_flight[request_id]
                assert sender.route.fetch_node == node_id and not sender.prefill_done, request_id
