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
from backends.workers.lifecycle.states import ENDING, Phase, Result, State, Table, cells, ignored

AT_WORK = (Phase.LOADING, Phase.COMPILING, Phase.STARTING)  # a thread works for the job
ACTIVE = (Phase.QUEUED, *AT_WORK, Phase.COMPUTING, Phase.SAVING)


def step(state: State, event: Any) -> Result:
    return states.step_of(TABLE, state, event)


def _releasing(result: Result) -> Result:
    """`result`, after the leases of the handed-over blocks are released."""
    state, actions = result
    if not state.is_given:
        return result
    return state._replace(is_given=False), [Do.RELEASE_GIVEN, *actions]


def _loaded(state: State, event: e.Loaded) -> Result:
    result = states.loaded(state, event)
    return _releasing(result) if event.releases else result


def _load_failed(state: State, event: e.LoadFailed) -> Result:
    result = states.thread_failed(state, event)
    return _releasing(result) if event.releases else result


def _load_over(state: State, event: e.Loaded | e.LoadFailed) -> Result:
    result = states.thread_over(state, event)
    return _releasing(result) if event.releases else result


def _engine_read(state: State, event: e.EngineRead) -> Result:
    return _releasing((state, []))


def _decoded(state: State, event: e.Decoded) -> Result:
    assert event.tokens >= state.sent_tokens, "tokens were sent twice"
    if event.is_last:
        state = state._replace(phase=Phase.QUITTING, is_told=True, sent_tokens=event.tokens)
        return state, [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE]
    if event.tokens == state.sent_tokens:
        return state, []
    return state._replace(sent_tokens=event.tokens), [Do.SEND]


def _preempted(state: State, event: e.Preempted) -> Result:
    state = state._replace(phase=Phase.SAVING, is_busy=True, is_given=True)
    return state, [Do.TAKE_PAGES, Do.SAVE]


def _saved(state: State, event: e.Saved) -> Result:
    return state._replace(phase=Phase.QUEUED, is_busy=False), [Do.SAVE_OVER]


def _save_failed(state: State, event: e.SaveFailed) -> Result:
    state, actions = states.thread_failed(state, event)
    return state, [Do.SAVE_OVER, *actions]


def _save_over(state: State, event: e.Saved | e.SaveFailed) -> Result:
    state, actions = states.thread_over(state, event)
    return state, [Do.SAVE_OVER, *actions]


TABLE: Table = {
    **states.STARTING_CELLS,
    **states.LEAVING_CELLS,
    (Phase.LOADING, e.Loaded): _loaded,
    **cells((*AT_WORK, Phase.COMPUTING), e.LoadFailed, _load_failed),
    **cells(ACTIVE, e.Stopped, states.stopped),
    **cells(ACTIVE, e.Failed, states.failed),
    **cells((Phase.STARTING, Phase.COMPUTING, Phase.LEAVING), e.EngineRead, _engine_read),
    (Phase.COMPUTING, e.Decoded): _decoded,
    (Phase.COMPUTING, e.Preempted): _preempted,
    (Phase.SAVING, e.Saved): _saved,
    (Phase.SAVING, e.SaveFailed): _save_failed,
    (Phase.LEAVING, e.Loaded): _load_over,
    (Phase.LEAVING, e.LoadFailed): _load_over,
    (Phase.LEAVING, e.Saved): _save_over,
    (Phase.LEAVING, e.SaveFailed): _save_over,
    **cells(ENDING, e.Decoded, ignored),  # of a step that had begun before
    **cells((Phase.QUITTING, Phase.FLUSHING, Phase.OVER), e.EngineRead, ignored),
}
