"""The life of a prefill job: a table of phases and events (states.py describes the phases).

    queued → loading → [blocked → loading] → [compiling] → starting → computing → storing → quitting

The reply follows the last write. An engine that hands KV over by itself does not wait for the
store: computing → handed → answered → storing.
"""

from __future__ import annotations

from typing import Any

from backends.workers.lifecycle import events as e
from backends.workers.lifecycle import states
from backends.workers.lifecycle.events import Do
from backends.workers.lifecycle.states import (
    ENDING,
    JobPhase,
    JobState,
    Result,
    Table,
    cells,
    ignored,
)

AT_WORK = (JobPhase.LOADING, JobPhase.COMPILING, JobPhase.STARTING)  # a thread works for the job
COMPUTED = (JobPhase.STORING, JobPhase.HANDED, JobPhase.ANSWERED)
ACTIVE = (
    JobPhase.QUEUED,
    JobPhase.BLOCKED,
    *AT_WORK,
    JobPhase.COMPUTING,
    JobPhase.RESETTING,
    *COMPUTED,
)


def step(state: JobState, event: Any) -> Result:
    return states.step_of(TABLE, state, event)


# --- the cached prefix


def _blocked(state: JobState, event: e.Blocked) -> Result:
    return state._replace(phase=JobPhase.BLOCKED, is_busy=False), []


def _layer_due(state: JobState, event: e.LayerDue) -> Result:
    assert not state.is_busy, "a layer of the job is being read already"
    return state._replace(is_busy=True), [Do.READ_LAYER]


def _layer_read(state: JobState, event: e.LayerRead) -> Result:
    state = state._replace(is_busy=False)
    if event.is_here:
        return state, [Do.LAYER_LOADED]
    return state._replace(phase=JobPhase.RESETTING), [Do.ASK_TURN]


def _reset(state: JobState, event: e.BetweenSteps) -> Result:
    actions = [Do.STOP_BATCH, Do.GIVE_UP_SLOTS, Do.AWAIT_WRITES]
    return state._replace(awaited=state.awaited + 1), actions


def _slots_given_up(state: JobState, event: e.Written) -> Result:
    return states.admitted(state._replace(awaited=state.awaited - 1), e.PagesGiven())


# --- the result


def _sampled(state: JobState, event: e.Sampled) -> Result:
    if state.token_id is not None:
        return state, []
    return state._replace(token_id=event.token_id), [Do.SEND_FIRST]


def _answerable(state: JobState, event: e.Answerable) -> Result:
    return state._replace(phase=JobPhase.HANDED, awaited=state.awaited + 1), [Do.AWAIT_WRITES]


def _answer_early(state: JobState, event: e.Written) -> Result:
    state = state._replace(phase=JobPhase.ANSWERED, is_call_over=True, awaited=state.awaited - 1)
    return state, [Do.REPLY]


def _computed(state: JobState, event: e.Computed) -> Result:
    return state._replace(phase=JobPhase.STORING, awaited=state.awaited + 1), [Do.AWAIT_WRITES]


def _stored(state: JobState, event: e.Written) -> Result:
    state = state._replace(awaited=state.awaited - 1)
    if state.awaited:
        return state, []
    actions = [Do.REMOVE]
    if state.keeps_leases:
        actions.append(Do.KEEP_LEASES)
    if not state.is_call_over:
        actions.append(Do.REPLY)
    return state._replace(phase=JobPhase.QUITTING, is_call_over=True), [*actions, Do.STOP_ENGINE]


# --- leaving


def _failed(state: JobState, event: e.JobFailed | e.LoadFailed) -> Result:
    state, actions = states.failed(state, event)
    return state, [Do.END_WRITES, *actions]


def _thread_failed(state: JobState, event: e.LoadFailed) -> Result:
    return _failed(state._replace(is_busy=False), event)


def _written_meanwhile(state: JobState, event: e.Written) -> Result:
    return state._replace(awaited=state.awaited - 1), []


def _flushed(state: JobState, event: e.Written) -> Result:
    state, actions = states.flushed(state, event)
    if state.phase is not JobPhase.OVER:
        return state, actions
    slots = [Do.FREE_SLOTS] if state.is_certain else []
    return state, [Do.SETTLE, *slots, *actions]


TABLE: Table = {
    **states.STARTING_CELLS,
    **states.LEAVING_CELLS,
    (JobPhase.LOADING, e.Blocked): _blocked,
    (JobPhase.LOADING, e.KvLoaded): states.loaded,
    **cells(ACTIVE, e.JobStopped, states.stopped),
    **cells(ACTIVE, e.JobFailed, _failed),
    **cells((*AT_WORK, JobPhase.COMPUTING), e.LoadFailed, _thread_failed),
    (JobPhase.BLOCKED, e.Unblocked): states.admitted,
    (JobPhase.COMPUTING, e.LayerDue): _layer_due,
    (JobPhase.COMPUTING, e.LayerRead): _layer_read,
    (JobPhase.COMPUTING, e.Sampled): _sampled,
    (JobPhase.COMPUTING, e.Answerable): _answerable,
    (JobPhase.COMPUTING, e.Computed): _computed,
    (JobPhase.RESETTING, e.BetweenSteps): _reset,
    (JobPhase.RESETTING, e.Written): _slots_given_up,
    (JobPhase.HANDED, e.Written): _answer_early,
    (JobPhase.HANDED, e.Computed): _computed,
    (JobPhase.ANSWERED, e.Computed): _computed,
    (JobPhase.STORING, e.Written): _stored,
    (JobPhase.LEAVING, e.PagesGiven): ignored,  # REMOVE gives the pages back
    **cells(ENDING, e.Unblocked, ignored),
    **cells((JobPhase.LEAVING, JobPhase.QUITTING), e.Written, _written_meanwhile),
    (JobPhase.LEAVING, e.Blocked): states.thread_over,
    (JobPhase.LEAVING, e.LayerRead): states.thread_over,
    **cells(ENDING, e.Sampled, ignored),  # of a step that had begun before
    **cells(ENDING, e.Answerable, ignored),
    **cells(ENDING, e.Computed, ignored),
    (JobPhase.FLUSHING, e.Written): _flushed,
}
