"""Retry policy: whether a lost attempt is retried, when, and without which workers.

An attempt is one try of one pair of workers to serve the request. The next attempt resumes after
the tokens that the client has, so a loss costs only time. Each kind of loss has a `Rule`:

    counts      The request itself may have caused the loss: a worker died or failed at it, or a
                storage node had no room for its KV. After `counted_max` losses that count, the
                request is given up. Otherwise one prompt could kill all workers. Other losses are
                retried until the deadline. There is one exception. A new request (`is_resumed` is
                False) that a full worker rejects is retried at most `full_workers_max` times.
    avoids      Later attempts exclude the worker. When no worker is left, none is excluded.
    is_soon     A retry has no pause if this is the first loss since the last decoded token.

The deadline is the client's timeout or `request_s_max` after the arrival, whichever is earlier. The
loss of an attempt that decoded tokens restarts `request_s_max`, so that a long answer is not given
up for its length.

While losses follow each other without a decoded token, the pauses between attempts double, up to
PAUSE_S_MAX. Faster retries would not help, and other requests need the workers.

Not here: the request's next state (machine.py), choosing the next worker (conductor/).
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

PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 2.0  # the first and the longest pause
CALL_SILENCE_S_MAX = 6 * HEARTBEAT_S  # 30 s; an attempt without heartbeats for longer is lost
SILENCE_S_MAX = 1.0  # a worker whose last report is older counts as dead; reports come every 0.5 s


class Loss(Enum):
    """Why an attempt failed and may be retried; the value is the text in logs and errors."""

    WORKER_DIED = "a worker died with the request"
    WORKER_FAILED = "a worker failed at the request"
    NO_ROOM = "a storage node was full"  # only for a new request; STORE_LOST for a resumed one
    WORKER_FULL = "a worker was full"
    WORKER_GONE = "a worker was gone"
    WORKER_UNREACHED = "a worker was unreachable"
    WORKER_REFUSED = "a worker refused the connection"
    STORE_LOST = "the store did not answer"
    KV_GONE = "the KV cache was gone"
    MESSAGES_LOST = "messages were lost"
    NO_WORKER = "no worker was available"


@dataclass(frozen=True, slots=True)
class Rule:
    counts: bool  # True: counts towards `counted_max`
    avoids: bool  # True: later attempts exclude the worker
    is_soon: bool = True  # True: no pause if it is the first loss since the last decoded token


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
    Loss.NO_WORKER: Rule(counts=False, avoids=False, is_soon=False),
}
NOT_ADMITTED = (Loss.NO_ROOM, Loss.WORKER_FULL)  # losses by rejection; see `is_resumed`
# Kinds of a rejection if no worker of a role is available.
NO_WORKER_KINDS = ("no_prefill_worker", "no_decode_worker")
# Kinds of a rejection by a worker at its own limits. The conductor's rejections have other kinds.
WORKER_FULL_KINDS = ("prefill_queue_full", "decode_queue_full", "decode_overload")


def loss_of(error: ServingError, is_resumed: bool, asks_others: bool = False) -> Loss | None:
    """The kind of loss; None: the error goes to the client without a retry.

    `is_resumed`: an earlier attempt was admitted. In that case a rejection is retried, because a
    worker may have room later. For a request that is `too_large`, no worker ever has room, so it is
    not retried. `store_full` is retried even for a new request. The storage node of the prefill
    worker is full or restarting, and another worker's node may have room.

    `asks_others`: a new request that a full worker rejects is retried on another worker. This
    helps with several frontends, because each of them sees the others' load late.
    """
    if isinstance(error, Overloaded):
        if error.kind == "store_full":
            return Loss.STORE_LOST if is_resumed else Loss.NO_ROOM
        if asks_others and error.kind in WORKER_FULL_KINDS and not is_resumed:
            return Loss.WORKER_FULL
        return Loss.NO_WORKER if is_resumed and error.kind != "too_large" else None
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


def loss_by_death(called_s: float, seen_s: float) -> Loss:
    """WORKER_DIED if the worker may have died during the call; WORKER_GONE if it was dead before.

    `called_s`, `seen_s`: monotonic times of the call and of the worker's last report.
    """
    is_late = seen_s < called_s - SILENCE_S_MAX
    return Loss.WORKER_GONE if is_late else Loss.WORKER_DIED


def is_silent(now_s: float, seen_s: float | None) -> bool:
    """Whether an attempt's worker sent no message and no heartbeat for CALL_SILENCE_S_MAX.

    `seen_s`: monotonic time of the latest message, heartbeat or call; None: no call is open.
    """
    return seen_s is not None and now_s - seen_s > CALL_SILENCE_S_MAX


@dataclass(frozen=True, slots=True)
class Attempts:
    """The losses of one request so far. Immutable: `after` returns a new object."""

    counted_max: int  # at this number of losses that count, the request is given up; >= 1
    arrived_s: float  # monotonic time of the request's arrival
    request_s_max: float  # seconds to the deadline, > 0; restarted by a loss after decoded tokens
    timeout_s: float = math.inf  # the client's timeout, seconds from the arrival; > 0
    full_workers_max: int = 0  # limit of retries of a new request after rejections by full workers
    losses: tuple[Loss, ...] = ()
    in_a_row: int = 0  # number of losses since the last decoded token
    sent_tokens: int = 0  # tokens sent to the client before the latest loss
    decoded_at_s: float = -math.inf  # time of the latest loss after decoded tokens; -inf: none
    pause_s_wanted: float = 0.0  # seconds before the next attempt; the deadline may shorten them
    was_admitted: bool = False  # True: a further answer to the prompt of an admitted request

    def __post_init__(self) -> None:
        assert self.counted_max >= 1 and self.request_s_max > 0 and self.timeout_s > 0

    def after(self, loss: Loss, sent_tokens: int, now_s: float) -> Attempts:
        """A copy with one more loss. `sent_tokens`: tokens sent to the client in all attempts."""
        assert sent_tokens >= self.sent_tokens, (sent_tokens, self.sent_tokens)
        in_a_row, decoded_at_s = self.in_a_row + 1, self.decoded_at_s
        if sent_tokens > self.sent_tokens + 1:  # the first token is from prefill, not decoded
            in_a_row, decoded_at_s = 1, now_s
        doublings = in_a_row - (2 if RULES[loss].is_soon else 1)
        # 60 doublings exceed PAUSE_S_MAX; the limit keeps the power within a float.
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
        """Seconds to wait before the next attempt; never beyond the deadline."""
        return max(0.0, min(self.pause_s_wanted, self.deadline_s - now_s))

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier attempt was admitted, so that no limit of load rejects the request.

        An attempt counts as admitted if the conductor routed it, and no worker rejected it for lack
        of room. This holds after a sent token or a loss that is not in NOT_ADMITTED. The exception
        is one sent token while all losses are WORKER_FULL, because a prefill worker may have sent
        the token before a decode worker rejected the request.
        """
        of_prefill = int(all(loss is Loss.WORKER_FULL for loss in self.losses))
        was_admitted = any(loss not in NOT_ADMITTED for loss in self.losses)
        return self.was_admitted or self.sent_tokens > of_prefill or was_admitted

    @property
    def asks_others(self) -> bool:
        """Whether the next full worker leads to a retry on another worker."""
        return self.losses.count(Loss.WORKER_FULL) < self.full_workers_max

    def given_up(self, now_s: float) -> str:
        """Why no further attempt follows; "" if one follows."""
        if not self.losses:
            return ""
        counted = sum(RULES[loss].counts for loss in self.losses)
        if counted >= self.counted_max:
            return f"given up after {counted} counted losses (attempts_max); all: {self._listed()}"
        if now_s >= self.deadline_s:
            return f"{DEADLINE_PASSED} ({self._listed()})"
        return ""

    def _listed(self) -> str:
        counts = Counter(self.losses).most_common()
        return ", ".join(f"{count} x {loss.value}" for loss, count in counts)


def final_error(error: ServingError, why: str) -> ServingError:
    """The error that the client of a given-up request receives. `error`: error of the last loss."""
    if isinstance(error, KvMissing):
        return KvMissing(f"{error}; {why}")
    if isinstance(error, Overloaded) and error.kind in ("store_full", *WORKER_FULL_KINDS):
        return Overloaded(error.kind, f"{error}; {why}", error.retry_after_s)
    return WorkerUnavailable(f"{error}; {why}")
