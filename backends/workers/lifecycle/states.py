"""State of a job, and the cells that both roles share: how it begins to be computed, how it leaves.

    queued       waits for pages
    loading      a loader reads its KV from the store
    blocked      prefill: another prompt produces the next block that it lacks
    compiling    a thread compiles its grammar
    starting     the driver prepares the engine
    computing    takes part in steps
    resetting    prefill: a layer of its prefix is missing; between two steps it starts again
    storing      prefill: computed; the writer stores its last blocks
    handed       prefill: as storing, but the reply does not wait for the store
    answered     prefill: replied; its KV still goes to the store
    saving       decode: preempted; the writer stores its KV
    leaving      stopped or failed; waits for its thread, and then for the end of the step
    quitting     out of the batch; the engine may still copy its KV
    flushing     the engine has left it; the writer may still write its KV
    over         nothing is held for it any more

Every thread that works for a job ends with an event, and so does every copy. A job leaves in this
order: the thread, the step, the engine's copies, the writer. Then its pages, slots and leases are
released, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from backends.workers.lifecycle import events as e
from backends.workers.lifecycle.events import Do


class Phase(str, Enum):
    """Derived from str, which caches its hash, because each event costs a lookup in a table."""

    QUEUED = "queued"
    LOADING = "loading"
    BLOCKED = "blocked"
    COMPILING = "compiling"
    STARTING = "starting"
    COMPUTING = "computing"
    RESETTING = "resetting"
    STORING = "storing"
    HANDED = "handed"
    ANSWERED = "answered"
    SAVING = "saving"
    LEAVING = "leaving"
    QUITTING = "quitting"
    FLUSHING = "flushing"
    OVER = "over"


class State(NamedTuple):
    phase: Phase = Phase.QUEUED
    is_busy: bool = False  # True: a thread works for the job, and ends with an event
    needs_grammar: bool = False  # True until the grammar is compiled
    keeps_leases: bool = False  # True: after a good reply, the decode worker has the leases
    error: Exception | None = None  # the first error; None: stopped, or no error
    is_told: bool = False  # True: the call has ended, or its end is under way
    is_certain: bool = True  # False: the engine may still copy KV, so pages and slots stay
    awaited: int = 0  # number of AWAIT_WRITES without their Written
    token_id: int | None = None  # prefill: the first token of the output
    is_given: bool = True  # decode: leases of handed-over or saved blocks are held
    sent_tokens: int = 0  # decode: tokens sent so far

    @property
    def is_leaving(self) -> bool:
        """True if no more work is done for the job."""
        return self.phase in ENDING

    @property
    def has_left(self) -> bool:
        """True if the job is in none of the worker's tables."""
        return self.phase in LEFT


Result = tuple[State, list[Do]]
Table = Mapping[tuple[Phase, type], Callable[[State, Any], Result]]
LEFT = frozenset({Phase.QUITTING, Phase.FLUSHING, Phase.OVER})
ENDING = LEFT | {Phase.LEAVING}


def step_of(table: Table, state: State, event: Any) -> Result:
    """The next state, and the actions in order. Raises AssertionError if there is no cell."""
    cell = table.get((state.phase, type(event)))
    assert cell is not None, f"{type(event).__name__} cannot come while {state.phase.value}"
    return cell(state, event)


def cells(
    phases: Iterable[Phase], kind: type, cell: Callable[[State, Any], Result]
) -> dict[tuple[Phase, type], Callable[[State, Any], Result]]:
    return {(phase, kind): cell for phase in phases}


def ignored(state: State, event: Any) -> Result:
    return state, []


# --- until it is computed


def admitted(state: State, event: e.Admitted) -> Result:
    return state._replace(phase=Phase.LOADING, is_busy=True), [Do.LOAD]


def loaded(state: State, event: e.Loaded) -> Result:
    if state.needs_grammar:
        return state._replace(phase=Phase.COMPILING), [Do.COMPILE]
    return state._replace(phase=Phase.STARTING), [Do.START]


def guided(state: State, event: e.Guided) -> Result:
    return state._replace(phase=Phase.STARTING, needs_grammar=False), [Do.START]


def ready(state: State, event: e.Ready) -> Result:
    return state._replace(phase=Phase.COMPUTING, is_busy=False), [Do.JOIN]


# --- leaving


def stopped(state: State, event: e.Stopped) -> Result:
    return state._replace(phase=Phase.LEAVING), [Do.ASK_TURN]


def failed(state: State, event: e.Failed | e.LoadFailed | e.SaveFailed) -> Result:
    return state._replace(phase=Phase.LEAVING, error=event.error), [Do.ASK_TURN]


def thread_failed(state: State, event: e.LoadFailed | e.SaveFailed) -> Result:
    return failed(state._replace(is_busy=False), event)


def thread_over(state: State, event: Any) -> Result:
    """The thread of a leaving job has ended."""
    return state._replace(is_busy=False), [Do.ASK_TURN]


def between_steps(state: State, event: e.BetweenSteps) -> Result:
    if state.is_busy:
        return state, []  # `thread_over` asks again
    if event.is_reading:
        return state, [Do.ASK_TURN]
    return state._replace(phase=Phase.QUITTING), [Do.REMOVE, Do.STOP_ENGINE]


def engine_left(state: State, event: e.EngineLeft) -> Result:
    state = state._replace(
        phase=Phase.FLUSHING, is_certain=event.is_certain, awaited=state.awaited + 1
    )
    return state, [Do.AWAIT_WRITES]


def flushed(state: State, event: e.Written) -> Result:
    state = state._replace(awaited=state.awaited - 1)
    if state.awaited:
        return state, []
    actions = [Do.RELEASE_PAGES] if state.is_certain else []
    if not (state.is_told and state.keeps_leases):
        actions.append(Do.RELEASE_LEASES)
    if not state.is_told:
        actions.append(Do.FAIL)
    return state._replace(phase=Phase.OVER, is_told=True), actions


def call_late(state: State, event: e.CallLate) -> Result:
    if state.is_told:
        return state, []
    return state._replace(is_told=True, keeps_leases=False), [Do.FAIL]


LEAVING_CELLS: Table = {
    (Phase.LEAVING, e.BetweenSteps): between_steps,
    (Phase.LEAVING, e.Loaded): thread_over,
    (Phase.LEAVING, e.LoadFailed): thread_over,
    (Phase.LEAVING, e.Guided): thread_over,
    (Phase.LEAVING, e.Ready): thread_over,
    (Phase.QUITTING, e.EngineLeft): engine_left,
    (Phase.FLUSHING, e.Written): flushed,
    **cells(LEFT, e.CallLate, call_late),
    **cells(ENDING, e.Stopped, ignored),
    **cells(ENDING, e.Failed, ignored),
}
STARTING_CELLS: Table = {
    (Phase.QUEUED, e.Admitted): admitted,
    (Phase.COMPILING, e.Guided): guided,
    (Phase.STARTING, e.Ready): ready,
}
