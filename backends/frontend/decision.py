"""What a client is told of a decision: the `decision` output, made only for who asks for it.

    policy, admission          that decided
    prefill, decode            the pair
    predicted                  its terms in seconds (conductor/messages.py, Prediction)
    predicted_cached_tokens, local_blocks, restore_blocks, fetch_blocks, fetch_node,
    second_fetch_node          where the prefix was to come from
    queue_order, place_s       order of the queue, and how far behind its arrival it stands there
    candidates                 the pairs that were considered, best first, each with its terms and a
                               verdict: chosen, slower, or why it would have been rejected
    candidates_left_out        how many more there were
    advice                     advisory mode: the rejection that was not carried out
    cached_tokens, fetched_blocks, fetched_bytes, queue_ahead, queue_s, load_s, prefill_s, put_s
                               what came of prefill
    fetched_from               bytes that each node sent for it
    ttft_s                     from the request's arrival at the front to its first token there
    decode_queue_s, decode_load_s, loaded_early_blocks, decode_read_bytes
                               what came of the hand-over

Not here: deciding (conductor/), sending it (backends/frontend/answer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from backends.workers.protocol import DecodeReply, PrefillReply
from conductor.config import ConductorConfig
from conductor.messages import Candidate, Route

CANDIDATES_MAX = 16  # a fleet has thousands of pairs


@dataclass(frozen=True, slots=True)
class Decided:
    """A route and why it was taken."""

    route: Route
    decided_at_s: float  # on the clock of route.order_key_s
    candidates: Sequence[Candidate] = ()  # the first CANDIDATES_MAX; empty unless somebody asked
    candidates_left_out: int = 0

    def facts(self, config: ConductorConfig) -> dict[str, object]:
        route = self.route
        found: dict[str, object] = {
            "policy": config.policy,
            "admission": config.admission,
            "prefill": route.prefill.worker_id,
            "decode": route.decode.worker_id,
            "predicted": asdict(route.predicted),
            "predicted_cached_tokens": route.cached_tokens,
            "local_blocks": route.local_blocks,
            "restore_blocks": route.restore_blocks,
            "fetch_blocks": route.fetch_blocks,
            "fetch_node": route.fetch_node,
            "second_fetch_node": route.second_fetch_node,
            "queue_order": config.queue_order,
            "place_s": route.order_key_s - self.decided_at_s,
        }
        if self.candidates:
            found["candidates"] = [candidate_facts(candidate) for candidate in self.candidates]
            found["candidates_left_out"] = self.candidates_left_out
        if (advice := route.advice) is not None:
            found["advice"] = {
                "kind": advice.kind,
                "reason": advice.reason,
                "retry_after_s": advice.retry_after_s,
            }
        return found


def candidate_facts(candidate: Candidate) -> dict[str, object]:
    return {
        "prefill": candidate.prefill.worker_id,
        "decode": candidate.decode.worker_id,
        "verdict": candidate.verdict,
        "cached_tokens": candidate.cached_tokens,
        "local_blocks": candidate.local_blocks,
        "fetch_blocks": candidate.fetch_blocks,
        "fetch_node": candidate.fetch_node,
        "predicted": asdict(candidate.predicted),
    }


def prefill_facts(reply: PrefillReply) -> dict[str, object]:
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


def decode_facts(end: DecodeReply) -> dict[str, object]:
    return {
        "decode_queue_s": end.queue_s,
        "decode_load_s": end.load_s,
        "loaded_early_blocks": end.loaded_early_blocks,
        "decode_read_bytes": end.read_bytes,
    }
