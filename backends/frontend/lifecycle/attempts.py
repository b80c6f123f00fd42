"""What the loss of an attempt means for its request: go on, when, elsewhere, or give up.

Whatever an attempt produced is kept: the next one goes on from the tokens that the client has. So
a loss costs time, and the only question is whose fault it was.

    counts     it may be the request that does it: a worker that held it died, or failed at it.
               After `counted_max` of these the request is given up, or a poisonous prompt would
               kill one worker after the other
    is free    the request had no part in it: KV that is gone is computed again, a worker that was
               not there, that keys keep out of reach or whose link was cut is not asked again,
               whoever finds nobody waits. Until the deadline: the
               client's own, or so long after the request came. An attempt that decoded tokens
               puts the latter off: a long answer is not given up for being long
    avoids     the next attempt leaves out the worker, as long as there is another

The first loss is followed by the next attempt at once. As long as losses follow each other without
a decoded token for the client, pauses between them grow: nobody is served faster by asking more
often, and others need the workers.

Not here: what becomes of the request then (machine.py), who is asked next (conductor/).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from backends.errors import (
    DEADLINE_PASSED,
    KvMissing,
    MessagesLost,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerGone,
    WorkerRefused,
    WorkerUnavailable,
    WorkerUnreached,
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
    WORKER_FULL = "a worker was full"
    WORKER_GONE = "a worker was not there"
    WORKER_UNREACHED = "there was no way to a worker"
    WORKER_REFUSED = "a worker did not let this host in"
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
    Loss.WORKER_FULL: Rule(counts=False, avoids=True),
    Loss.WORKER_GONE: Rule(counts=False, avoids=True),
    Loss.WORKER_UNREACHED: Rule(counts=False, avoids=True),
    Loss.WORKER_REFUSED: Rule(counts=False, avoids=True),
    Loss.STORE_LOST: Rule(counts=False, avoids=True),
    Loss.KV_GONE: Rule(counts=False, avoids=False),
    Loss.MESSAGES_LOST: Rule(counts=False, avoids=False),
    Loss.NOBODY: Rule(counts=False, avoids=False, is_soon=False),
}
NOT_LET_IN = (Loss.NO_ROOM, Loss.WORKER_FULL)
NOBODY_KINDS = ("no_prefill_worker", "no_decode_worker")  # the conductor knows nobody to call
# Of what a worker answers when its own limits are reached; the conductor has other words.
WORKER_FULL_KINDS = ("prefill_queue_full", "decode_queue_full", "decode_overload")


def loss_of(error: ServingError, is_resumed: bool, asks_others: bool = False) -> Loss | None:
    """What a failed attempt was lost to; None: the error is the answer.

    `is_resumed`: an attempt before this one was let in. Then a rejection says only that nobody can
    take it now (too_large: nobody ever could); a request that is new is told so at once. A storage
    node without room may be one that is just starting again, so another one is asked in both cases.

    `asks_others`: other frontends fill the workers too, so that this one was full says nothing of
    the others; a frontend that is alone knows how full all of them are.
    """
    if isinstance(error, Overloaded):
        if error.kind == "store_full":
            return Loss.STORE_LOST if is_resumed else Loss.NO_ROOM
        if asks_others and error.kind in WORKER_FULL_KINDS and not is_resumed:
            return Loss.WORKER_FULL
        return Loss.NOBODY if is_resumed and error.kind != "too_large" else None
    for kind, loss in (
        (KvMissing, Loss.KV_GONE),
        (StoreLost, Loss.STORE_LOST),
        (WorkerRefused, Loss.WORKER_REFUSED),
        (WorkerUnreached, Loss.WORKER_UNREACHED),
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


@dataclass(frozen=True, slots=True)
class Attempts:
    """The losses of one request so far; `after` one more of them it is another object."""

    counted_max: int
    arrived_s: float
    request_s_max: float
    timeout_s: float = math.inf  # the client's own, since the arrival: put off by nothing
    full_workers_max: int = 0  # so many full workers are answered by asking another one
    losses: tuple[Loss, ...] = ()
    in_a_row: int = 0  # of those: without a decoded token between them
    sent_tokens: int = 0  # that the client had at the latest loss
    decoded_at_s: float = -math.inf  # the latest loss of an attempt that had decoded tokens
    pause_s_wanted: float = 0.0

    def __post_init__(self) -> None:
        assert self.counted_max >= 1 and self.request_s_max > 0 and self.timeout_s > 0

    def after(self, loss: Loss, sent_tokens: int, now_s: float) -> Attempts:
        """An attempt was lost; the client has so many tokens by now."""
        assert sent_tokens >= self.sent_tokens, (sent_tokens, self.sent_tokens)
        in_a_row, decoded_at_s = self.in_a_row + 1, self.decoded_at_s
        if sent_tokens > self.sent_tokens + 1:  # one is the prefill's: what was lost came after it
            in_a_row, decoded_at_s = 1, now_s
        doublings = in_a_row - (2 if RULES[loss].is_soon else 1)
        # 60 of them are more than any pause: what is too long for a float is never made.
        pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(doublings, 60))
        return replace(
            self,
            losses=(*self.losses, loss),
            in_a_row=in_a_row,
            sent_tokens=sent_tokens,
            decoded_at_s=decoded_at_s,
            pause_s_wanted=pause_s if doublings >= 0 else 0.0,
        )

    @property
    def deadline_s(self) -> float:
        since_s = max(self.arrived_s, self.decoded_at_s)
        return min(since_s + self.request_s_max, self.arrived_s + self.timeout_s)

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next attempt; never beyond the deadline."""
        return max(0.0, min(self.pause_s_wanted, self.deadline_s - now_s))

    @property
    def is_resumed(self) -> bool:
        """It was let in before. A request that found no room has not been, nor one that its decode
        worker refused, though the client has the token of the prefill."""
        of_prefill = int(all(loss is Loss.WORKER_FULL for loss in self.losses))
        let_in = any(loss not in NOT_LET_IN for loss in self.losses)
        return self.sent_tokens > of_prefill or let_in

    @property
    def asks_others(self) -> bool:
        """Whether a worker that is full leads to another attempt."""
        return self.losses.count(Loss.WORKER_FULL) < self.full_workers_max

    def given_up(self, now_s: float) -> str:
        """Why there is no further attempt; empty when there is."""
        if not self.losses:
            return ""
        counted = sum(RULES[loss].counts for loss in self.losses)
        if counted >= self.counted_max:
            return f"given up after {counted} attempts that count ({self._listed()})"
        if now_s >= self.deadline_s:
            return f"{DEADLINE_PASSED} ({self._listed()})"
        return ""

    def _listed(self) -> str:
        counts = Counter(self.losses).most_common()
        return ", ".join(f"{count} x {loss.value}" for loss, count in counts)


def last_word(error: ServingError, why: str) -> ServingError:
    """What the client of a request that was given up reads: of the kind of its last loss."""
    if isinstance(error, KvMissing):
        return KvMissing(f"{error}; {why}")
    if isinstance(error, Overloaded) and error.kind in ("store_full", *WORKER_FULL_KINDS):
        return Overloaded(error.kind, f"{error}; {why}", error.retry_after_s)
    return WorkerUnavailable(f"{error}; {why}")
