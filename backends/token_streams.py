"""Tokens on their way from decode workers to the streams of this front.

A decode worker writes one letter per step with the new tokens of all requests that it decodes for
this front: a message per token through Triton costs more CPU than the token (docs/measurements.md).
The call that started a request (worker_calls.decode) only says when and how it ended, and how many
tokens came by letter; `wait` makes sure that they did. One thread delivers, and when it cannot keep
up, the tokens of a request that wait are delivered together.

Not here: what the front does with tokens (generation.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

from backends.errors import WorkerUnavailable
from backends.inbox import Inbox
from backends.text_stream import Emission, merge
from backends.worker_protocol import Letter, Tokens, TokenUpdate

log = logging.getLogger(__name__)
LETTERS_S_MAX = 5.0  # between the end of a call and the last letter that it speaks of

Deliver = Callable[[str, Emission], None]  # (incarnation of the worker, what is new)


class TokenStream:
    """The tokens of one try of a request. `deliver` is called in the letters' thread."""

    def __init__(self, request_id: str, deliver: Deliver) -> None:
        self._request_id = request_id
        self._deliver = deliver
        self._arrived = threading.Condition()
        self._tokens = 0
        self._problem: Exception | None = None

    def take(self, incarnation: str, updates: list[TokenUpdate]) -> None:
        """Deliver them as one; after a gap or a failed delivery nothing more is delivered."""
        expected = self._tokens
        problem = self._problem
        for update in updates:
            if update.tokens_before != expected and problem is None:
                problem = WorkerUnavailable(
                    f"token {expected} of {self._request_id} is missing, "
                    f"{update.tokens_before} came"
                )
            expected += len(update.token_ids)
        if problem is None:
            try:
                self._deliver(incarnation, merge([emission_of(update) for update in updates]))
            except Exception as error:  # edge: kept for the thread that waits for this request
                problem = error
        with self._arrived:
            self._tokens, self._problem = expected, problem
            self._arrived.notify_all()

    def wait(self, tokens: int) -> None:
        """Until so many were delivered; raises what a delivery raised, or WorkerUnavailable."""
        with self._arrived:
            is_complete = self._arrived.wait_for(
                lambda: self._problem is not None or self._tokens >= tokens, LETTERS_S_MAX
            )
            if self._problem is not None:
                raise self._problem
            if not is_complete:
                raise WorkerUnavailable(
                    f"{self._tokens} of {tokens} tokens of {self._request_id} arrived"
                )


class TokenStreams:
    """The inbox of a front, and who in it waits for which tokens."""

    def __init__(self, address: str) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._inbox = Inbox(address, self._on_letters)

    @property
    def address(self) -> str:
        return self._inbox.address

    @contextlib.contextmanager
    def reading(self, request_id: str, deliver: Deliver) -> Iterator[TokenStream]:
        """Tokens of `request_id` go to `deliver` while the block runs."""
        stream = self._streams[request_id] = TokenStream(request_id, deliver)
        try:
            yield stream
        finally:
            del self._streams[request_id]

    def close(self) -> None:
        self._inbox.close()

    def _on_letters(self, letters: list[Letter]) -> None:
        waiting: dict[tuple[str, str], list[TokenUpdate]] = defaultdict(list)
        for letter in letters:
            if isinstance(letter, Tokens):
                for update in letter.updates:
                    waiting[letter.incarnation, update.request_id].append(update)
        for (incarnation, request_id), updates in waiting.items():
            # Tokens of a request that is over, or goes on elsewhere, are nobody's.
            if stream := self._streams.get(request_id):
                stream.take(incarnation, updates)


def emission_of(update: TokenUpdate) -> Emission:
    return Emission(
        token_ids=tuple(update.token_ids), text=update.text, cut_bytes=update.cut_bytes,
        context_ids=tuple(update.context_ids),
    )  # fmt: skip
