"""Tokens on their way from workers to the streams of this front.

A prefill worker writes a letter with the first token while it still puts the KV into the store.

A decode worker writes one letter per step with the new tokens of all requests that it decodes for
this front: a message per token through Triton costs more CPU than the token (docs/measurements.md).
The call that started a request (worker_calls.decode) only says when and how it ended, and how many
tokens came by letter; `rest` makes sure that they did.

Messages to clients cost as well, on both sides of the network. A front sends at most
`messages_per_s_max`: when its streams bring more tokens than that, tokens of a stream that come
close together share a message. A stream whose client chose a `stream_interval` is left alone.

Not here: what the front does with tokens (generation.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backends.errors import MessagesLost
from backends.text.text_stream import Emission, merge
from backends.workers.protocol import (
    FirstToken,
    Heartbeat,
    Tokens,
    TokenUpdate,
    WorkerMessage,
    open_inbox,
)

log = logging.getLogger(__name__)
LETTERS_S_MAX = 5.0  # between the end of a call and the last letter that it speaks of
GAP_S_MAX = 0.1  # between the messages of a stream, however many streams there are

# A message takes some 0.4 ms of CPU time through the front, Triton and a client on the same host,
# so this is a tenth of each core; one front cannot send many more than the second number.
MESSAGES_PER_S_AND_CORE, MESSAGES_PER_S_MAX = 250, 4_000

Deliver = Callable[[str, Emission], None]  # (incarnation of the worker, what is new)


class TokenStream:
    """The tokens of one try of a request. `deliver` is called in the letters' thread."""

    def __init__(self, request_id: str, deliver: Deliver, is_paced: bool) -> None:
        self._request_id = request_id
        self._deliver = deliver
        self._is_paced = is_paced
        self._changed = threading.Condition()
        self._tokens = 0  # that have come
        self._waiting: list[Emission] = []  # of those, not delivered
        self._incarnation = ""
        self._delivered_at_s = float("-inf")
        self._problem: Exception | None = None

    def take(self, incarnation: str, update: TokenUpdate) -> None:
        """Tokens came; after a gap nothing more is taken."""
        with self._changed:
            if self._problem is None and update.tokens_before != self._tokens:
                self._problem = MessagesLost(
                    f"token {self._tokens} of {self._request_id} is missing, "
                    f"{update.tokens_before} came"
                )
            if self._problem is None:
                self._tokens += len(update.token_ids)
                self._incarnation = incarnation
                self._waiting.append(emission_of(update))
            self._changed.notify_all()

    def deliver_due(self, now_s: float, gap_s: float) -> float | None:
        """Deliver what waits, unless the last delivery is less than `gap_s` ago; then say how
        long to wait. None: nothing waits."""
        with self._changed:
            if not self._waiting:
                return None
            due_in_s = self._delivered_at_s + gap_s - now_s if self._is_paced else 0.0
            if due_in_s > 0:
                return due_in_s
            emission = merge(self._waiting)
            self._waiting = []
            self._delivered_at_s = now_s
            try:
                self._deliver(self._incarnation, emission)
            except Exception as error:  # edge: kept for the thread that waits for this request
                self._problem = error
                self._changed.notify_all()
            return None

    def rest(self, tokens: int) -> list[Emission]:
        """When so many tokens have come: what was not delivered yet, and never will be.

        Raises what a delivery raised, or MessagesLost when tokens are missing.
        """
        with self._changed:
            is_complete = self._changed.wait_for(
                lambda: self._problem is not None or self._tokens >= tokens, LETTERS_S_MAX
            )
            if self._problem is not None:
                raise self._problem
            if not is_complete:
                raise MessagesLost(
                    f"{self._tokens} of {tokens} tokens of {self._request_id} arrived"
                )
            rest, self._waiting = self._waiting, []
            return rest


@dataclass(slots=True)
class Heard:
    at_s: float


class TokenStreams:
    """The inbox of a front, and who in it waits for which tokens."""

    def __init__(self, address: str, messages_per_s_max: float) -> None:
        self._messages_per_s_max = messages_per_s_max
        self._streams: dict[str, TokenStream] = {}
        self._expected: dict[str, Callable[[FirstToken], None]] = {}
        self._heard: dict[str, Heard] = {}  # of those that wait for a worker: its latest word
        self._inbox = open_inbox(address, self._on_letters)

    @property
    def address(self) -> str:
        return self._inbox.address

    def heard_s(self, request_id: str) -> float | None:
        """When its worker last said anything of it, or was called; None: nobody waits for it."""
        heard = self._heard.get(request_id)
        return heard.at_s if heard is not None else None

    @contextlib.contextmanager
    def expecting(self, request_id: str, on_first: Callable[[FirstToken], None]) -> Iterator[None]:
        """The first token of `request_id` may come while the block runs; it need not."""
        self._expected[request_id] = on_first
        self._heard[request_id] = Heard(time.monotonic())
        try:
            yield
        finally:
            del self._expected[request_id], self._heard[request_id]

    @contextlib.contextmanager
    def reading(self, request_id: str, deliver: Deliver, is_paced: bool) -> Iterator[TokenStream]:
        """Tokens of `request_id` go to `deliver` while the block runs."""
        stream = self._streams[request_id] = TokenStream(request_id, deliver, is_paced)
        self._heard[request_id] = Heard(time.monotonic())
        try:
            yield stream
        finally:
            del self._streams[request_id], self._heard[request_id]

    def close(self) -> None:
        self._inbox.close()

    def _note_heard(self, letter: WorkerMessage) -> None:
        now_s, spoken_of = time.monotonic(), list[str]()
        if isinstance(letter, FirstToken):
            spoken_of.append(letter.request_id)
        elif isinstance(letter, Tokens):
            spoken_of += [update.request_id for update in letter.updates]
        elif isinstance(letter, Heartbeat):
            spoken_of += letter.request_ids
        for request_id in spoken_of:
            if (heard := self._heard.get(request_id)) is not None:
                heard.at_s = now_s

    def _on_letters(self, letters: list[WorkerMessage]) -> float | None:
        """Seconds until something that waits is due."""
        for letter in letters:
            self._note_heard(letter)
            if isinstance(letter, FirstToken):
                if on_first := self._expected.get(letter.request_id):
                    on_first(letter)
            elif isinstance(letter, Tokens):
                for update in letter.updates:
                    # Tokens of a request that is over, or goes on elsewhere, are nobody's.
                    if stream := self._streams.get(update.request_id):
                        stream.take(letter.incarnation, update)
        streams = list(self._streams.values())
        gap_s = min(len(streams) / self._messages_per_s_max, GAP_S_MAX)
        dues_s = [stream.deliver_due(time.monotonic(), gap_s) for stream in streams]
        return min((due_s for due_s in dues_s if due_s is not None), default=None)


def messages_per_s_affordable() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(MESSAGES_PER_S_AND_CORE * cores, MESSAGES_PER_S_MAX)


def emission_of(update: TokenUpdate) -> Emission:
    return Emission(
        token_ids=tuple(update.token_ids), text=update.text, cut_bytes=update.cut_bytes,
        context_ids=tuple(update.context_ids),
    )  # fmt: skip
