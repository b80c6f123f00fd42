"""Events of a request's lifecycle, and the actions that follow from them: records only.

An `attempt` is the number of one attempt, by one pair of workers, at the rest of the request.
Events of a call carry that number, because messages of an earlier attempt may still arrive. A
worker is (worker id, incarnation). The records are tuples, which cost a quarter of a frozen
dataclass: each message with tokens makes several.

Not here: which event leads to which action (machine.py), posting events and carrying out actions
(backends/frontend/live_request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from backends.errors import ServingError, WorkerUnreached
from backends.frontend.lifecycle.attempts import Attempts, Loss
from backends.text.text_stream import OutputDelta

WorkerId = tuple[str, str]
Fields = Mapping[str, object]  # JSON fields of the `decision` output
NO_FIELDS: Fields = {}

# --- events


class Understood(NamedTuple):
    """The request was checked and its prompt tokenised."""

    attempts: Attempts  # limits on retries
    is_paced: bool  # True: tokens that arrive close together may share a message
    now_s: float


class Described(NamedTuple):
    """The request only asked for a description of the service, which has been sent."""


class Failed(NamedTuple):
    """The frontend failed the request: invalid, an error in a step, or a message not sent."""

    error: Exception


class Unwanted(NamedTuple):
    """The answer has no reader: the client disconnected or timed out, or the frontend closes."""

    error: ServingError


class Routed(NamedTuple):
    """The conductor chose a pair of workers."""

    attempt: int
    prefill: WorkerId
    decode: WorkerId
    now_s: float


class NotRouted(NamedTuple):
    """The conductor rejected the request, or a worker that the client pinned is absent."""

    attempt: int
    error: ServingError
    now_s: float


class PauseOver(NamedTuple):
    """The pause before the next attempt has passed."""

    now_s: float


class FirstText(NamedTuple):
    """The first token of an attempt, sampled by prefill, as text."""

    delta: OutputDelta
    finish_reason: str  # why the answer ends with this token, or ""
    cached_tokens: int  # prompt tokens whose KV was found in the store


class FirstTokenArrived(NamedTuple):
    """The first token came by message, before or after the prefill reply, which repeats it.

    A message may be lost without notice. A lost reply becomes CallFailed.
    """

    attempt: int
    first: FirstText
    now_s: float


class PrefillReplied(NamedTuple):
    attempt: int
    first: FirstText
    compute_s: float  # seconds of prefill computation
    fields: Fields  # of the decision so far; empty if the client did not ask for them
    now_s: float


class TokensArrived(NamedTuple):
    """Decoded tokens came by message."""

    attempt: int
    incarnation: str  # of the process that sent them; may differ from the routed process
    updates: Sequence[tuple[int, OutputDelta]]  # (decoded tokens before the delta, delta)
    now_s: float
    gap_s: float  # least seconds between two messages to this client


class DecodeReplied(NamedTuple):
    """The end of the answer."""

    attempt: int
    tokens_before: int  # decoded tokens sent by message; some may arrive after this reply
    last: OutputDelta  # tokens that no message carries
    finish_reason: str
    fields: Fields
    now_s: float


class CallFailed(NamedTuple):
    """The call to the worker ended without a reply."""

    attempt: int
    error: Exception
    now_s: float


class WorkerLost(NamedTuple):
    """The directory reports that this process is gone."""

    worker: WorkerId
    seen_s: float  # monotonic time of its last report
    now_s: float


class WorkerSilent(NamedTuple):
    """The process that serves the request sent no message or heartbeat for too long."""

    worker: WorkerId
    now_s: float


class TimePassed(NamedTuple):
    """Waiting tokens may be due, or a repeated Stop."""

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
    """Wait, then post PauseOver."""

    seconds: float


class Decide(NamedTuple):
    """Request a pair from the conductor, for the prompt and the tokens already sent."""

    attempt: int
    avoided: frozenset[WorkerId]  # workers to leave out
    is_resumed: bool  # True: an earlier attempt was admitted


class CallPrefill(NamedTuple):
    attempt: int
    is_resumed: bool


class CallDecode(NamedTuple):
    attempt: int
    is_resumed: bool


class Send(NamedTuple):
    """Send a message to the client."""

    delta: OutputDelta
    output_tokens: int  # generated tokens in this message
    finish_reason: str = ""
    cached_tokens: int = 0
    fields: Fields = NO_FIELDS  # of the decision, not sent before


class NotePrefill(NamedTuple):
    """Report the prefill's duration to the conductor, which corrects its estimates."""

    attempt: int


class NoteLoss(NamedTuple):
    """Log and trace the lost attempt."""

    attempt: int
    loss: Loss
    error: ServingError


class NoteFailed(NamedTuple):
    """The conductor excludes this worker until a later report, at most for failed_mark_s."""

    worker: WorkerId


class NoteUnreached(NamedTuple):
    """The worker is unreachable: it gets no requests until a probe succeeds."""

    worker: WorkerId
    error: WorkerUnreached


class NoteRefused(NamedTuple):
    """The decode worker rejected the request: it counts as full for a while."""

    worker: WorkerId
    wasted_s: float  # seconds of prefill computation


class StopWorkers(NamedTuple):
    """Both workers of the attempt drop their state of it."""

    attempt: int
    reason: str


class CancelCall(NamedTuple):
    """Cancel the call: its worker is gone and cannot end it."""

    attempt: int


class AbandonCall(NamedTuple):
    """Leave the call to its worker, which ends it after reading Stop.

    The call is cancelled only when the worker is lost: in Triton 2.51, cancelling a call to a live
    worker keeps a model from unloading.
    """

    attempt: int
    worker: WorkerId


class ReleaseKv(NamedTuple):
    """Release the leases on the blocks of this attempt."""

    attempt: int


class EndAttempt(NamedTuple):
    """Stop receiving tokens of the attempt; the conductor drops its reservations."""

    attempt: int
    output_tokens: int | None = None  # tokens of a complete answer; None: it is not complete


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
