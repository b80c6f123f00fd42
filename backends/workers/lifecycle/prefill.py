"""The life of a prefill job: a table of phases and events (states.py describes the phases).

    queued → loading → [blocked → loading] → [compiling] → starting → computing → storing
    computing → resetting → loading        a layer of the prefix is missing
    storing → quitting → flushing → over   also by leaving, if it is stopped or fails

The reply follows the last write. An engine that hands KV over by itself does not wait for the
store: computing → handed → answered → storing. An engine may post SAMPLED, ANSWERABLE and COMPUTED
again; only the first counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from backends.workers.lifecycle import states
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import (
    AT_WORK,
    ENDING,
    JobPhase,
    JobState,
    Result,
    Table,
    before,
    cells,
    ignored,
)

COMPUTED = {JobPhase.STORING, JobPhase.HANDED, JobPhase.ANSWERED}
IN_BATCH = {JobPhase.COMPUTING, JobPhase.RESETTING}
ACTIVE = {JobPhase.QUEUED, JobPhase.BLOCKED} | AT_WORK | IN_BATCH | COMPUTED


def step(state: JobState, event: On, value: Any = None) -> Result:
    return states.step_of(TABLE, state, event, value)


# --- the cached prefix


def _blocked(state: JobState, value: None) -> Result:
    return state._replace(phase=JobPhase.BLOCKED, is_busy=False), []


def _layer_due(state: JobState, value: None) -> Result:
    assert not state.is_busy, "a layer of the job is being read already"
    return state._replace(is_busy=True), [Do.READ_LAYER]


def _layer_read(state: JobState, is_here: bool) -> Result:
    state = state._replace(is_busy=False)
    if is_here:
        return state, [Do.LAYER_LOADED]
    return state._replace(phase=JobPhase.RESETTING), [Do.ASK_TURN]


def _reset(state: JobState, value: Any) -> Result:
    state, actions = states.awaiting(state, value, JobPhase.RESETTING)
    return state, [Do.STOP_BATCH, Do.GIVE_UP_SLOTS, *actions]


def _slots_given_up(state: JobState, value: None) -> Result:
    state, _ = states.written(state, value)
    return states.loads(state, value)


# --- the result


def _sampled(state: JobState, token_id: int) -> Result:
    if state.token_id is not None:
        return state, []
    return state._replace(token_id=token_id), [Do.SEND_FIRST]


def _answer_early(state: JobState, value: None) -> Result:
    state, _ = states.written(state, value)
    phase = JobPhase.STORING if state.awaited else JobPhase.ANSWERED  # computed meanwhile, or not
    return state._replace(phase=phase, is_call_over=True), [Do.REPLY]


def _stored(state: JobState, value: None) -> Result:
    state, actions = states.written(state, value)
    if state.awaited:
        return state, actions
    actions = [Do.REMOVE]
    if state.keeps_leases:
        actions.append(Do.KEEP_LEASES)
    if not state.is_call_over:
        actions.append(Do.REPLY)
    actions += [Do.SETTLE, Do.STOP_ENGINE]
    return state._replace(phase=JobPhase.QUITTING, is_call_over=True), actions


# --- leaving


def _between_steps(state: JobState, is_reading: bool) -> Result:
    state, actions = states.between_steps(state, is_reading)
    return state, [*actions, Do.SETTLE] if state.phase is JobPhase.QUITTING else actions


def _flushed(state: JobState, value: None) -> Result:
    state, actions = states.flushed(state, value)
    if state.phase is not JobPhase.OVER:
        return state, actions
    return state, [Do.FREE_SLOTS, *actions] if state.is_certain else actions


TABLE: Table = {
    **states.COMMON,
    **cells(ACTIVE, {On.STOPPED}, states.leaves),  # the queued writes are useful to other prompts
    **cells(ACTIVE, {On.FAILED}, before(Do.END_WRITES, states.leaves)),
    **cells(
        AT_WORK | {JobPhase.COMPUTING},
        {On.LOAD_FAILED},
        before(Do.END_WRITES, states.thread_failed),
    ),
    (JobPhase.LOADING, On.BLOCKED): _blocked,
    (JobPhase.BLOCKED, On.UNBLOCKED): states.loads,
    (JobPhase.COMPUTING, On.LAYER_DUE): _layer_due,
    (JobPhase.COMPUTING, On.LAYER_READ): _layer_read,
    (JobPhase.RESETTING, On.BETWEEN_STEPS): _reset,
    (JobPhase.RESETTING, On.WRITTEN): _slots_given_up,
    (JobPhase.COMPUTING, On.SAMPLED): _sampled,
    (JobPhase.COMPUTING, On.ANSWERABLE): partial(states.awaiting, phase=JobPhase.HANDED),
    (JobPhase.HANDED, On.WRITTEN): _answer_early,
    (JobPhase.HANDED, On.COMPUTED): partial(states.awaiting, phase=JobPhase.HANDED),
    **cells(
        {JobPhase.COMPUTING, JobPhase.ANSWERED},
        {On.COMPUTED},
        partial(states.awaiting, phase=JobPhase.STORING),
    ),
    (JobPhase.STORING, On.WRITTEN): _stored,
    **cells(COMPUTED, {On.SAMPLED, On.ANSWERABLE}, ignored),
    (JobPhase.STORING, On.COMPUTED): ignored,
    (JobPhase.LEAVING, On.BETWEEN_STEPS): _between_steps,
    (JobPhase.LEAVING, On.PAGES_GIVEN): ignored,  # REMOVE gives the pages back
    **cells({JobPhase.LEAVING}, {On.BLOCKED, On.LAYER_READ}, states.thread_over),
    **cells({JobPhase.LEAVING, JobPhase.QUITTING}, {On.WRITTEN}, states.written),
    **cells(ENDING, {On.UNBLOCKED, On.SAMPLED, On.ANSWERABLE, On.COMPUTED}, ignored),
    (JobPhase.FLUSHING, On.WRITTEN): _flushed,
}
