"""An attempt of a request: its pair of workers, and its calls to them.

Several answers to one prompt share the call to a prefill worker (live_request.py). The worker then
samples a first token for each answer, and leases the prompt's blocks to each.

Not here: sending the calls (grpc_calls.py), the course of an attempt (lifecycle/).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from backends.frontend.decisions.latest import Decided
from backends.frontend.lifecycle.events import FirstText
from backends.frontend.request import ClientRequest
from backends.frontend.token_streams import TokenStreams
from backends.workers.protocol import DecodeRequest, PrefillReply, PrefillRequest


@dataclass(slots=True)
class Assignment:
    """An attempt, and the pair of workers to which it was routed."""

    request_id: str  # of this attempt only, so that its late messages do not reach the next one
    token_ids: np.ndarray  # the prompt, then the answer tokens that the client already had
    decided: Decided
    routed_s: float  # monotonic time of the routing decision
    prefilled: tuple[int, PrefillReply] | None = None  # (first token id, reply); None before reply
    replied_s: float = 0.0  # monotonic time of the prefill reply; 0.0 before the reply
    first: FirstText | None = None  # first token as text; None until the token arrived
    is_copy: bool = False  # True: another answer to the same prompt made the call for prefill

    def prefill_call(
        self,
        request: ClientRequest,
        streams: TokenStreams,
        is_resumed: bool,
        trace_id: str,
        copies: Sequence[str],
    ) -> PrefillRequest:
        """`copies`: ids of the first attempts of further answers to the prompt."""
        route, prompt_tokens = self.decided.route, len(request.prompt_ids)
        return PrefillRequest(
            request_id=self.request_id,
            prompt_tokens=prompt_tokens,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            fetch_blocks=route.fetch_blocks,
            fetch_nodes=list(route.fetch_nodes),
            decode_inbox=route.decode.inbox if request.sampling.max_tokens > 1 else "",
            reserve_tokens=prompt_tokens + request.sampling.max_tokens,
            reply_inbox=streams.address,
            place_s=route.order_key_s - time.monotonic(),
            is_resumed=is_resumed,
            trace_id=trace_id,
            near_blocks=route.local_blocks - route.restore_blocks,
            copies=list(copies),
        )

    def decode_call(
        self,
        request: ClientRequest,
        streams: TokenStreams,
        is_resumed: bool,
        trace_id: str,
        tbt_slo_s: float,
    ) -> DecodeRequest:
        """`tbt_slo_s`: the worker rejects the request if a step would take longer; 0: no limit."""
        assert self.prefilled is not None
        _, prefilled = self.prefilled
        return DecodeRequest(
            request_id=self.request_id,
            prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            blocks=prefilled.blocks,
            stream_interval=request.stream_interval if request.is_stream else 0,
            reply_inbox=streams.address,
            tbt_slo_s=tbt_slo_s,
            is_resumed=is_resumed,
            native=prefilled.native,
            trace_id=trace_id,
            first_logprobs=prefilled.logprobs,
            priority=request.priority,
            messages_per_s_max=streams.messages_per_s_max if request.is_paced else 0,
        )


def prefilled_copies(reply: PrefillReply) -> list[tuple[int, PrefillReply]]:
    """(first token id, reply) of each further answer that the worker sampled."""
    return [
        (copy.token_id, msgspec.structs.replace(reply, logprobs=copy.logprobs, copies=[]))
        for copy in reply.copies
    ]
