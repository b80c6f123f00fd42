"""Whether the best pair is good enough, and if not, what to tell the client.

A request that will miss its service level wastes the prefill that is spent on it, so it is better
rejected before (Mooncake, "Overload"). What "will miss" means on the decode side is a policy, a
function from a decode worker's charges to the load that the request would meet:

    reserved   all that is decoding or on its way there; nobody is assumed to leave
    predictive_lengths  ours: the same moment, where each request leaves with the probability that
                its class of prompts gives an answer of its age (lengths.py, decode_forecast.py)
    predictive  the paper's system-level form: the load when this prefill will have ended, which
               adds the requests that will have joined and takes away those that will have left
                (both predictions also keep room for those yet to come: load/expected_arrivals.py)
    early      the load now; it acts one prefill too late, so the two pools swing
    baseline   no decode check: overload there shows only after prefill was paid for
    none       no service level is checked; only bounded queues and batches reject

`reserved` keeps what it promises; `predictive_lengths` wastes least (README.md says where the
numbers are). The gain of `predictive` is room that will be free; its price is that a request with a
long prefill books that room ahead of those with a short one, and that two bookings of one room are
noticed late.
A new policy is a new entry in LOAD_POLICIES; it must be a pure function of the same arguments.

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

from conductor.admission.fair_share import Shed
from conductor.config import ConductorConfig
from conductor.estimates.length_class import class_name
from conductor.load.cluster import Cluster
from conductor.load.decode_batch import DecodeBatch, Load
from conductor.load.worker import Worker
from conductor.messages import Reject, Request
from conductor.routing.pair import DecodeOption, Pair
from conductor.routing.routing import Options
from mooncake_store.layout import blocks_touched

SHOWN_MAX = 3  # workers that a reason goes into
RETRY_NOBODY_S = 3.0  # workers report every second and a reload takes two


# (batch, when the prefill will end, now, expected decode time) -> load without the request
LoadPolicy = Callable[[DecodeBatch, float, float, float], Load]


def load_reserved(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> Load:
    return batch.load_reserved()


def load_when_prefill_ends(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> Load:
    return batch.load_at(at_s, now_s, decode_s)


def load_now(batch: DecodeBatch, at_s: float, now_s: float, decode_s: float) -> Load:
    return batch.load_now()


LOAD_POLICIES: Mapping[str, LoadPolicy] = {
    "reserved": load_reserved,
    "predictive_lengths": load_when_prefill_ends,  # of all workers at once: see decode_loads()
    "predictive": load_when_prefill_ends,
    "early": load_now,
    "baseline": load_reserved,  # told, not judged: see objection()
    "none": load_reserved,
}


def decode_loads(
    cluster: Cluster, workers: Sequence[Worker], at_s: float, now_s: float
) -> list[Load]:
    """What each of these decode workers has, without the request, as the admission policy sees it
    for one whose prefill ends at `at_s`."""
    if cluster.forecasts is not None:
        known = [w.batch.forecast.row for w in workers if w.batch.forecast is not None]
        rows = np.array(known, dtype=np.intp)
        loads = [Load(*row) for row in cluster.forecasts.at(rows, at_s).tolist()]
    else:
        policy, decode_s = LOAD_POLICIES[cluster.config.admission], cluster.decode_s
        loads = [policy(worker.batch, at_s, now_s, decode_s) for worker in workers]
    if cluster.overtakers is None:
        return loads
    more, context, room = cluster.overtakers.expected(at_s, now_s, len(cluster.decodes.workers))
    # Whoever finds nobody there harms nobody, whatever may come later.
    return [
        Load(load.sequences + more, load.context_tokens + context, load.pages + room)
        if load.sequences > 0 else load
        for load in loads
    ]  # fmt: skip


def reject_nobody(cluster: Cluster, role: str, request: Request, now_s: float) -> Reject:
    """No worker of this role takes requests: say what is wrong with each kind of them."""
    reasons: dict[str, int] = {}
    for worker in cluster.workers.values():
        if worker.info.role == role:
            why = cluster.why_not(worker, now_s) or "excluded by this request"
            reasons[why] = reasons.get(why, 0) + 1
    told = ", ".join(f"{count} x {why}" for why, count in sorted(reasons.items()))
    reason = f"no {role} worker takes requests ({told or 'none is registered'})"
    retry_s = _bounded(RETRY_NOBODY_S, cluster.config)
    return Reject(request.request_id, f"no_{role}_worker", reason, None, retry_s)


def reject_too_large(role: str, workers: Sequence[Worker], request: Request) -> Reject:
    """No worker that is there could ever hold it; asking again will not help."""
    output = f" + {request.output_tokens_max} to generate" if role == "decode" else ""
    largest = max(
        min(w.info.context_tokens_max, w.info.pages_max * w.info.block_tokens) for w in workers
    )
    reason = (
        f"{request.prompt_tokens} prompt tokens{output} exceed the {largest} tokens that the "
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
class Refusal:
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


def reject_for(kind: str, refusal: Refusal) -> Reject:
    """Words, numbers, the limit, and when to come back."""
    reason, wait_s = WORDS[kind](refusal)
    retry_s = _bounded(wait_s, refusal.cluster.config)
    return Reject(refusal.request.request_id, kind, reason, refusal.pair.predicted, retry_s)


def _prefill_full(refusal: Refusal) -> tuple[str, float]:
    prefills = refusal.options.prefills
    queues = ", ".join(f"{p.worker.queue.requests} of {p.worker.info.slots_max}"
                       for p in prefills[:SHOWN_MAX])  # fmt: skip
    # A place is free when the shortest queue has finished one of its requests.
    wait_s = min(p.queue_s / max(1, p.worker.queue.requests) for p in prefills)
    return f"the queues of all {len(prefills)} prefill workers are full ({queues})", wait_s


def _ttft_slo(refusal: Refusal) -> tuple[str, float]:
    config, predicted = refusal.cluster.config, refusal.pair.predicted
    limit_s, wait_s = refusal.options.ttft_limit_s, predicted.ttft_s - refusal.options.ttft_limit_s
    asked_s = config.ttft_slo_s * (
        config.low_priority_load_max if refusal.request.priority < 0 else 1.0
    )
    low_by = f"{asked_s / limit_s - 1:.0%} by which predictions of such prompts were too low"
    of_errors = f" ({asked_s:g} s less the {low_by})"
    reason = (
        f"predicted TTFT {predicted.ttft_s:.2f} s exceeds the {limit_s:.3g} s limit"
        f"{refusal.of_priority}{of_errors if limit_s < asked_s else ''} "
        f"on the best of {len(refusal.options.prefills)} prefill workers"
    )
    if wait_s > predicted.queue_s:
        reason += f", {predicted.ttft_s - predicted.queue_s:.2f} s of it without any queue"
        wait_s = max(option.queue_s for option in refusal.options.prefills)
    return reason, wait_s


def _tbt_slo(refusal: Refusal) -> tuple[str, float]:
    predicted = refusal.pair.predicted
    limit_s = refusal.cluster.config.tbt_limit_s(refusal.request.priority)
    reason = (
        f"predicted TBT {predicted.tbt_s:.3f} s exceeds the {limit_s:g} s limit"
        f"{refusal.of_priority} on the best of {len(refusal.options.decodes)} decode workers "
        f"({predicted.decode_sequences:.0f} requests)"
    )
    return reason, _least_decode_wait_s(refusal, limit_s)


def _decode_full(refusal: Refusal) -> tuple[str, float]:
    decodes = refusal.options.decodes
    taken = ", ".join(
        f"{d.load.sequences:.0f} of {d.worker.info.slots_max} slots and "
        f"{d.load.pages:.0f} of {d.worker.info.pages_max} pages taken"
        for d in decodes[:SHOWN_MAX]
    )
    reason = f"no room on any of {len(decodes)} decode workers ({taken})"
    marked = len(refusal.cluster.overloaded(refusal.now_s))
    if marked:
        reason += f"; {marked} refused a request on its arrival and not reported since"
    return reason, _least_decode_wait_s(refusal, refusal.cluster.config.tbt_slo_s)


def _fair_share(refusal: Refusal) -> tuple[str, float]:
    shed = refusal.shed
    assert shed is not None, "whoever found the kind found the reason"
    above = f"above the {shed.limit_s:.3f} s that are admitted"
    if shed.work_s <= shed.limit_s:  # in the bucket of the cut
        above = "where some are admitted in turns, and it was not its turn"
    reason = (
        f"overload: {shed.backlog_s:.2f} s of prefill queued per worker, held at "
        f"{shed.target_s:g} s; a prompt of {class_name(shed.length)} that costs "
        f"{shed.work_s:.3f} s is {above}"
    )
    if refusal.request.tenant or refusal.cluster.config.tenant_shares:
        reason += (
            f"; tenant {refusal.request.tenant!r} asks for {shed.wanted:.2f} and has a share of "
            f"{shed.granted:.2f} prefill seconds per second"
        )
    # The queue drains one second per second; who asks for twice its share comes half as often.
    return reason, shed.excess_s * max(1.0, shed.wanted / max(shed.granted, 1e-9))


WORDS: Mapping[str, Callable[[Refusal], tuple[str, float]]] = {
    "prefill_full": _prefill_full,
    "ttft_slo": _ttft_slo,
    "tbt_slo": _tbt_slo,
    "decode_full": _decode_full,
    "fair_share": _fair_share,
}
DECODE_KINDS = ("tbt_slo", "decode_full")


def _least_decode_wait_s(refusal: Refusal, limit_s: float) -> float:
    now_s, cluster = refusal.now_s, refusal.cluster
    return min(
        _decode_wait_s(d, refusal.request, limit_s, now_s, cluster) for d in refusal.options.decodes
    )


def _decode_wait_s(
    decode: DecodeOption, request: Request, tbt_limit_s: float, now_s: float, cluster: Cluster
) -> float:
    """Until enough requests have left this batch for one more to fit."""
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
