"""A frontend's inbox: passes the workers' messages on to their requests.

A prefill worker sends a message with the first token while it still writes the KV to the store.

A decode worker sends at most one message per step, with new tokens of all requests that it decodes
for this frontend. One Triton response per token would cost more CPU time than the token
(bench/RESULTS.md). The reply to the call (grpc_calls.ask) reports the end of the request, how many
tokens were sent by message, and the tokens that no message carries.

Messages to clients cost CPU time in frontend and client. A frontend sends at most
`messages_per_s_max` of them per second. When its streams produce tokens faster, tokens of a stream
that arrive close together share a message. A client that sets `stream_interval` is exempt. A decode
worker also gets the limit, and holds back tokens that would wait here (workers/decode_worker.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from backends.frontend.lifecycle.events import FirstText, LifecycleEvent, TimePassed, TokensArrived
from backends.frontend.lifecycle.machine import State, due_s
from backends.frontend.request import ClientRequest
from backends.text.text_stream import OutputDelta, TextStream, merge
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from backends.workers.protocol import (
    DecodeReply,
    FirstToken,
    Heartbeat,
    PrefillReply,
    Tokens,
    TokenUpdate,
    WorkerMessage,
    gap_s,
    open_inbox,
)

# 250 messages per second cost a tenth of a core: about 0.4 ms each in the frontend, Triton and a
# client on the same host. One frontend can send about 4,000 messages per second.
MESSAGES_PER_S_AND_CORE, MESSAGES_PER_S_MAX = 250, 4_000


class Receiver(Protocol):
    """The request that receives messages (live_request.LiveRequest)."""

    state: State

    def post(self, event: LifecycleEvent) -> None: ...
    def first_token(self, attempt: int, message: FirstToken) -> None: ...


@dataclass(slots=True)
class TokenStream:
    """An attempt for which workers may send messages."""

    receiver: Receiver
    attempt: int  # number of the attempt
    seen_s: float  # monotonic time of the latest message or heartbeat, or of the call


class TokenStreams:
    def __init__(self, address: str, messages_per_s_max: float) -> None:
        self.messages_per_s_max = messages_per_s_max
        self._streams: dict[str, TokenStream] = {}
        self._decoding: set[str] = set()  # ids of the attempts whose decode worker was called
        self._inbox = open_inbox(address, self._on_messages)
        self.address = self._inbox.address  # with the port that the inbox listens on

    def listen(self, request_id: str, receiver: Receiver, attempt: int) -> None:
        """Pass messages of this attempt to `receiver`, until `forget`."""
        self._streams[request_id] = TokenStream(receiver, attempt, time.monotonic())

    def called(self, request_id: str) -> None:
        """Note that the decode worker of this attempt is called. No effect after `forget`."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.seen_s = time.monotonic()
            self._decoding.add(request_id)

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._decoding.discard(request_id)

    def seen_s(self, request_id: str) -> float | None:
        """Monotonic time of the latest message, heartbeat or call; None: after `forget`."""
        stream = self._streams.get(request_id)
        return stream.seen_s if stream is not None else None

    def close(self) -> None:
        self._inbox.close()

    def _on_messages(self, messages: list[WorkerMessage]) -> float | None:
        """Pass on messages, and send waiting tokens that are due.

        Returns the seconds until further waiting tokens are due, or None if no tokens wait. Tokens
        of one attempt become one event, even if several messages brought them.
        """
        now_s = time.monotonic()
        updates: dict[tuple[str, str], list[TokenUpdate]] = {}
        for message in messages:
            if isinstance(message, Tokens):
                for update in message.updates:
                    updates.setdefault((update.request_id, message.incarnation), []).append(update)
            elif isinstance(message, FirstToken):
                if (stream := self._seen(message.request_id, now_s)) is not None:
                    stream.receiver.first_token(stream.attempt, message)
            elif isinstance(message, Heartbeat):
                for request_id in message.request_ids:
                    self._seen(request_id, now_s)
        its_gap_s = gap_s(len(self._decoding), self.messages_per_s_max)
        for (request_id, incarnation), found in updates.items():
            # Tokens of an ended or replaced attempt have no stream and are dropped.
            if (stream := self._seen(request_id, now_s)) is not None:
                news = [
                    (update.tokens_before, delta_of(update, update.token_ids)) for update in found
                ]
                stream.receiver.post(
                    TokensArrived(stream.attempt, incarnation, news, now_s, its_gap_s)
                )
        return self._send_due(now_s)

    def _seen(self, request_id: str, now_s: float) -> TokenStream | None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.seen_s = now_s
        return stream

    def _send_due(self, now_s: float) -> float | None:
        """Post TimePassed to requests whose waiting tokens are due; returns as _on_messages."""
        dues_s = []
        for stream in list(self._streams.values()):
            due = due_s(stream.receiver.state)
            if due is not None and due <= now_s:
                stream.receiver.post(TimePassed(now_s))
            elif due is not None:
                dues_s.append(due)
        return max(min(dues_s) - time.monotonic(), 0.0) if dues_s else None


def messages_per_s_affordable() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(MESSAGES_PER_S_AND_CORE * cores, MESSAGES_PER_S_MAX)


def delta_of(
    update: TokenUpdate | DecodeReply, token_ids: Sequence[int], is_stopped: bool = False
) -> OutputDelta:
    return OutputDelta(
        token_ids=tuple(token_ids),
        text=update.text,
        cut_bytes=update.cut_bytes,
        is_stopped=is_stopped,
        context_ids=tuple(update.context_ids),
        logprobs=tuple(update.logprobs),
    )


def first_text(
    request: ClientRequest,
    tokenizer: Tokenizer,
    token_ids: np.ndarray,
    token_id: int,
    source: FirstToken | PrefillReply,
) -> FirstText:
    """The first token of an attempt as text. `token_ids`: the prompt, and the answer before it."""
    sampling, before = request.sampling, len(token_ids) - len(request.prompt_ids)
    text = TextStream(
        tokenizer,
        token_ids[-CONTEXT_TOKENS:].tolist(),
        sampling.stop_words,
        sampling.end_ids,
        max(sampling.min_tokens - before, 0),
        sampling.shows_special,
    )
    delta = text.push([token_id], logprobs=source.logprobs)
    reason = "length" if before + 1 >= sampling.max_tokens else ""
    if delta.is_stopped:
        reason = "stop_word"
    elif token_id in sampling.end_ids:
        reason = "end_id"
    if reason:
        delta = merge([delta, text.finish()])
    return FirstText(delta, reason, source.cached_tokens)
