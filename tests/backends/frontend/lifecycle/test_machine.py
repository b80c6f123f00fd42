"""Every cell of the table has a case here, and whole requests go through it in every order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from backends.errors import (
    Cancelled,
    InvalidRequest,
    KvMissing,
    Overloaded,
    ServingError,
    WorkerGone,
    WorkerRefused,
    WorkerUnavailable,
)
from backends.frontend.lifecycle.attempts import Attempts, Loss
from backends.frontend.lifecycle.events import (
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
    WorkerLost,
    WorkerSilent,
)
from backends.frontend.lifecycle.machine import (
    MESSAGES_S_MAX,
    OVER,
    RETRIED,
    TABLE,
    UNWANTED,
    Phase,
    State,
    due_s,
    step,
)
from backends.text.text_stream import OutputDelta

P, D = ("prefill_0", "p"), ("decode_0", "d")
LEFT, BROKE = Cancelled("the client disconnected"), ValueError("a mistake")
GONE, KV_GONE = WorkerGone("it is shutting down"), KvMissing("blocks [0] of 1 are gone")
CRASHED = WorkerUnavailable("internal_error: x")
STRANGE = WorkerRefused("its certificate is of another cluster")
REFUSED = Overloaded("decode_slow", "too slow", 1.0)
FULL, ABSENT = Overloaded("decode_overload", "", 2.0), Overloaded("no_decode_worker", "", 1.0)


def text(*ids: int) -> OutputDelta:
    return OutputDelta(ids, "".join(f"<{token}>" for token in ids))


def after(state: State, *events: LifecycleEvent) -> State:
    for event in events:
        state, _ = step(state, event)
    return state


def replied(*ids: int, before: int = 0, attempt: int = 1, **fields: object) -> DecodeReplied:
    return DecodeReplied(attempt, before, text(*ids), "length", fields, 5.0)


def came(before: int, *ids: int, now_s: float = 4.0, gap_s: float = 0.0) -> TokensArrived:
    return TokensArrived(1, "d", [(before, text(*ids))], now_s, gap_s)


def first(token: int = 7, reason: str = "") -> FirstText:
    return FirstText(text(token), reason, 64)


UNDERSTOOD = Understood(Attempts(3, 0.0, 600.0), True, 1.0)
ROUTED = Routed(1, P, D, 2.0)
FIRST = FirstTokenArrived(1, first(), 2.5)
PREFILLED = PrefillReplied(1, first(), 0.5, {"prefill": "prefill_0"}, 3.0)
COMPLETES = PrefillReplied(1, first(7, "length"), 0.5, {}, 3.0)

READING = State()
ROUTING = after(READING, UNDERSTOOD)
PREFILLING = after(ROUTING, ROUTED)
DECODING = after(PREFILLING, PREFILLED)
ENDING = after(DECODING, replied(9, before=1))
STOPPING_PREFILL = after(PREFILLING, Unwanted(LEFT))
STOPPING = after(DECODING, Unwanted(LEFT))
DONE = after(ENDING, came(0, 8))
PAUSING = after(PREFILLING, CallFailed(1, KV_GONE, 3.0), NotRouted(2, REFUSED, 3.0))
GIVEN_UP = after(  # the client's deadline is in the pause
    State(),
    Understood(Attempts(3, 0.0, 600.0, timeout_s=3.01), True, 1.0),
    ROUTED,
    CallFailed(1, KV_GONE, 3.0),
    NotRouted(2, REFUSED, 3.0),
)
ONE_ATTEMPT = Understood(Attempts(1, 0.0, 600.0), True, 1.0)
LAST_PREFILL = after(READING, ONE_ATTEMPT, ROUTED)
LAST_DECODE = after(LAST_PREFILL, PREFILLED)
LAST_ENDING = after(LAST_DECODE, replied(9, before=1))
SPENT = after(  # nothing may be lost any more: the deadline is over
    READING, Understood(Attempts(3, 0.0, 600.0, timeout_s=2.0), True, 1.0), ROUTED, PREFILLED
)
WITH_OTHERS = after(  # frontends, which fill the workers too
    READING, Understood(Attempts(3, 0.0, 600.0, full_workers_max=2), True, 1.0), ROUTED, PREFILLED
)
SPENT_ENDING = after(SPENT, replied(9, before=1))

Case = tuple[State, LifecycleEvent, Phase, list[Any]]
AGAIN = [Decide(2, frozenset(), True)]
RELEASED = [StopWorkers(1, OVER), ReleaseKv(1)]
LEAVING = [StopWorkers(1, RETRIED), EndAttempt(1)]


def avoiding(worker: tuple[str, str]) -> Decide:
    return Decide(2, frozenset({worker}), True)


# (phase, event) -> what may be the case: state, event, the next phase, the actions. A type stands
# for an action whose content another case says, or that is an error made here.
CASES: dict[tuple[Phase, type], list[Case]] = {
    (Phase.READING, Understood): [
        (READING, UNDERSTOOD, Phase.ROUTING, [Decide(1, frozenset(), False)])
    ],
    (Phase.READING, Described): [(READING, Described(), Phase.DONE, [End()])],
    (Phase.READING, Failed): [(READING, Failed(BROKE), Phase.DONE, [End(BROKE)])],
    (Phase.READING, Unwanted): [(READING, Unwanted(LEFT), Phase.DONE, [End(LEFT)])],
    (Phase.ROUTING, Routed): [(ROUTING, ROUTED, Phase.PREFILLING, [CallPrefill(1, False)])],
    (Phase.ROUTING, NotRouted): [
        (ROUTING, NotRouted(1, REFUSED, 2.0), Phase.DONE, [End(REFUSED)]),
        (after(PREFILLING, CallFailed(1, KV_GONE, 3.0)), NotRouted(2, REFUSED, 3.0),
         Phase.ROUTING, [NoteLoss(2, Loss.NO_WORKER, REFUSED), Pause(0.1)]),
        # It was full, and there is nobody else, because it was pinned for instance.
        (after(WITH_OTHERS, CallFailed(1, FULL, 3.0)), NotRouted(2, ABSENT, 3.0), Phase.DONE,
         [End(FULL)]),
        (after(WITH_OTHERS, CallFailed(1, FULL, 3.0)), NotRouted(2, REFUSED, 3.0), Phase.DONE,
         [End(REFUSED)]),
        (after(PREFILLING, CallFailed(1, KV_GONE, 3.0)), NotRouted(2, ABSENT, 3.0),
         Phase.ROUTING, [NoteLoss(2, Loss.NO_WORKER, ABSENT), Pause(0.1)]),
    ],
    (Phase.ROUTING, PauseOver): [
        (PAUSING, PauseOver(4.0), Phase.ROUTING, [Decide(3, frozenset(), True)]),
        (GIVEN_UP, PauseOver(4.0), Phase.DONE, [End]),
    ],
    (Phase.ROUTING, Failed): [(ROUTING, Failed(BROKE), Phase.DONE, [End(BROKE)])],
    (Phase.ROUTING, Unwanted): [(PAUSING, Unwanted(LEFT), Phase.DONE, [End(LEFT)])],
    (Phase.PREFILLING, FirstTokenArrived): [
        (PREFILLING, FIRST, Phase.PREFILLING, [Send(text(7), 1, "", 64, {})]),
        (after(PREFILLING, FIRST), FIRST, Phase.PREFILLING, []),
        (PREFILLING, FirstTokenArrived(1, first(7, "length"), 2.5), Phase.PREFILLING, []),
    ],
    (Phase.PREFILLING, PrefillReplied): [
        (PREFILLING, PREFILLED, Phase.DECODING,
         [Send(text(7), 1, "", 64, {"prefill": "prefill_0", "ttft_s": 2.0}), NotePrefill(1),
          CallDecode(1, False)]),
        (after(PREFILLING, FIRST), PREFILLED, Phase.DECODING,
         [NotePrefill(1), CallDecode(1, False)]),
        (after(PREFILLING, WorkerLost(D, 1.0, 2.7)), PREFILLED, Phase.ROUTING,
         [Send, NotePrefill(1), NoteLoss, *RELEASED, EndAttempt(1),
          Decide(2, frozenset({D}), True)]),
        (PREFILLING, COMPLETES, Phase.DONE,
         [Send(text(7), 1, "length", 64, {}), NotePrefill(1), End(), EndAttempt(1, 1), *RELEASED]),
    ],
    (Phase.PREFILLING, CallFailed): [
        (PREFILLING, CallFailed(1, KV_GONE, 3.0), Phase.ROUTING,
         [NoteLoss(1, Loss.KV_GONE, KV_GONE), *RELEASED, EndAttempt(1), *AGAIN]),
        (PREFILLING, CallFailed(1, CRASHED, 3.0), Phase.ROUTING,
         [NoteLoss(1, Loss.WORKER_FAILED, CRASHED), *RELEASED, NoteFailed(P), EndAttempt(1),
          avoiding(P)]),
        (LAST_PREFILL, CallFailed(1, STRANGE, 3.0), Phase.ROUTING,
         [NoteLoss(1, Loss.WORKER_REFUSED, STRANGE), *RELEASED, NoteUnreached(P, STRANGE),
          EndAttempt(1), avoiding(P)]),
        (LAST_PREFILL, CallFailed(1, CRASHED, 3.0), Phase.DONE,
         [NoteLoss(1, Loss.WORKER_FAILED, CRASHED), *RELEASED, NoteFailed(P), EndAttempt(1), End]),
        (PREFILLING, CallFailed(1, BROKE, 3.0), Phase.DONE,
         [End(BROKE), *RELEASED, EndAttempt(1)]),
    ],
    (Phase.PREFILLING, Failed): [
        (PREFILLING, Failed(BROKE), Phase.STOPPING, [StopWorkers(1, UNWANTED)])
    ],
    (Phase.PREFILLING, Unwanted): [
        (PREFILLING, Unwanted(LEFT), Phase.STOPPING, [StopWorkers(1, UNWANTED)])
    ],
    (Phase.PREFILLING, WorkerLost): [
        (PREFILLING, WorkerLost(P, 2.0, 3.0), Phase.ROUTING,
         [NoteLoss, CancelCall(1), *LEAVING, avoiding(P)]),
        (PREFILLING, WorkerLost(D, 2.0, 3.0), Phase.PREFILLING, []),
        (LAST_PREFILL, WorkerLost(P, 2.0, 3.0), Phase.DONE,
         [NoteLoss, CancelCall(1), *LEAVING, End]),
    ],
    (Phase.PREFILLING, WorkerSilent): [
        (PREFILLING, WorkerSilent(P, 40.0), Phase.ROUTING,
         [NoteLoss, AbandonCall(1, P), *LEAVING, avoiding(P), NoteFailed(P)]),
        (PREFILLING, WorkerSilent(D, 40.0), Phase.PREFILLING, []),
        (PREFILLING, WorkerSilent(P, 700.0), Phase.DONE,
         [NoteLoss, AbandonCall(1, P), *LEAVING, End, NoteFailed(P)]),
    ],
    (Phase.DECODING, TokensArrived): [
        (DECODING, came(0, 8), Phase.DECODING, [Send(text(8), 1, "", 64, {})]),
        (after(DECODING, came(0, 8)), came(1, 9, gap_s=1.0), Phase.DECODING, []),
        (DECODING, came(1, 9), Phase.ROUTING,
         [NoteLoss, AbandonCall(1, D), StopWorkers(1, RETRIED), NoteFailed(D), EndAttempt(1),
          *AGAIN]),
        (SPENT, came(1, 9), Phase.DONE,
         [NoteLoss, AbandonCall(1, D), StopWorkers(1, RETRIED), NoteFailed(D), EndAttempt(1),
          End]),
    ],
    (Phase.DECODING, TimePassed): [
        (after(DECODING, came(0, 8), came(1, 9, gap_s=1.0)), TimePassed(5.0), Phase.DECODING,
         [Send(text(9), 1, "", 64, {})]),
        (after(DECODING, came(0, 8), came(1, 9, gap_s=1.0)), TimePassed(4.9), Phase.DECODING, []),
    ],
    (Phase.DECODING, DecodeReplied): [
        (after(DECODING, came(0, 8)), replied(9, before=1, decode_load_s=0.5), Phase.DONE,
         [Send(text(9), 1, "length", 64, {"decode_load_s": 0.5}), End(), EndAttempt(1, 3)]),
        (DECODING, replied(9, before=1), Phase.ENDING, []),
    ],
    (Phase.DECODING, CallFailed): [
        (DECODING, CallFailed(1, REFUSED, 4.0), Phase.DONE,
         [End(REFUSED), NoteRefused(D, 0.5), *RELEASED, EndAttempt(1)]),
        (DECODING, CallFailed(1, GONE, 4.0), Phase.ROUTING,
         [NoteLoss(1, Loss.WORKER_GONE, GONE), *RELEASED, NoteFailed(D), EndAttempt(1),
          avoiding(D)]),
    ],
    (Phase.DECODING, Failed): [
        (DECODING, Failed(BROKE), Phase.STOPPING, [StopWorkers(1, UNWANTED)])
    ],
    (Phase.DECODING, Unwanted): [
        (DECODING, Unwanted(LEFT), Phase.STOPPING, [StopWorkers(1, UNWANTED)])
    ],
    (Phase.DECODING, WorkerLost): [
        (DECODING, WorkerLost(D, 4.0, 5.0), Phase.ROUTING,
         [NoteLoss, CancelCall(1), *LEAVING, avoiding(D)]),
        (DECODING, WorkerLost(P, 4.0, 5.0), Phase.DECODING, []),
        (LAST_DECODE, WorkerLost(D, 4.0, 5.0), Phase.DONE,
         [NoteLoss, CancelCall(1), *LEAVING, End]),
    ],
    (Phase.DECODING, WorkerSilent): [
        (DECODING, WorkerSilent(D, 40.0), Phase.ROUTING,
         [NoteLoss, AbandonCall(1, D), *LEAVING, avoiding(D), NoteFailed(D)]),
        (DECODING, WorkerSilent(P, 40.0), Phase.DECODING, []),
        (SPENT, WorkerSilent(D, 40.0), Phase.DONE,
         [NoteLoss, AbandonCall(1, D), *LEAVING, End, NoteFailed(D)]),
    ],
    (Phase.ENDING, TokensArrived): [
        (ENDING, came(0, 8), Phase.DONE,
         [Send(text(8, 9), 2, "length", 64, {}), End(), EndAttempt(1, 3)]),
        (after(DECODING, replied(9, before=2)), came(0, 8), Phase.ENDING, []),
        (after(DECODING, replied(9, before=2)), came(1, 8), Phase.ROUTING,
         [NoteLoss, *RELEASED, NoteFailed(D), EndAttempt(1), *AGAIN]),
    ],
    (Phase.ENDING, TimePassed): [
        (ENDING, TimePassed(5.0 + MESSAGES_S_MAX), Phase.ENDING, []),
        (ENDING, TimePassed(5.1 + MESSAGES_S_MAX), Phase.ROUTING,
         [NoteLoss, *RELEASED, NoteFailed(D), EndAttempt(1), *AGAIN]),
        (SPENT_ENDING, TimePassed(5.1 + MESSAGES_S_MAX), Phase.DONE,
         [NoteLoss, *RELEASED, NoteFailed(D), EndAttempt(1), End]),
    ],
    (Phase.ENDING, Failed): [
        (ENDING, Failed(BROKE), Phase.DONE, [End(BROKE), EndAttempt(1), *RELEASED])
    ],
    (Phase.ENDING, Unwanted): [
        (ENDING, Unwanted(LEFT), Phase.DONE, [End(LEFT), EndAttempt(1), *RELEASED])
    ],
    (Phase.ENDING, WorkerLost): [
        (ENDING, WorkerLost(D, 4.0, 5.0), Phase.ROUTING,
         [NoteLoss, *RELEASED, EndAttempt(1), avoiding(D)]),
        (ENDING, WorkerLost(P, 4.0, 5.0), Phase.ENDING, []),
        (LAST_ENDING, WorkerLost(D, 4.0, 5.0), Phase.DONE,
         [NoteLoss, *RELEASED, EndAttempt(1), End]),
    ],
    (Phase.ENDING, WorkerSilent): [
        (ENDING, WorkerSilent(D, 40.0), Phase.ROUTING,
         [NoteLoss, *RELEASED, EndAttempt(1), avoiding(D), NoteFailed(D)]),
        (ENDING, WorkerSilent(P, 40.0), Phase.ENDING, []),
        (SPENT_ENDING, WorkerSilent(D, 40.0), Phase.DONE,
         [NoteLoss, *RELEASED, EndAttempt(1), End, NoteFailed(D)]),
    ],
    (Phase.STOPPING, PrefillReplied): [
        (STOPPING_PREFILL, PREFILLED, Phase.DONE, [End(LEFT), EndAttempt(1), *RELEASED])
    ],
    (Phase.STOPPING, DecodeReplied): [
        (STOPPING, replied(9), Phase.DONE, [End(LEFT), EndAttempt(1), *RELEASED])
    ],
    (Phase.STOPPING, CallFailed): [
        (STOPPING, CallFailed(1, LEFT, 5.0), Phase.DONE, [End(LEFT), EndAttempt(1), *RELEASED])
    ],
    (Phase.STOPPING, WorkerLost): [
        (STOPPING, WorkerLost(D, 4.0, 5.0), Phase.DONE, [End(LEFT), CancelCall(1), *LEAVING]),
        (STOPPING, WorkerLost(P, 4.0, 5.0), Phase.STOPPING, []),
    ],
    (Phase.STOPPING, WorkerSilent): [
        (STOPPING, WorkerSilent(D, 40.0), Phase.DONE,
         [End(LEFT), AbandonCall(1, D), *LEAVING, NoteFailed(D)]),
        (STOPPING, WorkerSilent(P, 40.0), Phase.STOPPING, []),
    ],
    (Phase.STOPPING, TimePassed): [
        (STOPPING, TimePassed(9.0), Phase.STOPPING, [StopWorkers(1, UNWANTED)])
    ],
    (Phase.DONE, Routed): [
        (after(ROUTING, Unwanted(LEFT)), ROUTED, Phase.DONE, [EndAttempt(1)])
    ],
    (Phase.DONE, PrefillReplied): [(DONE, PREFILLED, Phase.DONE, RELEASED)],
    (Phase.DONE, DecodeReplied): [(DONE, replied(9), Phase.DONE, RELEASED)],
    (Phase.DONE, CallFailed): [(DONE, CallFailed(1, GONE, 9.0), Phase.DONE, RELEASED)],
}  # fmt: skip
STATES = {
    Phase.READING: READING, Phase.ROUTING: ROUTING, Phase.PREFILLING: PREFILLING,
    Phase.DECODING: DECODING, Phase.ENDING: ENDING, Phase.STOPPING: STOPPING, Phase.DONE: DONE,
}  # fmt: skip
SAMPLES: list[LifecycleEvent] = [
    UNDERSTOOD, Described(), Failed(BROKE), Unwanted(LEFT), ROUTED, NotRouted(1, REFUSED, 2.0),
    PauseOver(3.0), FIRST, PREFILLED, came(0, 8), replied(9), CallFailed(1, GONE, 4.0),
    WorkerLost(D, 1.0, 2.0), WorkerSilent(D, 2.0), TimePassed(9.0),
]  # fmt: skip
CELLS = [
    pytest.param(phase, event, id=f"{phase.value}-{type(event).__name__}")
    for phase in Phase
    for event in SAMPLES
]


def matches(action: LifecycleAction, expected: Any) -> bool:
    if isinstance(expected, type):
        return isinstance(action, expected)
    return type(action) is type(expected) and action == expected


@pytest.mark.parametrize(("phase", "sample"), CELLS)
def test_a_cell_of_the_table_does_what_its_cases_say(phase: Phase, sample: LifecycleEvent) -> None:
    cell = TABLE.get((phase, type(sample)))
    cases = CASES.get((phase, type(sample)), [])
    if cell is None:
        assert not cases
        with pytest.raises(AssertionError, match=f"cannot come while {phase.value}"):
            step(STATES[phase], sample)
    elif not cases:  # then it is one that ignores what comes
        assert step(STATES[phase], sample) == (STATES[phase], []), "no case says what it does"
        assert cell.to == {phase}
    else:
        assert {case[2] for case in cases} == cell.to, "a case for each phase that may follow"
    for state, event, phase_after, expected in cases:
        assert state.phase is phase and type(event) is type(sample)
        found, actions = step(state, event)
        assert found.phase is phase_after
        assert len(actions) == len(expected), actions
        for action, wanted in zip(actions, expected, strict=True):
            assert matches(action, wanted), (action, wanted)


def test_the_table_knows_every_event_and_the_cases_know_every_cell() -> None:
    kinds = {type(event) for event in SAMPLES}
    assert {kind for _, kind in TABLE} == kinds and len(kinds) == len(SAMPLES)
    assert set(CASES) <= set(TABLE)


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.DECODING, Phase.ROUTING, Phase.DONE])
@pytest.mark.parametrize(
    "event", [PREFILLED, replied(9), CallFailed(1, GONE, 9.0), FIRST, came(0, 8)]
)
def test_whatever_an_older_attempt_says_changes_nothing_and_its_kv_is_released_at_its_end(
    phase: Phase, event: LifecycleEvent
) -> None:
    state = STATES[phase]
    state = state._replace(attempt=state.attempt._replace(number=2))
    found, actions = step(state, event)
    is_end = isinstance(event, PrefillReplied | DecodeReplied | CallFailed)
    assert found == state and actions == (RELEASED if is_end else [])
    assert [type(action) for action in actions] == ([StopWorkers, ReleaseKv] if is_end else [])


def sends(*events: LifecycleEvent, is_paced: bool = False) -> tuple[State, list[Send]]:
    """From a fresh request; what the client is sent."""
    state, sent = READING, list[Send]()
    for event in (Understood(Attempts(3, 0.0, 600.0), is_paced, 1.0), ROUTED, *events):
        state, actions = step(state, event)
        sent += [action for action in actions if isinstance(action, Send)]
    return state, sent


def ids(sent: list[Send]) -> list[int]:
    return [token for message in sent for token in message.delta.token_ids]


@pytest.mark.parametrize("is_paced", [True, False])
def test_in_every_order_of_messages_and_replies_each_token_comes_once_and_in_order(
    is_paced: bool,
) -> None:
    """Messages of one kind keep their order; a message may overtake a reply, or come behind it."""
    happens: list[LifecycleEvent] = [
        FIRST,
        PREFILLED,
        came(0, 8),
        came(1, 9, gap_s=3.0),
        replied(10, before=2),
    ]
    tried = 0
    for order in itertools.permutations(range(5)):
        at = [order.index(number) for number in range(5)]
        # Decode is called behind the prefill reply, and its messages keep their order.
        if not at[1] < at[2] < at[3] or not at[1] < at[4]:
            continue
        tried += 1
        state, sent = sends(*(happens[number] for number in order), is_paced=is_paced)
        assert state.phase is Phase.DONE and ids(sent) == [7, 8, 9, 10]
        assert [message.finish_reason for message in sent][-1] == "length"
        fields: dict[str, object] = {}
        for message in sent:
            assert not fields.keys() & message.fields.keys(), "a field is sent once"
            fields |= message.fields
        assert fields["prefill"] == "prefill_0" and "ttft_s" in fields
    assert tried == 15


def test_a_first_message_that_never_comes_costs_nothing() -> None:
    _, sent = sends(PREFILLED, came(0, 8), replied(9, before=1))
    assert ids(sent) == [7, 8, 9]


def test_a_first_token_that_may_begin_a_stop_word_is_held_and_comes_with_the_next() -> None:
    held = FirstText(OutputDelta((), ""), "", 64)
    state, sent = sends(
        FirstTokenArrived(1, held, 2.5),
        PrefillReplied(1, held, 0.5, {"prefill": "p"}, 3.0),
        came(0, 7, 8),
        replied(9, before=2),
    )
    assert ids(sent) == [7, 8, 9] and sent[0].fields["prefill"] == "p"
    assert state.phase is Phase.DONE


def test_tokens_that_come_within_the_gap_share_a_message_and_none_waits_longer() -> None:
    state = DECODING
    sent: list[tuple[int, ...]] = []
    for number in range(20):  # a token every 30 ms
        state, actions = step(state, came(number, number, now_s=number * 0.03, gap_s=0.1))
        sent += [tuple(a.delta.token_ids) for a in actions if isinstance(a, Send)]
    assert sent[0] == (0,), "the first one does not wait"
    assert {len(ids) for ids in sent[1:]} == {4}
    assert due_s(state) == pytest.approx(16 * 0.03 + 0.1)
    state, actions = step(state, TimePassed(16 * 0.03 + 0.1))
    sent += [tuple(a.delta.token_ids) for a in actions if isinstance(a, Send)]
    assert due_s(state) is None and [token for ids in sent for token in ids] == list(range(20))


def test_a_stream_whose_client_chose_an_interval_is_not_paced() -> None:
    news = [came(number, number, now_s=number * 0.001, gap_s=0.1) for number in range(3)]
    _, sent = sends(PREFILLED, *news)
    assert ids(sent[1:]) == [0, 1, 2] and len(sent) == 4


def test_what_waits_when_the_reply_comes_is_sent_with_the_end() -> None:
    news = [came(number, number, gap_s=9.0) for number in range(3)]
    state, sent = sends(PREFILLED, *news, replied(3, before=3), is_paced=True)
    assert [tuple(message.delta.token_ids) for message in sent] == [(7,), (0,), (1, 2, 3)]
    assert state.phase is Phase.DONE


def test_nothing_behind_a_lost_message_is_sent_and_the_next_attempt_goes_on_before_it() -> None:
    state, sent = sends(PREFILLED, came(0, 8), came(2, 10), came(3, 11))
    assert ids(sent) == [7, 8] and state.attempt.number == 2 and state.sent_tokens == 2


def test_a_request_taken_from_a_dead_worker_goes_on_from_the_tokens_that_were_sent() -> None:
    state, sent = sends(
        PREFILLED,
        came(0, 8),
        WorkerLost(D, 4.0, 5.0),
        Routed(2, P, D, 6.0),
        came(1, 9),
        PrefillReplied(2, first(9), 0.5, {}, 7.0),
        CallFailed(1, CRASHED, 8.0),
        replied(10, attempt=2),
    )
    assert ids(sent) == [7, 8, 9, 10] and state.phase is Phase.DONE


def test_a_decode_worker_that_was_lost_during_prefill_is_not_called_and_the_token_is_kept() -> None:
    state, actions = step(PREFILLING, WorkerLost(D, 1.0, 2.7))
    assert state.phase is Phase.PREFILLING and not actions, "its prompt is computed all the same"
    state, actions = step(state, PREFILLED)
    assert [type(action) for action in actions] == [
        Send,
        NotePrefill,
        NoteLoss,
        StopWorkers,
        ReleaseKv,
        EndAttempt,
        Decide,
    ]
    assert state.phase is Phase.ROUTING and state.sent_tokens == 1
    assert actions[2].loss is Loss.WORKER_GONE and actions[-1] == Decide(2, frozenset({D}), True)
    ended, actions = step(after(PREFILLING, WorkerLost(D, 1.0, 2.7)), COMPLETES)
    assert ended.phase is Phase.DONE and actions.count(End()) == 1, "nothing was left to decode"


def test_the_worker_that_tokens_come_from_is_the_one_that_may_be_lost() -> None:
    """Another process than the routed one serves while a config.pbtxt reloads."""
    news = TokensArrived(1, "newer", [(0, text(8))], 4.0, 0.0)
    state = after(DECODING, news, WorkerLost(D, 4.0, 5.0))
    assert state.phase is Phase.DECODING
    assert after(state, WorkerLost(("decode_0", "newer"), 4.0, 5.0)).phase is Phase.ROUTING


@pytest.mark.parametrize(
    ("error", "is_final"),
    [(InvalidRequest("no such worker"), True), (GONE, False), (KV_GONE, False)],
)
def test_a_request_that_is_not_routed_ends_where_its_error_is_the_answer(
    error: ServingError, is_final: bool
) -> None:
    assert (after(ROUTING, NotRouted(1, error, 2.0)).phase is Phase.DONE) == is_final


def test_who_was_lost_is_avoided_until_nobody_else_is_there() -> None:
    state = after(PREFILLING, CallFailed(1, CRASHED, 3.0))
    assert state.avoided == {P}
    assert after(state, NotRouted(2, REFUSED, 3.0)).avoided == frozenset()
