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
from backends.workers.lifecycle.states import ENDING, Phase, Result, State, Table, cells, ignored

AT_WORK = (Phase.LOADING, Phase.COMPILING, Phase.STARTING)  # a thread works for the job
COMPUTED = (Phase.STORING, Phase.HANDED, Phase.ANSWERED)
ACTIVE = (Phase.QUEUED, Phase.BLOCKED, *AT_WORK, Phase.COMPUTING, Phase.RESETTING, *COMPUTED)


def step(state: State, event: Any) -> Result:
    return states.step_of(TABLE, state, event)


# --- the cached prefix


def _blocked(state: State, event: e.Blocked) -> Result:
    return state._replace(phase=Phase.BLOCKED, is_busy=False), []


def _layer_due(state: State, event: e.LayerDue) -> Result:
    assert not state.is_busy, "a layer of the job is being read already"
    return state._replace(is_busy=True), [Do.READ_LAYER]


def _layer_read(state: State, event: e.LayerRead) -> Result:
    state = state._replace(is_busy=False)
    if event.is_here:
        return state, [Do.LAYER_LOADED]
    return state._replace(phase=Phase.RESETTING), [Do.ASK_TURN]


def _reset(state: State, event: e.BetweenSteps) -> Result:
    actions = [Do.STOP_BATCH, Do.GIVE_UP_SLOTS, Do.AWAIT_WRITES]
    return state._replace(awaited=state.awaited + 1), actions


def _slots_given_up(state: State, event: e.Written) -> Result:
    return states.admitted(state._replace(awaited=state.awaited - 1), e.Admitted())


# --- the result


def _sampled(state: State, event: e.Sampled) -> Result:
    if state.token_id is not None:
        return state, []
    return state._replace(token_id=event.token_id), [Do.SEND_FIRST]


def _answerable(state: State, event: e.Answerable) -> Result:
    return state._replace(phase=Phase.HANDED, awaited=state.awaited + 1), [Do.AWAIT_WRITES]


def _answer_early(state: State, event: e.Written) -> Result:
    state = state._replace(phase=Phase.ANSWERED, is_told=True, awaited=state.awaited - 1)
    return state, [Do.REPLY]


def _computed(state: State, event: e.Computed) -> Result:
    return state._replace(phase=Phase.STORING, awaited=state.awaited + 1), [Do.AWAIT_WRITES]


def _stored(state: State, event: e.Written) -> Result:
    state = state._replace(awaited=state.awaited - 1)
    if state.awaited:
        return state, []
    actions = [Do.REMOVE]
    if state.keeps_leases:
        actions.append(Do.KEEP_LEASES)
    if not state.is_told:
        actions.append(Do.REPLY)
    return state._replace(phase=Phase.QUITTING, is_told=True), [*actions, Do.STOP_ENGINE]


# --- leaving


def _failed(state: State, event: e.Failed | e.LoadFailed) -> Result:
    state, actions = states.failed(state, event)
    return state, [Do.END_WRITES, *actions]


def _thread_failed(state: State, event: e.LoadFailed) -> Result:
    return _failed(state._replace(is_busy=False), event)


def _written_meanwhile(state: State, event: e.Written) -> Result:
    return state._replace(awaited=state.awaited - 1), []


def _flushed(state: State, event: e.Written) -> Result:
    state, actions = states.flushed(state, event)
    if state.phase is not Phase.OVER:
        return state, actions
    slots = [Do.FREE_SLOTS] if state.is_certain else []
    return state, [Do.SETTLE, *slots, *actions]


TABLE: Table = {
    **states.STARTING_CELLS,
    **states.LEAVING_CELLS,
    (Phase.LOADING, e.Blocked): _blocked,
    (Phase.LOADING, e.Loaded): states.loaded,
    **cells(ACTIVE, e.Stopped, states.stopped),
    **cells(ACTIVE, e.Failed, _failed),
    **cells((*AT_WORK, Phase.COMPUTING), e.LoadFailed, _thread_failed),
    (Phase.BLOCKED, e.Unblocked): states.admitted,
    (Phase.COMPUTING, e.LayerDue): _layer_due,
    (Phase.COMPUTING, e.LayerRead): _layer_read,
    (Phase.COMPUTING, e.Sampled): _sampled,
    (Phase.COMPUTING, e.Answerable): _answerable,
    (Phase.COMPUTING, e.Computed): _computed,
    (Phase.RESETTING, e.BetweenSteps): _reset,
    (Phase.RESETTING, e.Written): _slots_given_up,
    (Phase.HANDED, e.Written): _answer_early,
    (Phase.HANDED, e.Computed): _computed,
    (Phase.ANSWERED, e.Computed): _computed,
    (Phase.STORING, e.Written): _stored,
    (Phase.LEAVING, e.Admitted): ignored,  # REMOVE gives the pages back
    **cells(ENDING, e.Unblocked, ignored),
    **cells((Phase.LEAVING, Phase.QUITTING), e.Written, _written_meanwhile),
    (Phase.LEAVING, e.Blocked): states.thread_over,
    (Phase.LEAVING, e.LayerRead): states.thread_over,
    **cells(ENDING, e.Sampled, ignored),  # of a step that had begun before
    **cells(ENDING, e.Answerable, ignored),
    **cells(ENDING, e.Computed, ignored),
    (Phase.FLUSHING, e.Written): _flushed,
}
