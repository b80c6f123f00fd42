"""One prompt inside a prefill worker, from submit to answer.

Only the state of one prompt; who computes what next is prefill_worker.py's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backends.metrics.page import Observations
from backends.workers.kv_writer import BlockPut
from backends.workers.protocol import BlockRef, FirstToken, PrefillReply, PrefillRequest


class PrefillClient(Protocol):
    def prefilled(self, token_id: int, reply: PrefillReply) -> None: ...
    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class PrefillJob:
    request: PrefillRequest
    token_ids: np.ndarray
    client: PrefillClient
    put: BlockPut
    submitted_s: float
    queue_ahead: int = 0  # prompts in front of it when it came
    cached_tokens: int = 0
    fetched_blocks: int = 0
    fetched_from: dict[str, int] = field(default_factory=dict)  # bytes by node
    load_s: float = 0.0
    compute_s: float = 0.0
    computed_at_s: float = 0.0
    is_loading: bool = False  # a loader writes into its pages
    is_stopped: bool = False
    error: Exception | None = None  # it failed with this, and leaves
    computed_tokens: int = 0  # so far; not the cached ones
    # Where the engine itself hands KV over: what its other half needs.
    native: bytes = b""
    # False: decode computes the prompt again instead of reading blocks, or has KV natively.
    hands_over_blocks: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_leaving(self) -> bool:
        """Nothing more is to be done for it. A put that failed has no use for further chunks."""
        return self.is_stopped or self.error is not None or self.put.error is not None

    def fail(self, error: Exception) -> None:
        """Nothing more is written for it."""
        self.error = error
        self.put.is_ended = True

    @property
    def queue_s(self) -> float:
        """Of a computed prompt, all that was neither loading nor computing: waiting for a loader,
        for another prompt's blocks, and, loaded, while the engine computed other prompts."""
        waited_s = self.computed_at_s - self.submitted_s - self.load_s - self.compute_s
        return max(0.0, waited_s)

    def first_token(self, token_id: int) -> FirstToken | None:
        """What the client may have before the reply; None when the token could end the answer."""
        sampling = self.request.sampling
        output_tokens = len(self.token_ids) - self.request.prompt_tokens + 1
        is_last = output_tokens >= sampling.max_tokens or token_id in sampling.end_ids
        if not self.request.reply_inbox or is_last or sampling.stop_words:
            return None
        return FirstToken(self.request_id, token_id, self.cached_tokens)

    def reply(self, incarnation: str, block_bytes: int) -> PrefillReply:
        """After its last block was committed."""
        return PrefillReply(
            incarnation=incarnation,
            cached_tokens=self.cached_tokens,
            fetched_blocks=self.fetched_blocks,
            fetched_bytes=self.fetched_blocks * block_bytes,
            blocks=self._handed_over(),
            queue_s=self.queue_s,
            load_s=self.load_s,
            compute_s=self.compute_s,
            put_s=time.monotonic() - self.computed_at_s,
            queue_ahead=self.queue_ahead,
            native=self.native,
            fetched_from=self.fetched_from,
        )

    def _handed_over(self) -> list[BlockRef]:
        if not self.hands_over_blocks:
            return []
        return [self.put.refs[index] for index in sorted(self.put.refs)]

    def observe_abort(self, observations: Observations) -> None:
        """It leaves without an answer: what was computed for it was for nothing."""
        if self.computed_tokens:
            observations.observe("mooncake_aborted_prefill_tokens_total", self.computed_tokens)

    def observe(self, reply: PrefillReply, block_tokens: int, observations: Observations) -> None:
        """Where its time went and how its tokens' KV came."""
        fetched = min(self.fetched_blocks * block_tokens, self.cached_tokens)
        for path, tokens in (
            ("computed", len(self.token_ids) - self.cached_tokens),
            ("fetched", fetched),
            ("local", self.cached_tokens - fetched),
        ):
            observations.observe("mooncake_prompt_tokens_total", tokens, path=path)
        observations.observe("mooncake_output_tokens_total")
        observations.observe("mooncake_prefill_queue_seconds", reply.queue_s)
        if self.cached_tokens:
            observations.observe("mooncake_prefix_load_seconds", reply.load_s)
        observations.observe("mooncake_prefill_compute_seconds", reply.compute_s)
        observations.observe("mooncake_handover_put_seconds", reply.put_s)
