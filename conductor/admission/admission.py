"""Whether the best pair is good enough, and if not, what to answer the client.

A request that will miss its service level wastes the prefill that is spent on it, so it is better
rejected before (Mooncake, "Overload"). What "will miss" means on the decode side is a policy, a
function from what a decode worker has to the load that the request would meet:

    reserved   all that is decoding or on its way there; nobody is assumed to leave
    predictive_lengths  ours: the same moment, where each request leaves with the probability that
                its class of prompts gives an answer of its age (lengths.py, decode_forecast.py)
    predictive  the paper's system-level form: the load when this prefill will have ended, which
               adds the requests that will have joined and takes away those that will have left
                (both predictions also keep room for expected arrivals: decode_forecast.py)
    early      the load now; it acts one prefill too late, so the two pools swing
    baseline   no decode check: overload there shows only after prefill was paid for
    none       no service level is checked; only bounded queues and batches reject

`reserved` keeps what it promises; `predictive_lengths` wastes least (README.md says where the
numbers are). The gain of `predictive` is room that will be free; its price is that a request with a
long prefill books that room ahead of those with a short one, and that two bookings of one room are
noticed late.
A new policy is a new entry in LOAD_POLICIES; it must be a pure function of the same arguments.

`Gate` is the part that learns: how far predictions are off, and who asked for what lately.

    an idle cluster     always admits what its workers can hold. A service level is a promise about
                        load; a prompt that takes longer than its limit with nobody in front
                        harms nobody, and "come back later" would not help it
    fits its limits     predicted TTFT x measured error <= limit, TBT <= limit, room
    fair share          under overload, those that would fit are fewer than those that may come in
                        (fair_share.py)
    goes on             a request that lost its workers was admitted before: it always is

Its `objection` changes nothing, so `explain` shows what `on_request` would do; `note` counts what
was decided.

`retry_after_s` is when the same prediction would fit: queues drain one second per second, batches
when their requests are expected to leave. It is bounded on both sides, because a prediction about
the far future is a guess and an immediate retry is more load.

Not here: finding the best pair (routing.py), counting rejections (conductor.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.admission.fair_share import FairShare, Pressure, Shed
from conductor.config import ConductorConfig
from conductor.estimates.lengths import class_name
from conductor.estimates.measured import Margin
from conductor.load.cluster import Cluster
from conductor.load.decode_batch import DecodeBatch, DecodeLoad
from conductor.load.worker import WorkerState
from conductor.messages import Reject, Request
from conductor.queue_order import QueueOrder
from conductor.routing.routing import DecodeOption, Options, Pair
from mooncake_store.layout import blocks_touched

SHOWN_MAX = 3  # workers that a reason goes into
RETRY_NOBODY_S = 3.0  # workers report every second and a reload takes two


# (batch, when the prefill will end, now, expected decode time) -> load without the request
LoadPolicy = Callable[[DecodeBatch, float, float, float], DecodeLoad]


def load_reserved(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
    return batch.load_reserved()


def load_when_prefill_ends(
    batch: DecodeBatch, at_s: float, now_s: float, decode_s: float
) -> DecodeLoad:
    return batch.load_at(at_s, now_s, decode_s)


def load_now(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
    return batch.load_now()


LOAD_POLICIES: Mapping[str, LoadPolicy] = {
    "reserved": load_reserved,
    "predictive_lengths": load_when_prefill_ends,  # of all workers at once: see decode_loads()
    "predictive": load_when_prefill_ends,
    "early": load_now,
    "baseline": load_reserved,  # shown, not judged: see objection()
    "none": load_reserved,
}


def decode_loads(
    cluster: Cluster, workers: Sequence[WorkerState], at_s: float, now_s: float
) -> list[DecodeLoad]:
    """What each of these decode workers has, without the request, as the admission policy sees it
    for one whose prefill ends at `at_s`."""
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
    # A request that joins an empty batch slows nobody down, whatever may come later.
    return [load.plus(*arrivals) if load.sequences > 0 else load for load in loads]


def reject_untaken(cluster: Cluster, role: str, request: Request, now_s: float) -> Reject:
    """No worker of this role can take it: none takes requests, or each is too small. One that goes
    on waits for the worker that was large enough: it may be starting again."""
    takers = [w for w in cluster.takers(role, now_s) if w.key not in request.excluded_workers]
    tokens = request.prompt_tokens + request.output_tokens_max * (role == "decode")
    if takers and not (request.is_resumed and tokens <= cluster.largest_seen[role]):
        return _too_large(cluster, role, takers, request)
    reasons: dict[str, int] = {}
    for worker in cluster.workers.values():
        if worker.info.role == role and not worker.is_follower:
            is_small = cluster.tokens_max(worker.info) < tokens
            why = "too small for it" if is_small else "excluded by this request"
            why = cluster.why_not(worker, now_s) or why
            reasons[why] = reasons.get(why, 0) + 1
    counts = ", ".join(f"{count} x {why}" for why, count in sorted(reasons.items()))
    reason = f"no {role} worker takes requests ({counts or 'none is registered'})"
    retry_s = _bounded(RETRY_NOBODY_S, cluster.config)
    return Reject(request.request_id, f"no_{role}_worker", reason, None, retry_s)


def _too_large(
    cluster: Cluster, role: str, workers: Sequence[WorkerState], request: Request
) -> Reject:
    """No worker that is there could ever hold it; asking again will not help."""
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


def objection(pair: Pair, request: Request, config: ConductorConfig, ttft_limit_s: float) -> str:
    """The kind of rejection that this pair would meet; empty when it keeps its limits."""
    if not pair.prefill.has_room:
        return "prefill_full"
    if config.admission == "none":
        return "" if pair.decode.has_room else "decode_full"
    if pair.predicted.ttft_s > ttft_limit_s:
        return "ttft_slo"
    if config.admission == "baseline":
        return ""
    if not pair.decode.has_room:
        return "decode_full"
    if pair.predicted.tbt_s > config.tbt_limit_s(request.priority):
        return "tbt_slo"
    return ""


@dataclass(frozen=True, slots=True)
class RejectionCase:
    """All that a rejection is worded from."""

    pair: Pair
    options: Options
    request: Request
    shed: Shed | None  # of kind fair_share
    now_s: float
    cluster: Cluster

    @property
    def of_priority(self) -> str:
        priority = self.request.priority
        return f" for priority {priority}" if priority < 0 else ""


def reject_for(kind: str, case: RejectionCase) -> Reject:
    """Words, numbers, the limit, and when to come back."""
    reason, wait_s = WORDS[kind](case)
    retry_s = _bounded(wait_s, case.cluster.config)
    return Reject(case.request.request_id, kind, reason, case.pair.predicted, retry_s)


def _prefill_full(case: RejectionCase) -> tuple[str, float]:
    prefills = case.options.prefills
    queues = ", ".join(
        f"{p.worker.queue.requests} of {p.worker.info.slots_max}" for p in prefills[:SHOWN_MAX]
    )
    # There is room when the shortest queue has finished one of its requests.
    wait_s = min(p.queue_s / max(1, p.worker.queue.requests) for p in prefills)
    return f"the queues of all {len(prefills)} prefill workers are full ({queues})", wait_s


def _ttft_slo(case: RejectionCase) -> tuple[str, float]:
    config, predicted = case.cluster.config, case.pair.predicted
    limit_s, wait_s = case.options.ttft_limit_s, predicted.ttft_s - case.options.ttft_limit_s
    asked_s = config.ttft_slo_s * (
        config.low_priority_load_max if case.request.priority < 0 else 1.0
    )
    low_by = f"{asked_s / limit_s - 1:.0%} by which predictions of such prompts were too low"
    of_errors = f" ({asked_s:g} s less the {low_by})"
    reason = (
        f"predicted TTFT {predicted.ttft_s:.2f} s exceeds the {limit_s:.3g} s limit"
        f"{case.of_priority}{of_errors if limit_s < asked_s else ''} "
        f"on the best of {len(case.options.prefills)} prefill workers"
    )
    if wait_s > predicted.queue_s:
        reason += f", {predicted.ttft_s - predicted.queue_s:.2f} s of it without any queue"
        wait_s = max(option.queue_s for option in case.options.prefills)
    return reason, wait_s


def _tbt_slo(case: RejectionCase) -> tuple[str, float]:
    predicted = case.pair.predicted
    limit_s = case.cluster.config.tbt_limit_s(case.request.priority)
    reason = (
        f"predicted TBT {predicted.tbt_s:.3f} s exceeds the {limit_s:g} s limit"
        f"{case.of_priority} on the best of {len(case.options.decodes)} decode workers "
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
        reason += f"; {marked} refused a request on its arrival and not reported since"
    return reason, _decode_wait_s(case, case.cluster.config.tbt_slo_s)


def _fair_share(case: RejectionCase) -> tuple[str, float]:
    shed = case.shed
    assert shed is not None, "whoever found the kind found the reason"
    above = f"above the {shed.limit_s:.3f} s that are admitted"
    if shed.work_s <= shed.limit_s:  # in the bucket of the cut
        above = "where some are admitted in turns, and it was not its turn"
    reason = (
        f"overload: {shed.backlog_s:.2f} s of prefill queued per worker, held at "
        f"{shed.target_s:g} s; a prompt of {class_name(shed.length)} that costs "
        f"{shed.work_s:.3f} s is {above}"
    )
    if case.request.tenant or case.cluster.config.tenant_shares:
        reason += (
            f"; tenant {case.request.tenant!r} asks for {shed.wanted:.2f} and has a share of "
            f"{shed.granted:.2f} prefill seconds per second"
        )
    # The queue drains one second per second; who asks for twice its share comes half as often.
    return reason, shed.excess_s * max(1.0, shed.wanted / max(shed.granted, 1e-9))


WORDS: Mapping[str, Callable[[RejectionCase], tuple[str, float]]] = {
    "prefill_full": _prefill_full,
    "ttft_slo": _ttft_slo,
    "tbt_slo": _tbt_slo,
    "decode_full": _decode_full,
    "fair_share": _fair_share,
}
DECODE_KINDS = ("tbt_slo", "decode_full")


def _decode_wait_s(case: RejectionCase, tbt_limit_s: float) -> float:
    """Until enough requests have left one of the batches for one more to fit."""
    return min(_batch_wait_s(case, decode, tbt_limit_s) for decode in case.options.decodes)


def _batch_wait_s(case: RejectionCase, decode: DecodeOption, tbt_limit_s: float) -> float:
    request, now_s, cluster = case.request, case.now_s, case.cluster
    config, info, load = cluster.config, decode.worker.info, decode.load
    estimate, tokens = decode.worker.decode_estimate, request.prompt_tokens
    sequences = max(load.sequences, 1.0)  # the mean request stands for each of them
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
        return config.retry_after_s_max  # it would not fit an empty batch either
    return times[leaving - 1] - now_s


def _bounded(wait_s: float, config: ConductorConfig) -> float:
    return min(max(wait_s, config.retry_after_s_min), config.retry_after_s_max)


def pressure_on(
    options: Options, decode: DecodeOption, config: ConductorConfig, elsewhere: Mapping[str, float]
) -> Pressure:
    """What the pools are loaded with before this request: all prefill queues, the best batch.
    `elsewhere`: what other frontends were asked for, by tenant."""
    info, load = decode.worker.info, decode.load
    decode_load = max(
        decode.tbt_s / config.tbt_slo_s,
        load.sequences / info.slots_max,
        load.pages / info.pages_max,
    )
    return Pressure(
        options.backlog_s, options.prefill_count, decode_load, load.sequences > 0, elsewhere
    )


class Gate:
    """Says what is wrong with a pair, given what was learned; learns from what became of others."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        quantile, half_life_s = config.ttft_margin_quantile, config.demand_half_life_s
        self._margin = Margin(quantile, config.ttft_slo_s, half_life_s)
        self._order, self._overload_order = config.order, config.overload_order
        sheds = config.shedding == "fair_share" and config.admission != "none"
        self._share = FairShare(config) if sheds else None

    def order(self, request: Request) -> QueueOrder:
        """By what it queues for prefill. While some of its tenant's requests are turned away,
        cost and class decide who; an order by cost on top would keep the long ones out."""
        sheds = self._share is not None and self._share.is_shedding(request.tenant)
        return self._overload_order if sheds else self._order

    def ttft_limit_s(self, request: Request) -> float:
        """What predicted TTFT may be. A request that matters more than others takes the risk that
        the prediction is too low; one that matters less leaves more room."""
        if request.priority > 0:
            return self._config.ttft_slo_s
        share = self._config.low_priority_load_max if request.priority < 0 else 1.0
        return self._config.ttft_slo_s * share / self._margin.ratio(request.prompt_tokens)

    def objection(
        self, pair: Pair, request: Request, pressure: Pressure, ttft_limit_s: float
    ) -> str:
        """The kind of rejection that this pair would meet; empty when it is admitted. One that was
        admitted before may wait, but what it has cost is not thrown away."""
        if request.is_resumed:
            return ""
        kind = objection(pair, request, self._config, ttft_limit_s)
        if kind == "ttft_slo" and pressure.backlog_s <= 0.0:
            kind = ""
        if kind == "tbt_slo" and not pressure.is_decoding:
            kind = ""
        if not kind and self.shed(pair, request, pressure) is not None:
            return "fair_share"
        return kind

    def shed(self, pair: Pair, request: Request, pressure: Pressure) -> Shed | None:
        """Why fairness turns it away; None when it does not."""
        if self._share is None:
            return None
        return self._share.objection(request, pair.predicted.prefill_s, pressure)

    def note(
        self, pair: Pair, request: Request, pressure: Pressure, now_s: float, kind: str
    ) -> None:
        """Count a request that was decided on; `kind` is empty for one that was admitted."""
        if self._share is None:
            return
        if kind in DECODE_KINDS:
            self._share.decode_is_short()
        self._share.note(request, pair.predicted.prefill_s, pressure, now_s, not kind)

    def wanted_of(self, now_s: float) -> dict[str, float]:
        """What was offered to this frontend lately, by tenant; empty where nobody is shed."""
        return self._share.wanted_of(now_s) if self._share is not None else {}

    def decode_was_short(self) -> None:
        """A decode worker refused a request that had been admitted."""
        if self._share is not None:
            self._share.decode_is_short()

    def learn_ttft(
        self, prompt_tokens: int, predicted_s: float, actual_s: float, now_s: float
    ) -> None:
        """Both from routing to the end of prefill."""
        self._margin.learn(prompt_tokens, predicted_s, actual_s, now_s)

    def tick(self, now_s: float) -> None:
        """About once a second."""
        self._margin.fade(now_s)

    def check(self) -> None:
        """Prove the invariants."""
        self._margin.check()
        if self._share is not None:
            self._share.check()
