"""Events of a request's lifecycle, and the actions that follow from them: records only.

An attempt is one try of one pair of workers to serve the rest of the request. `attempt` is its
number. Events of a call carry this number, because messages of an earlier attempt may still arrive.
`now_s` is the monotonic time of the event. Each message with tokens makes several records. They are
tuples, because making a tuple takes a quarter of the time of making a frozen dataclass.

Not here: which event leads to which action (machine.py), posting events and carrying out actions
(backends/frontend/live_request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from backends.errors import ServingError, WorkerUnreached
from backends.frontend.lifecycle.attempts import Attempts, Loss
from backends.text.text_stream import OutputDelta

WorkerId = tuple[str, str]  # (worker id, incarnation: random name of one start of its process)
Fields = Mapping[str, object]  # JSON fields of the `decision` output (frontend/decisions/fields.py)
NO_FIELDS: Fields = {}

# --- events


class Understood(NamedTuple):
    """The request is valid, and its prompt was tokenised."""

    attempts: Attempts  # the limits on retries; no losses yet
    is_paced: bool  # True: tokens that arrive close together may share a message
    now_s: float


class Described(NamedTuple):
    """The request only asked for a description of the service, which has been sent."""


class Failed(NamedTuple):
    """The request is invalid, or an exception occurred while it was processed or answered."""

    error: Exception


class Unwanted(NamedTuple):
    """The client disconnected, the client's timeout has passed, or the frontend shuts down."""

    error: ServingError


class Routed(NamedTuple):
    """The conductor chose a pair of workers."""

    attempt: int
    prefill: WorkerId
    decode: WorkerId
    now_s: float


class NotRouted(NamedTuple):
    """The conductor rejected the request, or a worker that the client pinned is not registered."""

    attempt: int
    error: ServingError
    now_s: float


class PauseOver(NamedTuple):
    """The pause before the next attempt has passed."""

    now_s: float


class FirstText(NamedTuple):
    """The first token of an attempt, sampled by prefill, as text."""

    delta: OutputDelta
    finish_reason: str  # why the answer ends with this token; "": it does not
    cached_tokens: int  # prompt tokens whose KV was found in the store


class FirstTokenArrived(NamedTuple):
    """The prefill worker's message with the first token arrived.

    The prefill reply repeats the token, because this message may be lost without notice.
    """

    attempt: int
    first: FirstText
    now_s: float


class PrefillReplied(NamedTuple):
    attempt: int
    first: FirstText
    compute_s: float  # seconds of prefill computation
    fields: Fields  # values so far for `decision`; empty if the client did not request it
    now_s: float


class TokensArrived(NamedTuple):
    """One or several messages with decoded tokens arrived."""

    attempt: int
    incarnation: str  # process that sent the tokens; may differ from the routed process
    updates: Sequence[tuple[int, OutputDelta]]  # (decoded tokens before the delta, delta)
    now_s: float
    gap_s: float  # least seconds between two messages to the client of a paced stream


class DecodeReplied(NamedTuple):
    """The decode worker ended the answer."""

    attempt: int
    tokens_before: int  # tokens that messages carry; some messages may arrive after this reply
    last: OutputDelta  # the last tokens, which no message carries
    finish_reason: str
    fields: Fields  # further values for `decision`; empty if the client did not request it
    now_s: float


class CallFailed(NamedTuple):
    """The call to the worker ended without a reply."""

    attempt: int
    error: Exception
    now_s: float


class WorkerLost(NamedTuple):
    """The directory reports that this process is gone."""

    worker: WorkerId
    seen_s: float  # monotonic time of the worker's last report
    now_s: float


class WorkerSilent(NamedTuple):
    """For CALL_SILENCE_S_MAX, the process sent neither tokens nor a heartbeat for the request."""

    worker: WorkerId
    now_s: float


class TimePassed(NamedTuple):
    """Waiting tokens or a repeated Stop may be due, or missing messages may be overdue."""

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
    """Wait, then post the event PauseOver."""

    seconds: float


class Decide(NamedTuple):
    """Request a pair of workers from the conductor, for the prompt and the tokens already sent."""

    attempt: int
    avoided: frozenset[WorkerId]  # workers to exclude
    is_resumed: bool  # True: an earlier attempt was admitted


class CallPrefill(NamedTuple):
    attempt: int
    is_resumed: bool  # True: an earlier attempt was admitted


class CallDecode(NamedTuple):
    attempt: int
    is_resumed: bool  # True: an earlier attempt was admitted


class Send(NamedTuple):
    """Send a message to the client."""

    delta: OutputDelta
    output_tokens: int  # generated tokens in this message
    finish_reason: str = ""
    cached_tokens: int = 0  # prompt tokens whose KV was found in the store
    fields: Fields = NO_FIELDS  # values for the `decision` output that no earlier message carried


class NotePrefill(NamedTuple):
    """Report the prefill's duration to the conductor, which corrects its estimates."""

    attempt: int


class NoteLoss(NamedTuple):
    """Log and trace the lost attempt."""

    attempt: int
    loss: Loss
    error: ServingError


class NoteFailed(NamedTuple):
    """The conductor excludes this worker for failed_mark_s, or until a later report."""

    worker: WorkerId


class NoteUnreached(NamedTuple):
    """This frontend cannot reach the worker, and excludes it until a probe succeeds."""

    worker: WorkerId
    error: WorkerUnreached


class NoteRefused(NamedTuple):
    """The decode worker rejected the request. The conductor marks the worker as full for a time."""

    worker: WorkerId
    wasted_s: float  # seconds of prefill computation for the rejected request


class StopWorkers(NamedTuple):
    """Send Stop to both workers of the attempt, which then drop the attempt's state."""

    attempt: int
    reason: str  # why the frontend stops the attempt; workers do not use this text


class CancelCall(NamedTuple):
    """Cancel the call, because its worker is gone and cannot end it."""

    attempt: int


class AbandonCall(NamedTuple):
    """Leave the call open until its worker ends it. A StopWorkers action makes the worker do so.

    The frontend cancels the call only if the worker is lost, because Triton 2.51 never unloads a
    model after a cancelled call to it.
    """

    attempt: int
    worker: WorkerId


class ReleaseKv(NamedTuple):
    """Release the leases on the blocks of this attempt."""

    attempt: int


class EndAttempt(NamedTuple):
    """Stop receiving tokens of the attempt. The conductor drops the attempt's reservations."""

    attempt: int
    output_tokens: int | None = None  # tokens of this attempt; None unless it completed the answer


class End(NamedTuple):
    """Complete the answer if `error` is None. Otherwise end it with this error."""

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
