"""SLO-based admission: whether the best pair keeps its limits, and the answer to a rejected client.

A request that will miss its service level wastes its prefill, so an early rejection is cheaper
(Mooncake, "Overload"). A load policy predicts the load of a decode worker at the time when the
request would join its batch. Each policy is a pure function of the decode batch:

    reserved    all requests that decode or are in prefill now, as if none of them ended
    predictive  the paper's system-level form: the load at the end of this prefill, with the
                requests that will have joined and without those that will have left
    predictive_lengths  the load at the end of this prefill, in which a request has left with the
                probability that answers of its class end by then (lengths.py, decode_forecast.py)
    early       the current load; this policy reacts one prefill too late, so load oscillates
    baseline    decode load is not checked; overload appears only after the prefill is computed
    none        no service level is checked; only full queues and batches cause rejections

Both predictive policies also count expected arrivals: requests that arrive after this one and
start to decode before it (decode_forecast.py). `predictive_lengths` wastes the least work
(README.md names the measurements). `predictive` counts on room that will become free. A long
prefill can take that room from short ones, and room that is promised twice is detected late.

`Gate` also learns the errors of predictions and the recent demand. It applies these rules:

    limits              Predicted TTFT x measured error <= limit, TBT <= limit, and both workers
                        have room.
    idle cluster        No TTFT limit applies without a prefill queue, and no TBT limit with an
                        empty decode batch. The request would delay no other request there, and a
                        later retry would be no faster.
    one token           No limit of decode applies to a request for one token, because no decode
                        worker is called.
    fair share          Under overload, some requests that keep their limits are rejected too
                        (fair_share.py).
    resumed request     A request that lost its workers was admitted before. No rule rejects it.

`Gate.rejection` changes no state, so `explain` shows what `on_request` would decide. `Gate.note`
counts the decision.

`retry_after_s` is the predicted time until the same request would be admitted. A queue drains by
one second of work per second, and a batch shrinks as requests are expected to leave. The value has
bounds, because a distant prediction is a guess and an immediate retry adds load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.admission.fair_share import FairShare, Pressure, Shed
from conductor.admission.limits import TBT_RULE, TTFT_RULE, UNMEASURED_TTFT_S, ServiceLimits
from conductor.config import AUTO, ConductorConfig, SecondsOrAuto
from conductor.estimates.lengths import class_name
from conductor.estimates.measured import Margin
from conductor.load.cluster import Cluster
from conductor.load.decode_batch import DecodeBatch, DecodeLoad
from conductor.load.worker import WorkerState
from conductor.messages import AppliedLimits, Reject, Request
from conductor.queue_order import QueueOrder
from conductor.routing.routing import DecodeOption, Options, Pair
from mooncake_store.layout import blocks_touched

SHOWN_MAX = 3  # workers named in a reason
RETRY_NO_WORKER_S = 3.0  # seconds; the reload of a model takes two seconds


# (batch, end of the prefill, now, mean decode time of a request) -> load without the new request
LoadPolicy = Callable[[DecodeBatch, float, float, float], DecodeLoad]


def load_reserved(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
    return batch.load_reserved()


LOAD_POLICIES: Mapping[str, LoadPolicy] = {
    "reserved": load_reserved,
    "predictive_lengths": DecodeBatch.load_at,  # decode_loads() predicts all workers in one call
    "predictive": DecodeBatch.load_at,
    "early": lambda batch, *_: batch.load_now(),
    "baseline": load_reserved,  # for the prediction; rejection() does not compare it with limits
    "none": load_reserved,  # rejection() checks only whether the worker has room
}


def decode_loads(
    cluster: Cluster, workers: Sequence[WorkerState], at_s: float, now_s: float
) -> list[DecodeLoad]:
    """The load that the admission policy predicts for each decode worker when a prefill ends at
    `at_s`. The request of this prefill is not included."""
    if not workers:
        return []
    if cluster.forecasts is not None and len(workers) == 1 and workers[0].batch.forecast:
        forecast = workers[0].batch.forecast
        loads = [DecodeLoad(*cluster.forecasts.one_at(forecast.row, at_s))]
    elif cluster.forecasts is not None:
        known = [w.batch.forecast.row for w in workers if w.batch.forecast is not None]
        rows = np.array(known, dtype=np.intp)
        loads = [DecodeLoad(*row) for row in cluster.forecasts.at(rows, at_s).tolist()]
    else:
        policy, decode_s = LOAD_POLICIES[cluster.config.admission], cluster.decode_s
        loads = [policy(worker.batch, at_s, now_s, decode_s) for worker in workers]
    if cluster.expected_arrivals is None:
        return loads
    workers_there = len(cluster.decodes.workers)
    arrivals = cluster.expected_arrivals.expected(at_s, now_s, workers_there)
    # An empty worker keeps no room for expected arrivals, because a request delays no other there.
    return [load.plus(*arrivals) if load.sequences > 0 else load for load in loads]


def reject_untaken(cluster: Cluster, role: str, request: Request, now_s: float) -> Reject:
    """The rejection if each worker of this role is too small, excluded or not available. A resumed
    request is not rejected as too large if it fitted a worker before."""
    excluded = request.excluded_workers
    all_of_role = [w for w in cluster.workers.values() if w.info.role == role and not w.is_follower]
    allowed = [w for w in all_of_role if w.key not in excluded]
    tokens = request.prompt_tokens + request.output_tokens_max * (role == "decode")
    largest = max((cluster.tokens_max(w.info) for w in allowed), default=0)
    if request.is_resumed:
        largest = max(largest, cluster.largest_seen[role])
    if largest < tokens and any(w.key not in excluded for w in cluster.takers(role, now_s)):
        return _too_large(cluster, role, allowed, request)
    reasons: Counter[str] = Counter()
    for worker in all_of_role:
        is_small = cluster.tokens_max(worker.info) < tokens
        why = "too small for it" if is_small else "excluded by this request"
        reasons[cluster.why_not(worker, now_s) or why] += 1
    counts = ", ".join(f"{count} x {why}" for why, count in sorted(reasons.items()))
    reason = f"no {role} worker takes requests ({counts or 'none is registered'})"
    retry_s = _bounded(RETRY_NO_WORKER_S, cluster.config)
    return Reject(request.request_id, f"no_{role}_worker", reason, None, retry_s)


def _too_large(
    cluster: Cluster, role: str, workers: Sequence[WorkerState], request: Request
) -> Reject:
    """The rejection of a request that exceeds all `workers` even when they are empty."""
    info = max((worker.info for worker in workers), key=cluster.tokens_max)
    node_blocks, wanted = cluster.node_blocks(info), request.prompt_tokens
    if node_blocks < min(info.pages_max, blocks_touched(wanted, info.block_tokens)):
        reason = (
            f"{wanted} prompt tokens need {blocks_touched(wanted, info.block_tokens)} blocks of "
            f"KV, and the largest storage node of a prefill worker, {info.node_id}, holds "
            f"{node_blocks:.0f}; shorten the prompt, or give the node more memory (dram)"
        )
        return Reject(request.request_id, "too_large", reason, None, 0.0)
    output = f" + {request.output_tokens_max} to generate" if role == "decode" else ""
    reason = (
        f"{wanted} prompt tokens{output} exceed the {cluster.tokens_max(info)} tokens that the "
        f"largest {role} worker can hold; shorten the prompt or max_tokens"
    )
    return Reject(request.request_id, "too_large", reason, None, 0.0)


def rejection(pair: Pair, config: ConductorConfig, limits: AppliedLimits) -> str:
    """The kind of rejection for this pair; "" if the pair keeps all limits."""
    if not pair.prefill.has_room:
        return "prefill_full"
    if config.admission == "none":
        return "" if pair.decode.has_room else "decode_full"
    if pair.predicted.ttft_s > limits.ttft_predicted_s:
        return "ttft_slo"
    if config.admission == "baseline":
        return ""
    if not pair.decode.has_room:
        return "decode_full"
    if pair.predicted.tbt_s > limits.tbt_predicted_s:
        return "tbt_slo"
    return ""


@dataclass(frozen=True, slots=True)
class RejectionCase:
    """The facts from which the text and the retry time of a rejection are computed."""

    pair: Pair
    options: Options
    request: Request
    shed: Shed | None  # only for kind fair_share
    now_s: float
    cluster: Cluster

    @property
    def of_priority(self) -> str:
        priority = self.request.priority
        return f" for priority {priority}" if priority < 0 else ""

    def notes(self, slo_s: SecondsOrAuto, auto_rule: str) -> list[str]:
        """The rule of a limit that is `auto`; empty for a limit in seconds."""
        return [f"{auto_rule}, {self.request.prompt_tokens} tokens"] if slo_s == AUTO else []


def reject_for(kind: str, case: RejectionCase) -> Reject:
    """The rejection with its reason, the limit, and when to retry."""
    reason, wait_s = WORDS[kind](case)
    retry_s = _bounded(wait_s, case.cluster.config)
    predicted, limits = case.pair.predicted, case.options.limits
    return Reject(case.request.request_id, kind, reason, predicted, retry_s, limits)


def _prefill_full(case: RejectionCase) -> tuple[str, float]:
    prefills = case.options.prefills
    queues = ", ".join(
        f"{p.worker.queue.requests} of {p.worker.info.slots_max}" for p in prefills[:SHOWN_MAX]
    )
    # A queue has room after it has finished one of its requests.
    wait_s = min(p.terms.queue_s / max(1, p.worker.queue.requests) for p in prefills)
    return f"the queues of all {len(prefills)} prefill workers are full ({queues})", wait_s


def _ttft_slo(case: RejectionCase) -> tuple[str, float]:
    config, predicted = case.cluster.config, case.pair.predicted
    limits = case.options.limits
    limit_s, wait_s = limits.ttft_predicted_s, predicted.ttft_s - limits.ttft_predicted_s
    asked_s = limits.ttft_slo_s * priority_share(config, case.request)
    notes = case.notes(config.ttft_slo_s, TTFT_RULE)
    if limit_s < asked_s:
        low_by = f"{asked_s / limit_s:.2f}, because predictions of such prompts were too low"
        notes.append(f"{asked_s:.4g} s divided by {low_by}")
    reason = (
        f"predicted TTFT {predicted.ttft_s:.2f} s exceeds the {limit_s:.3g} s limit"
        f"{case.of_priority}{_in_brackets(notes)} "
        f"on the best of {len(case.options.prefills)} prefill workers"
    )
    if wait_s > predicted.queue_s:
        reason += f"; without a queue it would be {predicted.ttft_s - predicted.queue_s:.2f} s"
        wait_s = max(option.terms.queue_s for option in case.options.prefills)
    return reason, wait_s


def _tbt_slo(case: RejectionCase) -> tuple[str, float]:
    predicted = case.pair.predicted
    limit_s = case.options.limits.tbt_predicted_s
    of_auto = _in_brackets(case.notes(case.cluster.config.tbt_slo_s, TBT_RULE))
    reason = (
        f"predicted TBT {predicted.tbt_s:.3f} s exceeds the {limit_s:.4g} s limit"
        f"{case.of_priority}{of_auto} on the best of {len(case.options.decodes)} decode workers "
        f"({predicted.decode_sequences:.0f} requests)"
    )
    return reason, _decode_wait_s(case, limit_s)


def _decode_full(case: RejectionCase) -> tuple[str, float]:
    decodes = case.options.decodes
    taken = ", ".join(
        f"{d.load.sequences:.0f} of {d.worker.info.slots_max} slots and "
        f"{d.load.pages:.0f} of {d.worker.info.pages_max} pages taken"
        for d in decodes[:SHOWN_MAX]
    )
    if case.cluster.expected_arrivals is not None:
        taken += ", expected arrivals included"
    reason = f"no room on any of {len(decodes)} decode workers ({taken})"
    marked = len(case.cluster.overloaded(case.now_s))
    if marked:
        reason += f"; {marked} refused an arriving request a moment ago"
    return reason, _decode_wait_s(case, case.options.limits.tbt_slo_s)


def _fair_share(case: RejectionCase) -> tuple[str, float]:
    shed = case.shed
    assert shed is not None, "a fair_share rejection needs its Shed record"
    above = f"above the {shed.limit_s:.3f} s that are admitted"
    if shed.work_s <= shed.limit_s:  # in the histogram bucket that is admitted in part
        above = "near the limit, where only a part of the requests is admitted"
    reason = (
        f"overload: {shed.backlog_s:.2f} s of prefill queued per worker, the target is "
        f"{shed.target_s:.4g} s; a prompt of {class_name(shed.length)} that costs "
        f"{shed.work_s:.3f} s is {above}"
    )
    if case.request.tenant or case.cluster.config.tenant_shares:
        reason += (
            f"; tenant {case.request.tenant!r} asks for {shed.wanted:.2f} and has a share of "
            f"{shed.granted:.2f} prefill seconds per second"
        )
    # The queue drains by one second per second. A tenant with twice its share waits twice as long.
    return reason, shed.excess_s * max(1.0, shed.wanted / max(shed.granted, 1e-9))


WORDS: Mapping[str, Callable[[RejectionCase], tuple[str, float]]] = {
    "prefill_full": _prefill_full,
    "ttft_slo": _ttft_slo,
    "tbt_slo": _tbt_slo,
    "decode_full": _decode_full,
    "fair_share": _fair_share,
}
DECODE_KINDS = ("tbt_slo", "decode_full")


def _in_brackets(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def priority_share(config: ConductorConfig, request: Request) -> float:
    """The part of a service level up to which the request's priority is admitted."""
    return config.low_priority_load_max if request.priority < 0 else 1.0


def _decode_wait_s(case: RejectionCase, tbt_limit_s: float) -> float:
    """Seconds until so many requests have left one of the batches that this request fits."""
    return min(_batch_wait_s(case, decode, tbt_limit_s) for decode in case.options.decodes)


def _batch_wait_s(case: RejectionCase, decode: DecodeOption, tbt_limit_s: float) -> float:
    request, now_s, cluster = case.request, case.now_s, case.cluster
    config, info, load = cluster.config, decode.worker.info, decode.load
    estimate, tokens = decode.worker.decode_estimate, request.prompt_tokens
    sequences = max(load.sequences, 1.0)  # divisor of the means per sequence, step_s and pages
    step_s = (
        estimate.per_sequence_s + estimate.per_context_token_s * load.context_tokens / sequences
    )
    pages = load.pages / sequences
    room = float(info.slots_max - 1)
    if step_s > 0:
        limit_s = tbt_limit_s / decode.worker.speed_ratio(now_s, config)
        room = min(room, (limit_s - estimate.step_s(1, tokens)) / step_s)
    if pages > 0:
        wanted = blocks_touched(tokens + request.output_tokens_max, info.block_tokens)
        room = min(room, (info.pages_max - wanted) / pages)
    times = decode.worker.batch.leave_times(now_s, cluster.decode_s)
    leaving = max(1, math.ceil(load.sequences - room - 1e-9))
    if room < 0 or leaving > len(times):
        return config.retry_after_s_max  # the request would not fit an empty batch either
    return times[leaving - 1] - now_s


def _bounded(wait_s: float, config: ConductorConfig) -> float:
    return min(max(wait_s, config.retry_after_s_min), config.retry_after_s_max)


def pressure_on(
    options: Options, decode: DecodeOption, service: ServiceLimits, elsewhere: Mapping[str, float]
) -> Pressure:
    """The load of the prefill workers that may take the request, and of this decode worker.
    `elsewhere`: demand at other frontends by tenant, in prefill seconds per second."""
    info, load = decode.worker.info, decode.load
    decode_load = max(
        decode.tbt_s / (service.step_share * options.limits.tbt_slo_s),
        load.sequences / info.slots_max,
        load.pages / info.pages_max,
    )
    return Pressure(
        options.backlog_s,
        options.prefill_count,
        decode_load,
        service.recent[0],
        load.sequences > 0,
        elsewhere,
    )


class Gate:
    """Applies the limits to pairs, with margins and shares learned from earlier requests."""

    def __init__(self, config: ConductorConfig, service: ServiceLimits) -> None:
        self._config, self._service = config, service
        # With `auto`, the prior of the margin is that of the limit without measurements. A few slow
        # prompts then tighten no limit, however short they are.
        limit_s = UNMEASURED_TTFT_S if config.ttft_slo_s == AUTO else config.ttft_slo_s
        self.margin = Margin(config.ttft_margin_quantile, limit_s, config.demand_half_life_s)
        self._order = config.order
        sheds = config.shedding == "fair_share" and config.admission != "none"
        self._share = FairShare(config) if sheds else None

    def order(self, request: Request, limits: AppliedLimits) -> QueueOrder:
        """The order of the prefill queue. While requests of the tenant are shed, admission already
        prefers cheap requests. If the queue did so too, long prompts would starve."""
        sheds = self._share is not None and self._share.is_shedding(request.tenant)
        return self._config.overload_order(limits.ttft_slo_s) if sheds else self._order

    def limits(self, request: Request) -> AppliedLimits:
        """The limits of the request. A priority above 0 drops the margin for prediction errors. A
        priority below 0 reduces the limits of predicted times."""
        ttft_s, tbt_s = self._service.of(request.prompt_tokens)
        step_s = tbt_s * self._service.step_share
        if request.priority > 0:
            return AppliedLimits(ttft_s, tbt_s, ttft_s, step_s)
        share = priority_share(self._config, request)
        margin = self.margin.ratio(request.prompt_tokens)
        return AppliedLimits(ttft_s, tbt_s, ttft_s * share / margin, step_s * share)

    def rejection(
        self, pair: Pair, request: Request, pressure: Pressure, limits: AppliedLimits
    ) -> str:
        """The kind of rejection on this pair; "" if the request is admitted. A resumed or prefilled
        request is always admitted, because a rejection would lose the work already done for it."""
        if request.is_resumed or request.is_prefilled:
            return ""
        kind = rejection(pair, self._config, limits)
        if kind == "ttft_slo" and pressure.backlog_s <= 0.0:
            kind = ""
        if kind == "tbt_slo" and not pressure.is_decoding:
            kind = ""
        if kind in DECODE_KINDS and not request.is_decoded:
            kind = ""
        if not kind and self.shed(pair, request, pressure) is not None:
            return "fair_share"
        return kind

    def shed(self, pair: Pair, request: Request, pressure: Pressure) -> Shed | None:
        """The figures of a fair-share rejection; None if fair shares do not reject the request."""
        if self._share is None:
            return None
        return self._share.rejection(request, pair.predicted.prefill_s, pressure)

    def note(
        self, pair: Pair, request: Request, pressure: Pressure, now_s: float, kind: str
    ) -> None:
        """Count a decided request; `kind` is "" if it was admitted."""
        if self._share is None:
            return
        if kind in DECODE_KINDS:
            self._share.decode_is_short()
        self._share.note(request, pair.predicted.prefill_s, pressure, now_s, not kind)

    def wanted_of(self, now_s: float) -> dict[str, float]:
        """Recent demand at this frontend by tenant, in prefill seconds per second. Empty without
        fair shares."""
        return self._share.wanted_of(now_s) if self._share is not None else {}

    def decode_was_short(self) -> None:
        """Note that a decode worker refused an admitted request on its arrival."""
        if self._share is not None:
            self._share.decode_is_short()

    def check(self) -> None:
        self.margin.check()
        if self._share is not None:
            self._share.check()
