"""The life of a decode job: a table of phases and events (states.py describes the phases).

    queued → loading → [compiling] → starting → computing → quitting
      ↑                                            │
      └────────────────── saving ◀── preempted ────┘

The reply goes out as soon as the last token is decoded. A stopped or failed job's call ends only
when nobody copies its KV any more, because its frontend then releases the leases.
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
ACTIVE = (JobPhase.QUEUED, *AT_WORK, JobPhase.COMPUTING, JobPhase.SAVING)


def step(state: JobState, event: Any) -> Result:
    return states.step_of(TABLE, state, event)


def _releasing(result: Result) -> Result:
    """`result`, after the leases of the handed-over blocks are released."""
    state, actions = result
    if not state.is_given:
        return result
    return state._replace(is_given=False), [Do.RELEASE_GIVEN, *actions]


def _loaded(state: JobState, event: e.KvLoaded) -> Result:
    result = states.loaded(state, event)
    return _releasing(result) if event.releases else result


def _load_failed(state: JobState, event: e.LoadFailed) -> Result:
    result = states.thread_failed(state, event)
    return _releasing(result) if event.releases else result


def _load_over(state: JobState, event: e.KvLoaded | e.LoadFailed) -> Result:
    result = states.thread_over(state, event)
    return _releasing(result) if event.releases else result


def _engine_read(state: JobState, event: e.EngineRead) -> Result:
    return _releasing((state, []))


def _decoded(state: JobState, event: e.Decoded) -> Result:
    assert event.tokens >= state.sent_tokens, "tokens were sent twice"
    if event.is_last:
        state = state._replace(phase=JobPhase.QUITTING, is_call_over=True, sent_tokens=event.tokens)
        return state, [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE]
    if event.tokens == state.sent_tokens:
        return state, []
    return state._replace(sent_tokens=event.tokens), [Do.SEND]


def _preempted(state: JobState, event: e.Preempted) -> Result:
    state = state._replace(phase=JobPhase.SAVING, is_busy=True, is_given=True)
    return state, [Do.TAKE_PAGES, Do.SAVE]


def _saved(state: JobState, event: e.KvSaved) -> Result:
    return state._replace(phase=JobPhase.QUEUED, is_busy=False), [Do.SAVE_OVER]


def _save_failed(state: JobState, event: e.SaveFailed) -> Result:
    state, actions = states.thread_failed(state, event)
    return state, [Do.SAVE_OVER, *actions]


def _save_over(state: JobState, event: e.KvSaved | e.SaveFailed) -> Result:
    state, actions = states.thread_over(state, event)
    return state, [Do.SAVE_OVER, *actions]


TABLE: Table = {
    **states.STARTING_CELLS,
    **states.LEAVING_CELLS,
    (JobPhase.LOADING, e.KvLoaded): _loaded,
    **cells((*AT_WORK, JobPhase.COMPUTING), e.LoadFailed, _load_failed),
    **cells(ACTIVE, e.JobStopped, states.stopped),
    **cells(ACTIVE, e.JobFailed, states.failed),
    **cells((JobPhase.STARTING, JobPhase.COMPUTING, JobPhase.LEAVING), e.EngineRead, _engine_read),
    (JobPhase.COMPUTING, e.Decoded): _decoded,
    (JobPhase.COMPUTING, e.Preempted): _preempted,
    (JobPhase.SAVING, e.KvSaved): _saved,
    (JobPhase.SAVING, e.SaveFailed): _save_failed,
    (JobPhase.LEAVING, e.KvLoaded): _load_over,
    (JobPhase.LEAVING, e.LoadFailed): _load_over,
    (JobPhase.LEAVING, e.KvSaved): _save_over,
    (JobPhase.LEAVING, e.SaveFailed): _save_over,
    **cells(ENDING, e.Decoded, ignored),  # of a step that had begun before
    **cells((JobPhase.QUITTING, JobPhase.FLUSHING, JobPhase.OVER), e.EngineRead, ignored),
}
