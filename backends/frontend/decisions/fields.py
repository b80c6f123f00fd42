"""A decision as JSON: the `decision` output of a request, and the latest ones of a frontend. Pure.

    policy, admission          names of the policies that decided
    prefill, decode            the chosen pair of workers
    predicted                  its terms in seconds (conductor/messages.py, Prediction)
    predicted_cached_tokens, local_blocks, restore_blocks, fetch_blocks, fetch_node,
    second_fetch_node          predicted sources of the prefix
    queue_order, place_s       order of the queue; queue order key minus decision time, in seconds
    candidates                 the pairs considered, best first, each with its terms and a verdict:
                               chosen, slower, or why it would have been rejected
    candidates_left_out        number of further pairs
    advice                     advisory mode: the rejection that was not carried out
    cached_tokens, fetched_blocks, fetched_bytes, queue_ahead, queue_s, load_s, prefill_s, put_s
                               measured by the prefill worker
    fetched_from               bytes that each node sent for the prefix
    ttft_s                     from the parsed request to its first token at the frontend
    decode_queue_s, decode_load_s, loaded_early_blocks, decode_read_bytes
                               measured by the decode worker during the hand-over

Not here: sending them (answer.py to the request's client, overview.py to operators).
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.frontend.decisions.latest import Decided, DecisionRecord
from backends.workers.protocol import DecodeReply, PrefillReply
from conductor.config import ConductorConfig
from conductor.messages import Candidate, Reject


def route_fields(decided: Decided, config: ConductorConfig) -> dict[str, object]:
    route = decided.route
    found: dict[str, object] = {
        "policy": config.policy,
        "admission": config.admission,
        "prefill": route.prefill.worker_id,
        "decode": route.decode.worker_id,
        "predicted": route.predicted._asdict(),
        "predicted_cached_tokens": route.cached_tokens,
        "local_blocks": route.local_blocks,
        "restore_blocks": route.restore_blocks,
        "fetch_blocks": route.fetch_blocks,
        "fetch_node": route.fetch_node,
        "second_fetch_node": route.second_fetch_node,
        "queue_order": config.queue_order,
        "place_s": route.order_key_s - decided.decided_at_s,
    }
    if decided.candidates:
        found |= candidates_fields(decided.candidates, decided.candidates_left_out)
    if (advice := route.advice) is not None:
        found["advice"] = {
            "kind": advice.kind,
            "reason": advice.reason,
            "retry_after_s": advice.retry_after_s,
        }
    return found


def reject_fields(rejected: Reject, config: ConductorConfig) -> dict[str, object]:
    """Fields of a rejection, for its span."""
    return {
        "policy": config.policy,
        "admission": config.admission,
        "rejected": rejected.kind,
        "predicted": rejected.predicted._asdict() if rejected.predicted is not None else None,
    }


def candidates_fields(candidates: Sequence[Candidate], left_out: int) -> dict[str, object]:
    return {
        "candidates": [candidate_fields(candidate) for candidate in candidates],
        "candidates_left_out": left_out,
    }


def candidate_fields(candidate: Candidate) -> dict[str, object]:
    return {
        "prefill": candidate.prefill.worker_id,
        "pipeline_stages": candidate.pipeline_stages,
        "decode": candidate.decode.worker_id,
        "verdict": candidate.verdict,
        "cached_tokens": candidate.cached_tokens,
        "local_blocks": candidate.local_blocks,
        "fetch_blocks": candidate.fetch_blocks,
        "fetch_node": candidate.fetch_node,
        "predicted": candidate.predicted._asdict(),
    }


def prefill_fields(reply: PrefillReply) -> dict[str, object]:
    return {
        "cached_tokens": reply.cached_tokens,
        "fetched_blocks": reply.fetched_blocks,
        "fetched_bytes": reply.fetched_bytes,
        "fetched_from": reply.fetched_from,
        "queue_ahead": reply.queue_ahead,
        "queue_s": reply.queue_s,
        "load_s": reply.load_s,
        "prefill_s": reply.compute_s,
        "put_s": reply.put_s,
    }


def decode_fields(end: DecodeReply) -> dict[str, object]:
    return {
        "decode_queue_s": end.queue_s,
        "decode_load_s": end.load_s,
        "loaded_early_blocks": end.loaded_early_blocks,
        "decode_read_bytes": end.read_bytes,
    }


def record_fields(
    record: DecisionRecord, config: ConductorConfig, now_s: float
) -> dict[str, object]:
    """Fields of a recorded decision, for the list of the latest."""
    decision = record.decision
    found: dict[str, object] = {
        "age_s": now_s - record.at_s,
        "request_id": record.request_id,
        "tenant": record.tenant,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens_max": record.output_tokens_max,
        "priority": record.priority,
        "is_resumed": record.is_resumed,
        "blocks": record.blocks,
        "prefix": record.prefix,
    }
    if isinstance(decision, Reject):
        found |= reject_fields(decision, config)
        found |= {"reason": decision.reason, "retry_after_s": decision.retry_after_s}
    else:
        found |= route_fields(decision, config)
    found |= candidates_fields(record.candidates, record.candidates_left_out)
    if record.cached_tokens is not None:
        found["came"] = {
            "cached_tokens": record.cached_tokens,
            "prefill_s": record.prefill_s,
            "first_token_s": record.first_token_s,
        }
    return found
