"""A job's state, and the cells that both roles share: how a job gets into a step, how it leaves.

Every thread that works for a job ends with an event, and so does every copy. A job leaves in this
order: the thread, the step, the engine's copies, the writer. Then its pages, slots and leases are
released, once. If the engine cannot say that its copies have ended, pages and slots are not reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from backends.workers.lifecycle.events import Do, On


class JobPhase(str, Enum):
    QUEUED = "waits for pages"
    LOADING = "a loader reads its KV from the store"
    BLOCKED = "prefill: another prompt produces the next block that it lacks"
    COMPILING = "a thread compiles its grammar"
    STARTING = "the driver prepares the engine"
    COMPUTING = "takes part in steps"
    RESETTING = "prefill: a layer of its prefix is missing; between two steps it starts again"
    STORING = "prefill: computed; the writer stores its last blocks"
    HANDED = "prefill: as STORING, but the reply does not wait for the store"
    ANSWERED = "prefill: replied; its KV still goes to the store"
    SAVING = "decode: preempted; the writer stores its KV"
    LEAVING = "stopped or failed; waits for its thread, and then for the end of the step"
    QUITTING = "in none of the worker's tables; the engine may still copy its KV"
    FLUSHING = "the engine has left it; the writer may still write its KV"
    OVER = "nothing is held for it any more"


AT_WORK = {JobPhase.LOADING, JobPhase.COMPILING, JobPhase.STARTING}  # a thread works for the job
LEFT = {JobPhase.QUITTING, JobPhase.FLUSHING, JobPhase.OVER}
ENDING = LEFT | {JobPhase.LEAVING}


class JobState(NamedTuple):
    phase: JobPhase = JobPhase.QUEUED
    is_busy: bool = False  # True: a thread works for the job, and ends with an event
    needs_grammar: bool = False  # True until the grammar is compiled
    keeps_leases: bool = False  # True: after a good reply, the decode worker has the leases
    error: Exception | None = None  # the first error; None: stopped, or no error
    is_call_over: bool = False  # True: the call has ended, or its end is under way
    is_certain: bool = True  # False: the engine may still copy KV, so pages and slots stay
    awaited: int = 0  # number of AWAIT_WRITES without their WRITTEN
    token_id: int | None = None  # prefill: the first token of the output
    is_given: bool = True  # decode: leases of handed-over or saved blocks are held
    sent_tokens: int = 0  # decode: tokens sent so far


Result = tuple[JobState, list[Do]]
Cell = Callable[[JobState, Any], Result]  # the second argument: the value of the event
Table = Mapping[tuple[JobPhase, On], Cell]


def step_of(table: Table, state: JobState, event: On, value: Any) -> Result:
    """The next state, and the actions in order. Raises AssertionError if there is no cell."""
    cell = table.get((state.phase, event))
    assert cell is not None, f"{event.name} cannot come while {state.phase.name}"
    return cell(state, value)


def cells(phases: Iterable[JobPhase], events: Iterable[On], cell: Cell) -> Table:
    return {(phase, event): cell for phase in phases for event in events}


def ignored(state: JobState, value: Any) -> Result:
    return state, []


def before(action: Do, cell: Cell) -> Cell:
    """`cell`, with this action before its own."""

    def both(state: JobState, value: Any) -> Result:
        state, actions = cell(state, value)
        return state, [action, *actions]

    return both


# --- until it is computed


def loads(state: JobState, value: None) -> Result:
    return state._replace(phase=JobPhase.LOADING, is_busy=True), [Do.LOAD]


def loaded(state: JobState, value: None) -> Result:
    if state.needs_grammar:
        return state._replace(phase=JobPhase.COMPILING), [Do.COMPILE]
    return state._replace(phase=JobPhase.STARTING), [Do.START]


def grammar_ready(state: JobState, value: None) -> Result:
    return loaded(state._replace(needs_grammar=False), value)


def engine_ready(state: JobState, value: None) -> Result:
    return state._replace(phase=JobPhase.COMPUTING, is_busy=False), [Do.JOIN]


# --- leaving


def leaves(state: JobState, error: Exception | None) -> Result:
    return state._replace(phase=JobPhase.LEAVING, error=error), [Do.ASK_TURN]


def thread_failed(state: JobState, error: Exception) -> Result:
    return leaves(state._replace(is_busy=False), error)


def thread_over(state: JobState, value: Any) -> Result:
    """The thread of a leaving job has ended."""
    return state._replace(is_busy=False), [Do.ASK_TURN]


def between_steps(state: JobState, is_reading: bool) -> Result:
    """`is_reading`: the loader reads an announced layer into the pages of a decode job."""
    if state.is_busy:
        return state, []  # `thread_over` asks again
    if is_reading:
        return state, [Do.ASK_TURN]
    return state._replace(phase=JobPhase.QUITTING), [Do.REMOVE, Do.STOP_ENGINE]


def awaiting(state: JobState, value: Any, phase: JobPhase) -> Result:
    return state._replace(phase=phase, awaited=state.awaited + 1), [Do.AWAIT_WRITES]


def engine_left(state: JobState, is_certain: bool) -> Result:
    return awaiting(state._replace(is_certain=is_certain), None, JobPhase.FLUSHING)


def written(state: JobState, value: None) -> Result:
    return state._replace(awaited=state.awaited - 1), []


def flushed(state: JobState, value: None) -> Result:
    state, actions = written(state, value)
    if state.awaited:
        return state, actions
    actions = [Do.RELEASE_PAGES if state.is_certain else Do.PARK_PAGES]
    if not (state.is_call_over and state.keeps_leases):
        actions.append(Do.RELEASE_LEASES if state.is_certain else Do.KEEP_LEASES)
    if not state.is_call_over:
        actions.append(Do.FAIL)
    return state._replace(phase=JobPhase.OVER, is_call_over=True), actions


def call_late(state: JobState, value: None) -> Result:
    if state.is_call_over:
        return state, []
    return state._replace(is_call_over=True, keeps_leases=False), [Do.FAIL]


COMMON: Table = {
    (JobPhase.QUEUED, On.PAGES_GIVEN): loads,
    (JobPhase.LOADING, On.LOADED): loaded,
    (JobPhase.COMPILING, On.GRAMMAR_READY): grammar_ready,
    (JobPhase.STARTING, On.ENGINE_READY): engine_ready,
    (JobPhase.LEAVING, On.BETWEEN_STEPS): between_steps,
    **cells(
        {JobPhase.LEAVING},
        {On.LOADED, On.LOAD_FAILED, On.GRAMMAR_READY, On.ENGINE_READY},
        thread_over,
    ),
    (JobPhase.QUITTING, On.ENGINE_LEFT): engine_left,
    (JobPhase.FLUSHING, On.WRITTEN): flushed,
    **cells(ENDING, {On.CALL_LATE}, call_late),
    **cells(ENDING, {On.STOPPED, On.FAILED}, ignored),
    **cells(LEFT, {On.LOAD_FAILED}, ignored),  # the engine refused a job that was ready
}
