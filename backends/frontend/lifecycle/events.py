"""What a request hears of (events) and what is to be done about it (actions): records only.

An `attempt` is the number of one try at the rest of the request by one pair of workers; whatever
concerns a call says whose it was, because a worker may still talk about an attempt that was given
up. A worker is (worker id, incarnation). Not here: which event leads to which action (machine.py),
where events come from and who carries out actions (backends/frontend/live_request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.errors import ServingError
from backends.frontend.lifecycle.attempts import Attempts, Loss
from backends.text.text_stream import Emission

WorkerId = tuple[str, str]
Fields = Mapping[str, object]  # of the `decision` output

# --- events


@dataclass(frozen=True, slots=True)
class Understood:
    """The request was checked and its prompt tokenised."""

    attempts: Attempts  # how much it may lose
    is_paced: bool  # tokens that come close together may share a message
    now_s: float


@dataclass(frozen=True, slots=True)
class Described:
    """It only asked what is served, and was told."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It failed on this side: a request that breaks limits, a message that cannot be sent."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Nobody waits any more: the client left, its timeout has passed, or the frontend closes."""

    error: ServingError


@dataclass(frozen=True, slots=True)
class Routed:
    """The conductor chose a pair."""

    attempt: int
    prefill: WorkerId
    decode: WorkerId
    now_s: float


@dataclass(frozen=True, slots=True)
class NotRouted:
    """The conductor rejected it, or a worker that the client named is not there."""

    attempt: int
    error: ServingError
    now_s: float


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The pause before the next attempt."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FirstText:
    """The token that prefill sampled, as text."""

    emission: Emission
    finish_reason: str  # why the answer ends with it, or ""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """By message, ahead of the reply or behind it. Messages may be lost; the reply is the truth."""

    attempt: int
    first: FirstText
    now_s: float


@dataclass(frozen=True, slots=True)
class PrefillReplied:
    attempt: int
    first: FirstText
    compute_s: float
    fields: Fields  # of the decision so far; empty where the client wants none
    now_s: float


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """Decoded tokens by message: (decoded tokens before it, what is new) for each."""

    attempt: int
    incarnation: str  # of the process that is really at work
    updates: Sequence[tuple[int, Emission]]
    now_s: float
    gap_s: float  # the least time between two messages to this client


@dataclass(frozen=True, slots=True)
class DecodeReplied:
    """The end of the answer. So many tokens came, or will come, by message before it."""

    attempt: int
    tokens_before: int
    last: Emission
    finish_reason: str
    fields: Fields
    now_s: float


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call to the worker ended without a reply."""

    attempt: int
    error: Exception
    now_s: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The directory says that this process is gone; it was last heard of at `heard_s`."""

    worker: WorkerId
    heard_s: float
    now_s: float


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """The process that is at the request has said nothing of it for too long."""

    worker: WorkerId
    now_s: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Something that waits may be due."""

    now_s: float


LifecycleEvent = (
    Understood | Described | Failed | Unwanted | Routed | NotRouted | PauseOver | FirstTokenArrived
    | PrefillReplied | TokensArrived | DecodeReplied | CallFailed | WorkerLost | WorkerSilent
    | TimePassed
)  # fmt: skip

# --- actions


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long, then PauseOver."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Decide:
    """Ask the conductor for a pair, for the prompt and what the client has of the answer."""

    attempt: int
    avoided: frozenset[WorkerId]
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class CallPrefill:
    attempt: int
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class CallDecode:
    attempt: int
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Send:
    """A message to the client."""

    emission: Emission  # what is new
    output_tokens: int  # generated ones in this message
    finish_reason: str = ""
    cached_tokens: int = 0
    fields: Fields = field(default_factory=dict)  # of the decision, what is known by now


@dataclass(frozen=True, slots=True)
class NotePrefill:
    """The conductor learns from how long it took."""

    attempt: int


@dataclass(frozen=True, slots=True)
class NoteLoss:
    """For the log."""

    attempt: int
    loss: Loss
    error: ServingError


@dataclass(frozen=True, slots=True)
class NoteFailed:
    """The conductor leaves this worker alone for a while."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class NoteRefused:
    """The decode worker had no time for it after all: it counts as full for a while."""

    worker: WorkerId
    wasted_s: float  # of prefill


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Both workers of the attempt drop what they have of it."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Its worker is gone, so nobody else would end the call."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AbandonCall:
    """Its worker lives and ends the call when it has read that it shall stop; or it dies. A call
    that is cancelled while its worker lives keeps a model of Triton 2.51 from unloading."""

    attempt: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Nobody reads the blocks of this attempt any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Nobody listens for its tokens any more, and the conductor drops what it reserved for it."""

    attempt: int
    output_tokens: int | None = None  # of an answer that is complete


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete, or ends with this error."""

    error: Exception | None = None


LifecycleAction = (
    Pause | Decide | CallPrefill | CallDecode | Send | NotePrefill | NoteLoss | NoteFailed
    | NoteRefused | StopWorkers | CancelCall | AbandonCall | ReleaseKv | EndAttempt | End
)  # fmt: skip
