"""A job's state, and the cells that both roles share: how a job gets into a step, how it leaves.

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


class JobPhase(str, Enum):
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


class JobState(NamedTuple):
    phase: JobPhase = JobPhase.QUEUED
    is_busy: bool = False  # True: a thread works for the job, and ends with an event
    needs_grammar: bool = False  # True until the grammar is compiled
    keeps_leases: bool = False  # True: after a good reply, the decode worker has the leases
    error: Exception | None = None  # the first error; None: stopped, or no error
    is_call_over: bool = False  # True: the call has ended, or its end is under way
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


Result = tuple[JobState, list[Do]]
Table = Mapping[tuple[JobPhase, type], Callable[[JobState, Any], Result]]
LEFT = frozenset({JobPhase.QUITTING, JobPhase.FLUSHING, JobPhase.OVER})
ENDING = LEFT | {JobPhase.LEAVING}


def step_of(table: Table, state: JobState, event: Any) -> Result:
    """The next state, and the actions in order. Raises AssertionError if there is no cell."""
    cell = table.get((state.phase, type(event)))
    assert cell is not None, f"{type(event).__name__} cannot come while {state.phase.value}"
    return cell(state, event)


def cells(
    phases: Iterable[JobPhase], kind: type, cell: Callable[[JobState, Any], Result]
) -> dict[tuple[JobPhase, type], Callable[[JobState, Any], Result]]:
    return {(phase, kind): cell for phase in phases}


def ignored(state: JobState, event: Any) -> Result:
    return state, []


# --- until it is computed


def admitted(state: JobState, event: e.PagesGiven) -> Result:
    return state._replace(phase=JobPhase.LOADING, is_busy=True), [Do.LOAD]


def loaded(state: JobState, event: e.KvLoaded) -> Result:
    if state.needs_grammar:
        return state._replace(phase=JobPhase.COMPILING), [Do.COMPILE]
    return state._replace(phase=JobPhase.STARTING), [Do.START]


def guided(state: JobState, event: e.GrammarReady) -> Result:
    return state._replace(phase=JobPhase.STARTING, needs_grammar=False), [Do.START]


def ready(state: JobState, event: e.EngineReady) -> Result:
    return state._replace(phase=JobPhase.COMPUTING, is_busy=False), [Do.JOIN]


# --- leaving


def stopped(state: JobState, event: e.JobStopped) -> Result:
    return state._replace(phase=JobPhase.LEAVING), [Do.ASK_TURN]


def failed(state: JobState, event: e.JobFailed | e.LoadFailed | e.SaveFailed) -> Result:
    return state._replace(phase=JobPhase.LEAVING, error=event.error), [Do.ASK_TURN]


def thread_failed(state: JobState, event: e.LoadFailed | e.SaveFailed) -> Result:
    return failed(state._replace(is_busy=False), event)


def thread_over(state: JobState, event: Any) -> Result:
    """The thread of a leaving job has ended."""
    return state._replace(is_busy=False), [Do.ASK_TURN]


def between_steps(state: JobState, event: e.BetweenSteps) -> Result:
    if state.is_busy:
        return state, []  # `thread_over` asks again
    if event.is_reading:
        return state, [Do.ASK_TURN]
    return state._replace(phase=JobPhase.QUITTING), [Do.REMOVE, Do.STOP_ENGINE]


def engine_left(state: JobState, event: e.EngineLeft) -> Result:
    state = state._replace(
        phase=JobPhase.FLUSHING, is_certain=event.is_certain, awaited=state.awaited + 1
    )
    return state, [Do.AWAIT_WRITES]


def flushed(state: JobState, event: e.Written) -> Result:
    state = state._replace(awaited=state.awaited - 1)
    if state.awaited:
        return state, []
    actions = [Do.RELEASE_PAGES] if state.is_certain else []
    if not (state.is_call_over and state.keeps_leases):
        actions.append(Do.RELEASE_LEASES)
    if not state.is_call_over:
        actions.append(Do.FAIL)
    return state._replace(phase=JobPhase.OVER, is_call_over=True), actions


def call_late(state: JobState, event: e.CallLate) -> Result:
    if state.is_call_over:
        return state, []
    return state._replace(is_call_over=True, keeps_leases=False), [Do.FAIL]


LEAVING_CELLS: Table = {
    (JobPhase.LEAVING, e.BetweenSteps): between_steps,
    (JobPhase.LEAVING, e.KvLoaded): thread_over,
    (JobPhase.LEAVING, e.LoadFailed): thread_over,
    (JobPhase.LEAVING, e.GrammarReady): thread_over,
    (JobPhase.LEAVING, e.EngineReady): thread_over,
    (JobPhase.QUITTING, e.EngineLeft): engine_left,
    (JobPhase.FLUSHING, e.Written): flushed,
    **cells(LEFT, e.CallLate, call_late),
    **cells(ENDING, e.JobStopped, ignored),
    **cells(ENDING, e.JobFailed, ignored),
}
STARTING_CELLS: Table = {
    (JobPhase.QUEUED, e.PagesGiven): admitted,
    (JobPhase.COMPILING, e.GrammarReady): guided,
    (JobPhase.STARTING, e.EngineReady): ready,
}
