"""JobState of one request inside a worker, from submit to reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from backends.engine.interface import LayerPassing
from backends.engine.sampling import Guide
from backends.metrics.page import Observations
from backends.text.text_stream import OutputDelta, TextStream, merge
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import PromptLogprobs, PromptScores, TokenLogprobs
from backends.workers.arrivals import Arrival
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle.states import ENDING, LEFT, JobState
from backends.workers.prefix_loading import LayeredPrefix
from backends.workers.protocol import (
    BlockRef,
    CopyToken,
    DecodeReply,
    DecodeRequest,
    FirstToken,
    PrefillReply,
    PrefillRequest,
    TokenUpdate,
)
from mooncake_store.block_keys import block_keys, chain_seed, extend_keys, tenant_of


class Client(Protocol):
    """Receives the result of a request: one call per request, from any thread."""

    def fail(self, error: Exception) -> None: ...


class PrefillClient(Client, Protocol):
    def prefilled(self, token_id: int, reply: PrefillReply) -> None: ...


class DecodeClient(Client, Protocol):
    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None: ...


R = TypeVar("R", PrefillRequest, DecodeRequest)
C = TypeVar("C", bound=Client)


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Generic[R, C]):
    """Common state of prefill and decode requests."""

    request: R
    client: C
    submitted_s: float  # arrival at this worker (monotonic)
    state: JobState = field(default_factory=JobState)  # only the worker's `post` changes it
    pages_left: list[int] = field(default_factory=list)  # pages of a job that has left the batch
    # Grammar matcher after all output tokens so far. None before the KV is loaded, or if unused.
    guide: Guide | None = None
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def is_leaving(self) -> bool:
        """True if no more work is done for the job."""
        return self.state.phase in ENDING

    @property
    def has_left(self) -> bool:
        """True if the job is in none of the worker's tables."""
        return self.state.phase in LEFT

    def given_output_ids(self) -> list[int]:
        """The output tokens that the request already had when it arrived."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillJob(Job[PrefillRequest, PrefillClient]):
    token_ids: np.ndarray  # int32; the prompt, and the output tokens of a resumed request
    put: BlockPut  # the KV blocks to store
    queue_ahead: int = 0  # prompts before this one in queue order at its arrival
    cached_tokens: int = 0  # leading tokens with loaded KV; 0 <= cached_tokens < len(token_ids)
    fetched_blocks: int = 0  # blocks brought from other nodes, or from the local node's SSD
    fetched_from: dict[str, int] = field(default_factory=dict)  # node -> bytes
    load_s: float = 0.0  # sum over the loads of the cached prefix
    loading_from_s: float | None = None  # start of the latest load (monotonic)
    computing_from_s: float | None = None  # start of the first chunk (monotonic)
    compute_s: float = 0.0  # sum over the steps that computed chunks of the prompt
    computed_at_s: float = 0.0  # end of the last chunk (monotonic)
    computed_tokens: int = 0  # tokens computed so far, without the cached ones
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the sampled token, if wanted
    copies: list[CopyToken] = field(default_factory=list)  # first tokens of request.copies
    scores: PromptScores | None = None  # logprobs of the prompt; None: not wanted
    layers: LayeredJob | None = None  # state of layer-wise prefill; None: chunked prefill
    native: bytes = b""  # hand-over data of an engine that moves KV by itself
    hands_over_blocks: bool = True  # False: the decode engine computes the prompt again

    def end_writes(self) -> None:
        """Drop the writes of the prompt's KV that are still queued."""
        self.put.is_ended = True

    def given_output_ids(self) -> list[int]:
        return list(map(int, self.token_ids[self.request.prompt_tokens :]))

    @property
    def queue_s(self) -> float:
        """Time from the arrival to the last chunk without the loads and steps of this prompt.

        In this time, the prompt waited for pages, a loader, another prompt's blocks, or the engine.
        """
        waited_s = self.computed_at_s - self.submitted_s - self.load_s - self.compute_s
        return max(0.0, waited_s)

    def first_token(self, token_id: int) -> FirstToken | None:
        """The message with the first token. None if the request has no reply inbox, or if the
        token may end the output. If there are stop words, every token may end the output. With
        logprobs of the prompt, which only the reply has, there is no message either."""
        sampling = self.request.sampling
        output_tokens = len(self.token_ids) - self.request.prompt_tokens + 1
        is_last = output_tokens >= sampling.max_tokens or token_id in sampling.end_ids
        needs_reply = is_last or sampling.stop_words or sampling.scores_prompt
        if not self.request.reply_inbox or needs_reply:
            return None
        return FirstToken(self.request_id, token_id, self.cached_tokens, self.logprobs)

    def reply(self, incarnation: str, block_bytes: int) -> PrefillReply:
        has_blocks = self.hands_over_blocks and not self.native
        return PrefillReply(
            incarnation=incarnation,
            cached_tokens=self.cached_tokens,
            fetched_blocks=self.fetched_blocks,
            fetched_bytes=self.fetched_blocks * block_bytes,
            blocks=[self.put.refs[index] for index in sorted(self.put.refs)] if has_blocks else [],
            queue_s=self.queue_s,
            load_s=self.load_s,
            compute_s=self.compute_s,
            put_s=time.monotonic() - self.computed_at_s,
            queue_ahead=self.queue_ahead,
            native=self.native,
            fetched_from=self.fetched_from,
            load_at_s=self._after_arrival_s(self.loading_from_s),
            compute_at_s=self._after_arrival_s(self.computing_from_s),
            logprobs=self.logprobs,
            copies=self.copies,
            prompt_logprobs=self.scores.packed() if self.scores else PromptLogprobs(),
        )

    def _after_arrival_s(self, at_s: float | None) -> float:  # -1: unknown
        return -1.0 if at_s is None else at_s - self.submitted_s

    def observe(self, reply: PrefillReply, block_tokens: int, observations: Observations) -> None:
        """Count the prompt's tokens by the source of their KV, and the durations, in metrics."""
        fetched = min(self.fetched_blocks * block_tokens, self.cached_tokens)
        for path, tokens in (
            ("computed", len(self.token_ids) - self.cached_tokens),
            ("fetched", fetched),
            ("local", self.cached_tokens - fetched),
        ):
            observations.observe("mooncake_prompt_tokens_total", tokens, path=path)
        observations.observe("mooncake_output_tokens_total", 1 + len(self.copies))
        observations.observe("mooncake_prefill_queue_seconds", reply.queue_s)
        if self.cached_tokens:
            observations.observe("mooncake_prefix_load_seconds", reply.load_s)
        observations.observe("mooncake_prefill_compute_seconds", reply.compute_s)
        observations.observe("mooncake_handover_put_seconds", reply.put_s)


@dataclass(slots=True)
class LayeredJob:
    """Additional state of a layer-wise prefill."""

    prefix: LayeredPrefix | None = None  # the cached blocks to load; None: not located yet
    computing: LayerPassing | None = None  # the engine's state, from the first chunk on
    load_left_s: float = 0.0  # time left for all further loads of this attempt
    computed_parts: int = 0  # computed (token, layer) pairs, including abandoned attempts
    attempts: int = 0  # number of attempts begun
    due: int = 0  # the layer of the prefix to read next


class DecodeJob(Job[DecodeRequest, DecodeClient]):
    def __init__(
        self,
        request: DecodeRequest,
        ids: np.ndarray,
        client: DecodeClient,
        tokenizer: Tokenizer,
        fingerprint: str,
        incarnation: str,
        block_tokens: int,
    ) -> None:
        super().__init__(request=request, client=client, submitted_s=time.monotonic())
        self._incarnation = incarnation
        self.token_ids: list[int] = ids.tolist()
        self.tokens_given = len(self.token_ids)  # number of tokens at the arrival
        self.prompt_ids = self.token_ids[: request.prompt_tokens]
        self.output_ids = self.token_ids[request.prompt_tokens :]
        self.arrival: Arrival | None = None  # the job's pages and their contents; None: no pages
        self.queue_s = 0.0  # this and the next two values are for DecodeReply
        self.load_s = 0.0
        self.loaded_early_blocks = 0
        self.finish_reason = ""  # "": the job has not finished
        self._block_tokens = block_tokens
        self._seed = chain_seed(fingerprint, cache_salt=request.cache_salt)
        self._keys = block_keys(ids[:-1], block_tokens, self._seed)
        self.keys_given = tuple(self._keys)  # block keys of the full handed-over blocks
        self._kv_tokens = len(self.token_ids) - 1  # tokens with KV; the newest token has none
        self.filled: list[int] = []  # blocks filled by decoding and not yet written to the store
        self.saved_blocks = 0  # number of leading blocks whose KV is complete in the pages
        self._put: BlockPut | None = None
        self.saving: BlockPut | None = None  # writes of a preempted job; None: none under way
        self.saved: Sequence[BlockRef] | None = None  # KV that a preemption stored; None: none
        before = self.token_ids[-1 - CONTEXT_TOKENS : -1]
        sampling = request.sampling
        decided = len(self.output_ids) - 1
        self._text = TextStream(
            tokenizer,
            before,
            sampling.stop_words,
            sampling.end_ids,
            max(sampling.min_tokens - decided, 0),
            sampling.shows_special,
        )
        # The frontend has made the same delta of this token, so the delta is not used here.
        self._text.push([self.token_ids[-1]], logprobs=request.first_logprobs)
        self._unread_ids: list[int] = []  # decoded tokens not yet pushed into the text
        self._pending: list[OutputDelta] = []  # output deltas of the next message
        self._pending_tokens = 0  # number of tokens in `_pending`
        self._tokens_before = 0  # tokens in earlier messages
        self.update_sent_s = 0.0  # time of the latest message with tokens (monotonic)
        # Logprobs, if requested, of sampled tokens that are not yet pushed into the text.
        self.drawn_logprobs: list[TokenLogprobs] = []

    def given_output_ids(self) -> list[int]:
        return self.token_ids[self.request.prompt_tokens : self.tokens_given]

    @property
    def tokens_decoded(self) -> int:
        """Number of tokens that this worker has decoded."""
        return len(self.token_ids) - self.tokens_given

    @property
    def pages(self) -> list[int]:
        assert self.arrival is not None, f"{self.request_id} has no pages yet"
        return self.arrival.pages

    @property
    def put(self) -> BlockPut:
        """The state of the writes of blocks that this request fills."""
        if self._put is None:
            self._put = self._new_put()
        return self._put

    def _new_put(self) -> BlockPut:
        return BlockPut(
            self.request_id,
            self._kv_tokens,
            self.pages,
            self._keys,
            first_block=0,
            tenant=tenant_of(self.request.cache_salt),
        )

    @property
    def blocks(self) -> Sequence[BlockRef]:
        """Locations of the request's KV in the store, to be read when the request gets pages."""
        return self.request.blocks if self.saved is None else self.saved

    def give_up_pages(self) -> BlockPut:
        """Move the job's pages to `pages_left`. Returns the writes to do before their release."""
        put = self._new_put()
        self.pages_left, self.arrival, self._put = self.pages, None, None
        return put

    def take_saved(self) -> list[int]:
        """Remove from `filled` the blocks that can be written to the store now. Returns them."""
        saved = [block for block in self.filled if block < self.saved_blocks]
        if saved:
            self.filled = [block for block in self.filled if block >= self.saved_blocks]
        return saved

    def decoded(self, token_id: int) -> None:
        """Append a sampled token; the previous token now has KV. May set `finish_reason`."""
        self._kv_tokens += 1
        if self._kv_tokens % self._block_tokens == 0:
            self.filled.append(self._kv_tokens // self._block_tokens - 1)
            last = self._keys[-1] if self._keys else self._seed
            newest = self.token_ids[self._kv_tokens - self._block_tokens : self._kv_tokens]
            self._keys += extend_keys(last, newest, self._block_tokens)
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        sampling = self.request.sampling
        self._unread_ids.append(token_id)
        if sampling.stop_words:  # without stop words, text is made only for a message
            self._read_text()
        if self._text.is_stopped:
            self.finish_reason = "stop_word"
        elif token_id in sampling.end_ids:
            self.finish_reason = "end_id"
        elif len(self.output_ids) >= sampling.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            self._read_text()
            self._pending.append(self._text.finish())

    def _read_text(self) -> None:
        if not self._unread_ids:
            return
        token_ids, self._unread_ids = self._unread_ids, []
        logprobs, self.drawn_logprobs = self.drawn_logprobs, []
        delta = self._text.push(token_ids, logprobs=logprobs)
        self._pending.append(delta)
        self._pending_tokens += len(delta.token_ids)

    @property
    def has_update(self) -> bool:
        """True if `stream_interval` or more tokens are unsent; always False with interval 0."""
        tokens = self._pending_tokens + len(self._unread_ids)
        return 0 < self.request.stream_interval <= tokens

    @property
    def waits_for_more(self) -> bool:
        """True if tokens may be delayed, because messages are limited and the first was sent."""
        return self.request.messages_per_s_max > 0 and self._tokens_before > 0

    def take_update(self) -> TokenUpdate:
        """The message with the tokens since the last message."""
        before, pending = self._take_pending()
        return TokenUpdate(
            self.request_id,
            before,
            list(pending.token_ids),
            pending.text,
            list(pending.context_ids),
            pending.cut_bytes,
            list(pending.logprobs),
        )

    def reply(self) -> None:
        """Send the reply: the remaining tokens, the finish reason, the durations."""
        before, pending = self._take_pending()
        reply = DecodeReply(
            incarnation=self._incarnation,
            tokens_before=before,
            text=pending.text,
            context_ids=list(pending.context_ids),
            cut_bytes=pending.cut_bytes,
            finish_reason=self.finish_reason,
            queue_s=self.queue_s,
            load_s=self.load_s,
            loaded_early_blocks=self.loaded_early_blocks,
            read_bytes=self.arrival.read_bytes if self.arrival is not None else {},
            logprobs=list(pending.logprobs),
        )
        self.client.decoded(list(pending.token_ids), reply)

    def _take_pending(self) -> tuple[int, OutputDelta]:
        self._read_text()
        pending = merge(self._pending) if self._pending else OutputDelta((), "")
        before = self._tokens_before
        self._tokens_before += len(pending.token_ids)
        self._pending, self._pending_tokens = [], 0
        return before, pending
