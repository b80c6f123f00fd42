"""The state machine of a request: a table of phases and events, as in etcd's raft library.

    reading      the frontend checks the request's tensors and tokenises its prompt
    routing      the conductor chooses a pair of workers, perhaps after a pause
    prefilling   the call to the prefill worker is open
    decoding     the call to the decode worker is open
    ending       the decode worker has replied, but some of its earlier messages have not arrived
    stopping     the request ended early; the workers got a Stop, and a call is still open
    done         the answer or an error was sent; a decision or a call may still be under way

`step` takes a state and an event. It returns the next state, and the actions to carry out in
order. `step` has no clock and no I/O, so tests can try every order of events.

An attempt is one try of one pair of workers to serve the request. After a lost attempt the request
is routed again, if attempts.py allows a retry. Sampling is a pure function of (logits, seed,
position), so the next attempt produces the same tokens. The store has most of the KV of the prompt
and of the tokens sent so far, so the next attempt computes little again.

Invariants in every order of events:

* Each token reaches the client once and in order. If a message with tokens is missing, the
  attempt sends no later tokens.
* A request ends once. Calls that are still open after its end were cancelled or abandoned.
* The conductor is notified of the end of each routed attempt. When the open call of an unfinished
  attempt has ended, the frontend releases the attempt's KV leases and reserved pages. After a
  complete decode the frontend does not, because the decode worker has done so.

Not here: carrying out actions (backends/frontend/live_request.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from backends.errors import (
    MessagesLost,
    Overloaded,
    ServingError,
    WorkerGone,
    WorkerUnavailable,
    WorkerUnreached,
)
from backends.frontend.lifecycle.attempts import (
    NO_WORKER_KINDS,
    RULES,
    Attempts,
    Loss,
    final_error,
    loss_by_death,
    loss_of,
)
from backends.frontend.lifecycle.events import (
    NO_FIELDS,
    AbandonCall,
    CallDecode,
    CallFailed,
    CallPrefill,
    CancelCall,
    Decide,
    DecodeReplied,
    Described,
    End,
    EndAttempt,
    Failed,
    Fields,
    FirstText,
    FirstTokenArrived,
    LifecycleAction,
    LifecycleEvent,
    NoteFailed,
    NoteLoss,
    NotePrefill,
    NoteRefused,
    NoteUnreached,
    NotRouted,
    Pause,
    PauseOver,
    PrefillReplied,
    ReleaseKv,
    Routed,
    Send,
    StopWorkers,
    TimePassed,
    TokensArrived,
    Understood,
    Unwanted,
    WorkerId,
    WorkerLost,
    WorkerSilent,
)
from backends.text.text_stream import OutputDelta, merge

MESSAGES_S_MAX = 5.0  # longest wait after a decode reply for messages that were sent before it
OVER, RETRIED = "the attempt has ended", "the frontend has given up this attempt"
UNWANTED = "the frontend has ended the request early"


class Phase(str, Enum):
    """Derived from str, which caches its hash, because each event costs a lookup in TABLE."""

    READING = "reading"
    ROUTING = "routing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDING = "ending"
    STOPPING = "stopping"
    DONE = "done"


class Attempt(NamedTuple):
    """The latest attempt.

    This class and `State` are tuples, because each message with tokens copies both. Copying a
    tuple costs a fifth of copying a dataclass.
    """

    number: int = 1  # counts the attempts of the request, from 1
    worker: WorkerId | None = None  # process called: prefill, later decode; None before routing
    decode: WorkerId | None = None  # decode worker that the conductor chose; None before routing
    called_s: float = 0.0  # monotonic time of the call to `worker`
    is_begun: bool = False  # True after the first token of the attempt was received
    begun_s: float = 0.0  # monotonic time at which the first token was received
    compute_s: float = 0.0  # seconds of prefill computation; 0 before the prefill reply
    is_decode_lost: bool = False  # True: the decode worker was lost during prefill
    sent_before: int = 0  # tokens sent to the client by earlier attempts
    decoded: int = 0  # tokens received in messages of the decode worker
    reply: DecodeReplied | None = None  # None before the reply of the decode worker


class State(NamedTuple):
    phase: Phase = Phase.READING
    attempt: Attempt = Attempt()
    attempts: Attempts = Attempts(1, 0.0, 1.0)
    is_paced: bool = False  # True: tokens that arrive close together may share a message
    started_s: float = 0.0  # monotonic time at which the request was parsed
    sent_tokens: int = 0  # tokens sent to the client in all attempts
    cached_tokens: int = 0  # prompt tokens cached at the prefill of the answer's first token
    avoided: frozenset[WorkerId] = frozenset()  # workers that the next attempt excludes
    error: Exception | None = None  # STOPPING: error for the client; else: error of the latest loss
    fields: Fields = NO_FIELDS  # values that the next message carries in its `decision` output
    waiting: tuple[OutputDelta, ...] = ()  # decoded tokens that were not sent to the client yet
    sent_s: float = float("-inf")  # monotonic time at which `waiting` was last sent
    gap_s: float = 0.0  # a paced stream sends `waiting` at least gap_s seconds after sent_s


CallEnded = PrefillReplied | DecodeReplied | CallFailed
Result = tuple[State, list[LifecycleAction]]


def step(state: State, event: LifecycleEvent) -> Result:
    """The next state, and the actions in order. Raises AssertionError for an event of the latest
    attempt that has no cell in TABLE."""
    number = getattr(event, "attempt", state.attempt.number)
    if number != state.attempt.number:  # a late event of a lost attempt
        return _late_end(state, event) if isinstance(event, CallEnded) else (state, [])
    cell = TABLE.get((state.phase, type(event)))
    assert cell is not None, f"{type(event).__name__} cannot come while {state.phase.value}"
    return cell.handle(state, event)


def due_s(state: State) -> float | None:
    """Monotonic time at which `state.waiting` is to be sent; None if `waiting` is empty or the
    phase is not DECODING."""
    is_waiting = state.phase is Phase.DECODING and state.waiting
    return state.sent_s + state.gap_s if is_waiting else None


# --- reading and routing


def _understood(state: State, event: Understood) -> Result:
    state = state._replace(
        phase=Phase.ROUTING, attempts=event.attempts, is_paced=event.is_paced, started_s=event.now_s
    )
    return state, [_decide(state)]


def _described(state: State, event: Described) -> Result:
    return state._replace(phase=Phase.DONE), [End()]


def _decide(state: State) -> Decide:
    return Decide(state.attempt.number, state.avoided, state.attempts.is_resumed)


def _routed(state: State, event: Routed) -> Result:
    attempt = state.attempt._replace(
        worker=event.prefill, decode=event.decode, called_s=event.now_s
    )
    call = CallPrefill(attempt.number, state.attempts.is_resumed)
    return state._replace(phase=Phase.PREFILLING, attempt=attempt), [call]


def _routed_too_late(state: State, event: Routed) -> Result:
    return state, [EndAttempt(event.attempt)]


def _not_routed(state: State, event: NotRouted) -> Result:
    no_worker_left = isinstance(event.error, Overloaded) and event.error.kind in NO_WORKER_KINDS
    if no_worker_left and isinstance(state.error, Overloaded) and not state.attempts.is_resumed:
        # Full workers rejected this new request, and no other worker is left, for example because
        # the client pinned a full worker. The client receives the worker's rejection.
        return state._replace(phase=Phase.DONE), [End(state.error)]
    return _lost_to(state, event.error, event.now_s, [])


def _next_attempt(state: State, now_s: float) -> Result:
    why = state.attempts.given_up(now_s)
    if not why:
        return state, [_decide(state)]
    assert isinstance(state.error, ServingError)
    return state._replace(phase=Phase.DONE), [End(final_error(state.error, why))]


# --- prefilling


def _first_by_message(state: State, event: FirstTokenArrived) -> Result:
    # If the first token ends the answer, it is sent after the prefill reply.
    if state.attempt.is_begun or event.first.finish_reason:
        return state, []
    return _begin(state, event.first, NO_FIELDS, event.now_s)


def _begin(state: State, first: FirstText, fields: Fields, now_s: float) -> Result:
    """Send the first token of this attempt. `fields`: values so far for the `decision` output."""
    cached_tokens = state.cached_tokens if state.sent_tokens else first.cached_tokens
    state = state._replace(
        cached_tokens=cached_tokens, attempt=state.attempt._replace(is_begun=True, begun_s=now_s)
    )
    if fields:
        fields = {**fields, "ttft_s": now_s - state.started_s}
    return _send(state._replace(fields=fields), first.delta, first.finish_reason)


def _prefill_replied(state: State, event: PrefillReplied) -> Result:
    reason, fields = event.first.finish_reason, event.fields
    if state.attempt.is_begun:
        if fields:
            fields = {**fields, "ttft_s": state.attempt.begun_s - state.started_s}
        actions: list[LifecycleAction] = []
        state, reason = state._replace(fields=fields), ""
    else:
        state, actions = _begin(state, event.first, fields, event.now_s)
    actions.append(NotePrefill(event.attempt))
    if reason:
        ending = [EndAttempt(event.attempt, _tokens_of_attempt(state)), *_released(state)]
        return state._replace(phase=Phase.DONE), [*actions, End(), *ending]
    assert state.attempt.decode is not None
    attempt = state.attempt._replace(
        worker=state.attempt.decode, called_s=event.now_s, compute_s=event.compute_s
    )
    if attempt.is_decode_lost:
        return _decode_lost(state._replace(attempt=attempt), actions, event.now_s)
    actions.append(CallDecode(event.attempt, state.attempts.is_resumed))
    return state._replace(phase=Phase.DECODING, attempt=attempt), actions


def _decode_lost(state: State, actions: list[LifecycleAction], now_s: float) -> Result:
    """Retry without calling the decode worker, which was lost during prefill.

    If the worker's process is frozen, it would accept a call, which would fail only after 30 s. The
    next attempt finds the prompt's KV in the store.
    """
    number, decode = state.attempt.number, state.attempt.decode
    assert decode is not None
    error = WorkerGone(f"{decode[0]} is gone")
    ended = [*_released(state), EndAttempt(number)]
    state, following = _again(state, Loss.WORKER_GONE, error, now_s, ended)
    return state, [*actions, *following]


# --- decoding


def _tokens(state: State, event: TokensArrived) -> Result:
    attempt = state.attempt
    decoded, waiting = attempt.decoded, list(state.waiting)
    for tokens_before, delta in event.updates:
        if tokens_before != decoded:
            return _messages_lost(
                state, f"expected token {decoded}, but token {tokens_before} came", event.now_s
            )
        decoded += len(delta.token_ids)
        waiting.append(delta)
    assert attempt.worker is not None
    attempt = attempt._replace(decoded=decoded, worker=(attempt.worker[0], event.incarnation))
    state = state._replace(attempt=attempt, waiting=tuple(waiting), gap_s=event.gap_s)
    if state.phase is Phase.ENDING:
        return _complete(state) if _is_complete(state) else (state, [])
    return _send_due(state, event.now_s)


def _send_due(state: State, now_s: float) -> Result:
    """Send waiting tokens, but in a paced stream only if gap_s seconds have passed since sent_s."""
    if not state.waiting or (state.is_paced and now_s < state.sent_s + state.gap_s):
        return state, []
    return _send(state, merge(state.waiting), "", waiting=(), sent_s=now_s)


def _decode_replied(state: State, event: DecodeReplied) -> Result:
    state = state._replace(attempt=state.attempt._replace(reply=event))
    return _complete(state) if _is_complete(state) else (state._replace(phase=Phase.ENDING), [])


def _is_complete(state: State) -> bool:
    reply = state.attempt.reply
    return reply is not None and state.attempt.decoded >= reply.tokens_before


def _complete(state: State) -> Result:
    reply = state.attempt.reply
    assert reply is not None
    last = merge([*state.waiting, reply.last])
    state = state._replace(phase=Phase.DONE, waiting=(), fields={**state.fields, **reply.fields})
    state, actions = _send(state, last, reply.finish_reason)
    return state, [*actions, End(), EndAttempt(reply.attempt, _tokens_of_attempt(state))]


def _send(state: State, delta: OutputDelta, finish_reason: str, **changes: Any) -> Result:
    """Send the delta unless it is empty. It is empty while the text stream holds back text that may
    begin a stop word. `changes`: other changes of the state, made in the same copy of the tuple."""
    if not (delta.token_ids or delta.text or finish_reason):
        return state._replace(**changes), []
    new_tokens = len(delta.token_ids)
    sent = Send(delta, new_tokens, finish_reason, state.cached_tokens, state.fields)
    sent_tokens = state.sent_tokens + new_tokens
    return state._replace(sent_tokens=sent_tokens, fields=NO_FIELDS, **changes), [sent]


def _tokens_of_attempt(state: State) -> int:
    return state.sent_tokens - state.attempt.sent_before


def _overdue(state: State, event: TimePassed) -> Result:
    """Retry the request if messages are still missing MESSAGES_S_MAX after the decode reply."""
    reply = state.attempt.reply
    assert reply is not None
    if event.now_s <= reply.now_s + MESSAGES_S_MAX:
        return state, []
    found = f"{state.attempt.decoded} of {reply.tokens_before} tokens arrived"
    return _messages_lost(state, found, event.now_s)


# --- losses


def _messages_lost(state: State, found: str, now_s: float) -> Result:
    """End the attempt, because tokens after the gap cannot be sent. The worker is alive, so a Stop
    makes it end the open call."""
    number, worker = state.attempt.number, state.attempt.worker
    assert worker is not None
    actions = _released(state)
    if _is_calling(state):
        actions = [AbandonCall(number, worker), StopWorkers(number, RETRIED)]
    return _lost_to(state, MessagesLost(found), now_s, actions)


def _call_failed(state: State, event: CallFailed) -> Result:
    actions = _released(state)
    if state.phase is Phase.DECODING and isinstance(event.error, Overloaded):
        assert state.attempt.decode is not None
        actions.insert(0, NoteRefused(state.attempt.decode, state.attempt.compute_s))
    return _lost_to(state, event.error, event.now_s, actions)


def _lost_to(
    state: State, error: Exception, now_s: float, actions: list[LifecycleAction]
) -> Result:
    """End the attempt with this error. Then retry the request or send the error to the client."""
    attempts, loss = state.attempts, None
    if isinstance(error, ServingError):
        loss = loss_of(error, attempts.is_resumed, attempts.asks_others)
    number, worker = state.attempt.number, state.attempt.worker
    ended = [EndAttempt(number)] if worker is not None else []  # no worker: nothing is reserved
    if loss is None:
        return state._replace(phase=Phase.DONE), [End(error), *actions, *ended]
    assert isinstance(error, ServingError)
    if worker is not None and isinstance(error, WorkerUnreached):
        actions = [*actions, NoteUnreached(worker, error)]
    elif worker is not None and isinstance(error, WorkerUnavailable):
        actions = [*actions, NoteFailed(worker)]
    return _again(state, loss, error, now_s, [*actions, *ended])


def _again(
    state: State, loss: Loss, error: ServingError, now_s: float, actions: list[LifecycleAction]
) -> Result:
    """Start the next attempt at once or after a pause, or give the request up."""
    lost = state.attempt
    attempts = state.attempts.after(loss, state.sent_tokens, now_s)
    avoided = state.avoided
    if loss is Loss.NO_WORKER:
        avoided = frozenset()  # a worker that failed before is better than no worker
    elif RULES[loss].avoids and lost.worker is not None:
        avoided |= {lost.worker}
    state = state._replace(
        phase=Phase.ROUTING,
        attempts=attempts,
        avoided=avoided,
        error=error,
        fields=NO_FIELDS,
        waiting=(),
        attempt=Attempt(lost.number + 1, sent_before=state.sent_tokens),
    )
    actions = [NoteLoss(lost.number, loss, error), *actions]
    pause_s = attempts.pause_s(now_s)
    if pause_s > 0:
        return state, [*actions, Pause(pause_s)]
    state, following = _next_attempt(state, now_s)
    return state, [*actions, *following]


def _worker_lost(state: State, event: WorkerLost) -> Result:
    """The directory reports that a process is gone.

    Triton runs two processes of a worker while it reloads the worker's model. The process that
    serves the request is known with the first decoded tokens. If the routed process exits earlier,
    the attempt ends, although the other process may be serving it. This costs only time.
    """
    attempt = state.attempt
    if state.phase is Phase.PREFILLING and event.worker == attempt.decode != attempt.worker:
        return state._replace(attempt=attempt._replace(is_decode_lost=True)), []
    leave = CancelCall(state.attempt.number)
    loss = loss_by_death(state.attempt.called_s, event.seen_s)
    error = WorkerUnavailable(f"{event.worker[0]} is gone")
    return _taken_away(state, event, leave, loss, error)


def _worker_silent(state: State, event: WorkerSilent) -> Result:
    leave = AbandonCall(state.attempt.number, event.worker)
    error = WorkerGone(f"{event.worker[0]} sends no heartbeat for the request")
    state, actions = _taken_away(state, event, leave, Loss.WORKER_GONE, error)
    return state, [*actions, NoteFailed(event.worker)] if actions else []


def _taken_away(
    state: State,
    event: WorkerLost | WorkerSilent,
    leave: LifecycleAction,
    loss: Loss,
    error: ServingError,
) -> Result:
    """End the attempt if `event.worker` serves it. If the attempt's call is open, `_late_end`
    releases the KV when the call has ended."""
    if state.attempt.worker != event.worker:
        return state, []
    number = state.attempt.number
    leaving = [leave, StopWorkers(number, RETRIED)] if _is_calling(state) else _released(state)
    actions = [*leaving, EndAttempt(number)]
    if state.phase is Phase.STOPPING:
        return state._replace(phase=Phase.DONE), [End(state.error), *actions]
    return _again(state, loss, error, event.now_s, actions)


def _is_calling(state: State) -> bool:
    return state.phase in (Phase.PREFILLING, Phase.DECODING, Phase.STOPPING)


def _released(state: State) -> list[LifecycleAction]:
    """Actions that release the attempt's KV leases and its reserved pages in the decode worker."""
    number = state.attempt.number
    return [StopWorkers(number, OVER), ReleaseKv(number)]


# --- ends without an answer


def _over(state: State, event: Failed | Unwanted) -> Result:
    """End the request at once, because the current attempt has no open call."""
    ended = [EndAttempt(state.attempt.number)] if state.attempt.worker is not None else []
    released = _released(state) if state.phase is Phase.ENDING else []
    return state._replace(phase=Phase.DONE, waiting=()), [End(event.error), *ended, *released]


def _stopping(state: State, event: Failed | Unwanted) -> Result:
    state = state._replace(phase=Phase.STOPPING, error=event.error, waiting=())
    return state, [StopWorkers(state.attempt.number, UNWANTED)]


def _stop_again(state: State, event: TimePassed) -> Result:
    """Repeat the Stop, because an earlier one may be lost, or may have arrived before the call."""
    return state, [StopWorkers(state.attempt.number, UNWANTED)]


def _stopped(state: State, event: CallEnded) -> Result:
    ended: list[LifecycleAction] = [End(state.error), EndAttempt(state.attempt.number)]
    return state._replace(phase=Phase.DONE), [*ended, *_released(state)]


def _late_end(state: State, event: CallEnded) -> Result:
    """Drop the result of a call that was still open when its attempt ended, and release the KV."""
    return state, [StopWorkers(event.attempt, OVER), ReleaseKv(event.attempt)]


def _ignore(state: State, event: LifecycleEvent) -> Result:
    return state, []


@dataclass(frozen=True, slots=True)
class Cell:
    handle: Callable[[State, Any], Result]
    to: frozenset[Phase]  # phases that may follow, for the tests


READING, ROUTING, PREFILLING, DECODING, ENDING, STOPPING, DONE = Phase
_Row = Mapping[type, tuple[Callable[[State, Any], Result], tuple[Phase, ...]]]

# phase -> event -> (handler, phases that may follow)
_ROWS: Mapping[Phase, _Row] = {
    READING: {
        Understood: (_understood, (ROUTING,)),
        Described: (_described, (DONE,)),
        Failed: (_over, (DONE,)),
        Unwanted: (_over, (DONE,)),
    },
    ROUTING: {
        Routed: (_routed, (PREFILLING,)),
        NotRouted: (_not_routed, (ROUTING, DONE)),
        PauseOver: (lambda state, event: _next_attempt(state, event.now_s), (ROUTING, DONE)),
        Failed: (_over, (DONE,)),
        Unwanted: (_over, (DONE,)),
    },
    PREFILLING: {
        FirstTokenArrived: (_first_by_message, (PREFILLING,)),
        PrefillReplied: (_prefill_replied, (DECODING, ROUTING, DONE)),
        CallFailed: (_call_failed, (ROUTING, DONE)),
        WorkerLost: (_worker_lost, (PREFILLING, ROUTING, DONE)),
        WorkerSilent: (_worker_silent, (PREFILLING, ROUTING, DONE)),
        Failed: (_stopping, (STOPPING,)),
        Unwanted: (_stopping, (STOPPING,)),
    },
    DECODING: {
        TokensArrived: (_tokens, (DECODING, ROUTING, DONE)),
        TimePassed: (lambda state, event: _send_due(state, event.now_s), (DECODING,)),
        DecodeReplied: (_decode_replied, (ENDING, DONE)),
        CallFailed: (_call_failed, (ROUTING, DONE)),
        WorkerLost: (_worker_lost, (DECODING, ROUTING, DONE)),
        WorkerSilent: (_worker_silent, (DECODING, ROUTING, DONE)),
        Failed: (_stopping, (STOPPING,)),
        Unwanted: (_stopping, (STOPPING,)),
    },
    ENDING: {
        TokensArrived: (_tokens, (ENDING, ROUTING, DONE)),
        TimePassed: (_overdue, (ENDING, ROUTING, DONE)),
        WorkerLost: (_worker_lost, (ENDING, ROUTING, DONE)),
        WorkerSilent: (_worker_silent, (ENDING, ROUTING, DONE)),
        Failed: (_over, (DONE,)),
        Unwanted: (_over, (DONE,)),
    },
    STOPPING: {
        PrefillReplied: (_stopped, (DONE,)),
        DecodeReplied: (_stopped, (DONE,)),
        CallFailed: (_stopped, (DONE,)),
        WorkerLost: (_worker_lost, (STOPPING, DONE)),
        WorkerSilent: (_worker_silent, (STOPPING, DONE)),
        TimePassed: (_stop_again, (STOPPING,)),
    },
    DONE: {
        Routed: (_routed_too_late, (DONE,)),
        PrefillReplied: (_late_end, (DONE,)),
        DecodeReplied: (_late_end, (DONE,)),
        CallFailed: (_late_end, (DONE,)),
    },
}
# phase -> events that may arrive in it and have no effect
_IGNORED: Mapping[Phase, tuple[type, ...]] = {
    READING: (WorkerLost, WorkerSilent, TimePassed),
    ROUTING: (WorkerLost, WorkerSilent, TimePassed),
    PREFILLING: (TimePassed,),
    DECODING: (FirstTokenArrived,),
    ENDING: (FirstTokenArrived,),
    STOPPING: (FirstTokenArrived, TokensArrived, Failed, Unwanted),
    DONE: (
        Understood, Described, Failed, Unwanted, NotRouted, PauseOver, FirstTokenArrived,
        TokensArrived, WorkerLost, WorkerSilent, TimePassed,
    ),
}  # fmt: skip
TABLE: Mapping[tuple[Phase, type], Cell] = {
    (phase, kind): Cell(handle, frozenset(to))
    for phase, row in _ROWS.items()
    for kind, (handle, to) in row.items()
} | {
    (phase, kind): Cell(_ignore, frozenset({phase}))
    for phase, kinds in _IGNORED.items()
    for kind in kinds
}
