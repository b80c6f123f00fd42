"""One request inside a decode worker: its tokens, its text, what it owes its client.

Only the state of one request; the batch is decode_worker.py's.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from backends.text.text_stream import Emission, TextStream, merge
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from backends.workers.arrivals import Arrival
from backends.workers.kv_writer import BlockPut
from backends.workers.protocol import DecodeReply, DecodeRequest, TokenUpdate
from mooncake_store.block_keys import block_keys, chain_seed, extend_keys


class DecodeClient(Protocol):
    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None: ...
    def fail(self, error: Exception) -> None: ...


class DecodeJob:
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
        self._incarnation = incarnation
        self.request = request
        self.client = client
        self.submitted_s = time.monotonic()
        self.token_ids: list[int] = ids.tolist()
        self.tokens_given = len(self.token_ids)  # prompt, and what the client had before
        self.prompt_ids = self.token_ids[: request.prompt_tokens]
        self.output_ids = self.token_ids[request.prompt_tokens :]
        self.arrival: Arrival | None = None
        self.is_loading = False
        self.is_stopped = False
        self.error: Exception | None = None  # it failed with this, and leaves
        self.queue_s = 0.0
        self.load_s = 0.0
        self.loaded_early_blocks = 0
        self.finish_reason = ""
        self._block_tokens = block_tokens
        self._seed = chain_seed(fingerprint, cache_salt=request.cache_salt)
        self._keys = block_keys(ids[:-1], block_tokens, self._seed)
        self._kv_tokens = len(self.token_ids) - 1
        self.filled: list[int] = []  # blocks that are to go to the store once they are in a page
        self.saved_blocks = 0  # so many are, from the first on
        self._put: BlockPut | None = None
        before = self.token_ids[-1 - CONTEXT_TOKENS : -1]
        sampling = request.sampling
        decided = len(self.output_ids) - 1
        self._text = TextStream(
            tokenizer, before, sampling.stop_words, sampling.end_ids,
            max(sampling.min_tokens - decided, 0),
        )  # fmt: skip
        # The front has emitted what this yields, by the same pure function.
        self._text.push([self.token_ids[-1]])
        self._pending: list[Emission] = []
        self._pending_tokens = 0
        self._tokens_before = 0  # of the next message

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def pages(self) -> list[int]:
        assert self.arrival is not None, f"{self.request_id} has no pages yet"
        return self.arrival.pages

    @property
    def is_leaving(self) -> bool:
        return self.is_stopped or self.error is not None

    @property
    def put(self) -> BlockPut:
        """Where the blocks that this request fills go."""
        if self._put is None:
            self._put = BlockPut(
                self.request_id, self._kv_tokens, self.pages, self._keys, first_block=0,
                tenant=self.request.cache_salt,
            )  # fmt: skip
        return self._put

    def end_put(self) -> None:
        """Its pages go back: nothing more is written for it."""
        if self._put is not None:
            self._put.is_ended = True

    def fail(self, error: Exception) -> None:
        self.error = error

    def take_saved(self) -> list[int]:
        """Blocks that this request has filled and that can go to the store now."""
        saved = [block for block in self.filled if block < self.saved_blocks]
        if saved:
            self.filled = [block for block in self.filled if block >= self.saved_blocks]
        return saved

    def decoded(self, token_id: int) -> None:
        """The newest token's KV is computed, and behind it this token sampled; decides whether it
        was the last one."""
        self._kv_tokens += 1
        if self._kv_tokens % self._block_tokens == 0:
            self.filled.append(self._kv_tokens // self._block_tokens - 1)
            last = self._keys[-1] if self._keys else self._seed
            newest = self.token_ids[self._kv_tokens - self._block_tokens : self._kv_tokens]
            self._keys += extend_keys(last, newest, self._block_tokens)
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        sampling = self.request.sampling
        emission = self._text.push([token_id])
        if emission.is_stopped:
            self.finish_reason = "stop_word"
        elif token_id in sampling.end_ids:
            self.finish_reason = "end_id"
        elif len(self.output_ids) >= sampling.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            emission = merge([emission, self._text.finish()])
        self._pending.append(emission)
        self._pending_tokens += len(emission.token_ids)

    @property
    def has_update(self) -> bool:
        """Enough tokens for a message have come together (stream_interval 0: only the end)."""
        return 0 < self.request.stream_interval <= self._pending_tokens

    def take_update(self) -> TokenUpdate:
        """The tokens since the last message."""
        before, pending = self._take_pending()
        return TokenUpdate(
            self.request_id, before, list(pending.token_ids), pending.text,
            list(pending.context_ids), pending.cut_bytes,
        )  # fmt: skip

    def reply(self) -> None:
        """The end: the rest of the tokens, and how it went."""
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
        )
        self.client.decoded(list(pending.token_ids), reply)

    def _take_pending(self) -> tuple[int, Emission]:
        pending = merge(self._pending) if self._pending else Emission((), "")
        before = self._tokens_before
        self._tokens_before += len(pending.token_ids)
        self._pending, self._pending_tokens = [], 0
        return before, pending
