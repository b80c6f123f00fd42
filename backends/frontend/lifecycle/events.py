"""What a request hears of (events) and what is to be done about it (actions): records only.

An `attempt` is the number of one pair of workers' attempt at the rest of the request; whatever
concerns a call says whose it was, because a worker may still talk about an attempt that was given
up. A worker is (worker id, incarnation). Tuples, because there are some of them for each message
with tokens, and they cost a quarter of a frozen dataclass.

Not here: which event leads to which action (machine.py), where events come from and who carries out
actions (backends/frontend/live_request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from backends.errors import ServingError, WorkerUnreached
from backends.frontend.lifecycle.attempts import Attempts, Loss
from backends.text.text_stream import OutputDelta

WorkerId = tuple[str, str]
Fields = Mapping[str, object]  # of the `decision` output
NO_FIELDS: Fields = {}

# --- events


class Understood(NamedTuple):
    """The request was checked and its prompt tokenised."""

    attempts: Attempts  # how much it may lose
    is_paced: bool  # tokens that come close together may share a message
    now_s: float


class Described(NamedTuple):
    """It only asked what is served, and was told."""


class Failed(NamedTuple):
    """It failed on this side: a request that breaks limits, a message that cannot be sent."""

    error: Exception


class Unwanted(NamedTuple):
    """Nobody waits any more: the client left, its timeout has passed, or the frontend closes."""

    error: ServingError


class Routed(NamedTuple):
    """The conductor chose a pair."""

    attempt: int
    prefill: WorkerId
    decode: WorkerId
    now_s: float


class NotRouted(NamedTuple):
    """The conductor rejected it, or a worker that the client named is not there."""

    attempt: int
    error: ServingError
    now_s: float


class PauseOver(NamedTuple):
    """The pause before the next attempt."""

    now_s: float


class FirstText(NamedTuple):
    """The token that prefill sampled, as text."""

    delta: OutputDelta
    finish_reason: str  # why the answer ends with it, or ""
    cached_tokens: int


class FirstTokenArrived(NamedTuple):
    """By message, ahead of the reply or behind it. Messages may be lost; the reply is the truth."""

    attempt: int
    first: FirstText
    now_s: float


class PrefillReplied(NamedTuple):
    attempt: int
    first: FirstText
    compute_s: float
    fields: Fields  # of the decision so far; empty where the client wants none
    now_s: float


class TokensArrived(NamedTuple):
    """Decoded tokens by message: (decoded tokens before it, what is new) for each."""

    attempt: int
    incarnation: str  # of the process that is really at work
    updates: Sequence[tuple[int, OutputDelta]]
    now_s: float
    gap_s: float  # the least time between two messages to this client


class DecodeReplied(NamedTuple):
    """The end of the answer. So many tokens came, or will come, by message before it."""

    attempt: int
    tokens_before: int
    last: OutputDelta
    finish_reason: str
    fields: Fields
    now_s: float


class CallFailed(NamedTuple):
    """The call to the worker ended without a reply."""

    attempt: int
    error: Exception
    now_s: float


class WorkerLost(NamedTuple):
    """The directory says that this process is gone; it was last heard of at `heard_s`."""

    worker: WorkerId
    heard_s: float
    now_s: float


class WorkerSilent(NamedTuple):
    """The process that is at the request has said nothing of it for too long."""

    worker: WorkerId
    now_s: float


class TimePassed(NamedTuple):
    """Something that waits may be due."""

    now_s: float


LifecycleEvent = (
    Understood
    | Described
    | Failed
    | Unwanted
    | Routed
    | NotRouted
    | PauseOver
    | FirstTokenArrived
    | PrefillReplied
    | TokensArrived
    | DecodeReplied
    | CallFailed
    | WorkerLost
    | WorkerSilent
    | TimePassed
)

# --- actions


class Pause(NamedTuple):
    """Wait so long, then PauseOver."""

    seconds: float


class Decide(NamedTuple):
    """Ask the conductor for a pair, for the prompt and what the client has of the answer."""

    attempt: int
    avoided: frozenset[WorkerId]
    is_resumed: bool


class CallPrefill(NamedTuple):
    attempt: int
    is_resumed: bool


class CallDecode(NamedTuple):
    attempt: int
    is_resumed: bool


class Send(NamedTuple):
    """A message to the client."""

    delta: OutputDelta  # what is new
    output_tokens: int  # generated ones in this message
    finish_reason: str = ""
    cached_tokens: int = 0
    fields: Fields = NO_FIELDS  # of the decision, what is known by now


class NotePrefill(NamedTuple):
    """The conductor learns from how long it took."""

    attempt: int


class NoteLoss(NamedTuple):
    """For the log."""

    attempt: int
    loss: Loss
    error: ServingError


class NoteFailed(NamedTuple):
    """The conductor leaves this worker alone for a while."""

    worker: WorkerId


class NoteUnreached(NamedTuple):
    """There is no way to this worker: nobody is sent there until a probe gets through."""

    worker: WorkerId
    error: WorkerUnreached


class NoteRefused(NamedTuple):
    """The decode worker had no time for it after all: it counts as full for a while."""

    worker: WorkerId
    wasted_s: float  # of prefill


class StopWorkers(NamedTuple):
    """Both workers of the attempt drop what they have of it."""

    attempt: int
    reason: str


class CancelCall(NamedTuple):
    """Its worker is gone, so nobody else would end the call."""

    attempt: int


class AbandonCall(NamedTuple):
    """Its worker lives and ends the call when it has read that it shall stop; or it dies. A call
    that is cancelled while its worker lives keeps a model of Triton 2.51 from unloading."""

    attempt: int
    worker: WorkerId


class ReleaseKv(NamedTuple):
    """Nobody reads the blocks of this attempt any more."""

    attempt: int


class EndAttempt(NamedTuple):
    """Nobody listens for its tokens any more, and the conductor drops what it reserved for it."""

    attempt: int
    output_tokens: int | None = None  # of an answer that is complete


class End(NamedTuple):
    """The answer is complete, or ends with this error."""

    error: Exception | None = None


LifecycleAction = (
    Pause
    | Decide
    | CallPrefill
    | CallDecode
    | Send
    | NotePrefill
    | NoteLoss
    | NoteFailed
    | NoteUnreached
    | NoteRefused
    | StopWorkers
    | CancelCall
    | AbandonCall
    | ReleaseKv
    | EndAttempt
    | End
)
