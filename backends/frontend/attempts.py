"""What the loss of an attempt means for its request: go on, when, elsewhere, or give up.

Whatever an attempt produced is kept: the next one goes on from the tokens that the client has
(generation.py). So a loss costs time, and the only question is whose fault it was.

    counts     it may be the request that does it: a worker that held it died, or failed at it.
               After `counted_max` of these the request is given up, or a poisonous prompt would
               kill one worker after the other
    is free    the request had no part in it: KV that is gone is computed again, a worker that was
               not there is not asked again, whoever finds nobody waits. Until the deadline: the
               client's own, or so long after the request came. An attempt that decoded tokens
               puts the latter off: a long answer is not given up for being long
    avoids     the next attempt leaves out the worker, as long as there is another

The first loss is followed by the next attempt at once. As long as losses follow each other without
a decoded token for the client, pauses between them grow: nobody is served faster by asking more
often, and others need the workers.

Pure: time is an argument. Not here: what was lost (loss_of reads errors, generation.py hears of
deaths), who is asked next (conductor/).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from backends.errors import (
    KvMissing,
    MessagesLost,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerGone,
    WorkerUnavailable,
)
from backends.workers.protocol import HEARTBEAT_S

PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 2.0
CALL_SILENCE_S_MAX = 6 * HEARTBEAT_S
SILENCE_S_MAX = 1.0  # workers report twice a second: one silent for longer was dead already


class Loss(Enum):
    """How an attempt ended without an answer; the value is for people."""

    WORKER_DIED = "a worker died with it"
    WORKER_FAILED = "a worker failed at it"
    NO_ROOM = "a storage node had no room for it"
    WORKER_GONE = "a worker was not there"
    STORE_LOST = "the store did not answer"
    KV_GONE = "its KV was gone"
    MESSAGES_LOST = "messages were lost"
    NOBODY = "nobody could take it"


@dataclass(frozen=True, slots=True)
class Rule:
    counts: bool
    avoids: bool
    is_soon: bool = True  # the first of its kind needs no pause


RULES: Mapping[Loss, Rule] = {
    Loss.WORKER_DIED: Rule(counts=True, avoids=True),
    Loss.WORKER_FAILED: Rule(counts=True, avoids=True),
    Loss.NO_ROOM: Rule(counts=True, avoids=True),
    Loss.WORKER_GONE: Rule(counts=False, avoids=True),
    Loss.STORE_LOST: Rule(counts=False, avoids=True),
    Loss.KV_GONE: Rule(counts=False, avoids=False),
    Loss.MESSAGES_LOST: Rule(counts=False, avoids=False),
    Loss.NOBODY: Rule(counts=False, avoids=False, is_soon=False),
}


def loss_of(error: ServingError, is_resumed: bool) -> Loss | None:
    """What a failed attempt was lost to; None: the error is the answer.

    `is_resumed`: an attempt before this one was let in. Then a rejection says only that nobody can
    take it now; a request that is new is told so at once. A storage node without room may be one
    that is just starting again, so another one is asked in both cases.
    """
    if isinstance(error, Overloaded):
        if error.kind == "store_full":
            return Loss.STORE_LOST if is_resumed else Loss.NO_ROOM
        return Loss.NOBODY if is_resumed else None
    for kind, loss in (
        (KvMissing, Loss.KV_GONE),
        (StoreLost, Loss.STORE_LOST),
        (WorkerGone, Loss.WORKER_GONE),
        (MessagesLost, Loss.MESSAGES_LOST),
        (WorkerUnavailable, Loss.WORKER_FAILED),
    ):
        if isinstance(error, kind):
            return loss
    return None


def loss_by_death(called_s: float, heard_s: float) -> Loss:
    """A worker is gone while an attempt waits for it: did it have the request?

    `called_s`: when it was called, `heard_s`: when it last reported. In doubt it had.
    """
    is_late = heard_s < called_s - SILENCE_S_MAX
    return Loss.WORKER_GONE if is_late else Loss.WORKER_DIED


def is_silent(now_s: float, heard_s: float | None) -> bool:
    """A worker has said nothing of an attempt for too long: neither a message nor a heartbeat.

    `heard_s`: when it last did, or was called; None: nobody waits for it.
    """
    return heard_s is not None and now_s - heard_s > CALL_SILENCE_S_MAX


class Attempts:
    """The losses of one request so far. Not thread-safe."""

    def __init__(
        self, counted_max: int, arrived_s: float, request_s_max: float, timeout_s: float = math.inf
    ) -> None:
        assert counted_max >= 1 and request_s_max > 0 and timeout_s > 0
        self._counted_max = counted_max
        self._request_s_max = request_s_max
        self._timeout_s = arrived_s + timeout_s
        self._deadline_s = min(arrived_s + request_s_max, self._timeout_s)
        self._losses: Counter[Loss] = Counter()
        self._in_a_row = 0  # without a decoded token between them
        self._tokens = 0
        self._pause_s = 0.0

    def lost(self, loss: Loss, tokens: int, now_s: float) -> None:
        """An attempt was lost; the client has so many tokens by now."""
        assert tokens >= self._tokens, (tokens, self._tokens)
        self._losses[loss] += 1
        self._in_a_row += 1
        if tokens > self._tokens + 1:  # one is the prefill's: what was lost came after it
            self._in_a_row = 1
            self._deadline_s = min(now_s + self._request_s_max, self._timeout_s)
        self._tokens = tokens
        doublings = self._in_a_row - (2 if RULES[loss].is_soon else 1)
        # 60 of them are more than any pause: what is too long for a float is never made.
        self._pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(doublings, 60))
        if doublings < 0:
            self._pause_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next attempt; never beyond the deadline."""
        return max(0.0, min(self._pause_s, self._deadline_s - now_s))

    @property
    def is_resumed(self) -> bool:
        """It was let in before. A request that found no room has not been."""
        return bool(self._tokens) or any(loss is not Loss.NO_ROOM for loss in self._losses)

    def given_up(self, now_s: float) -> str:
        """Why there is no further attempt; empty when there is."""
        if not self._losses:
            return ""
        counted = sum(count for loss, count in self._losses.items() if RULES[loss].counts)
        if counted >= self._counted_max:
            return f"given up after {counted} attempts that count ({self._told()})"
        if now_s >= self._deadline_s:
            return f"its deadline has passed ({self._told()})"
        return ""

    def _told(self) -> str:
        return ", ".join(f"{count} x {loss.value}" for loss, count in self._losses.most_common())


def last_word(error: ServingError, why: str) -> ServingError:
    """What the client of a request that was given up reads: of the kind of its last loss."""
    if isinstance(error, KvMissing):
        return KvMissing(f"{error}; {why}")
    if isinstance(error, Overloaded) and error.kind == "store_full":
        return Overloaded(error.kind, f"{error}; {why}", error.retry_after_s)
    return WorkerUnavailable(f"{error}; {why}")
