"""The life of a decode job: a table of phases and events (states.py describes the phases).

    queued → loading → [compiling] → starting → computing → quitting → flushing → over
      ↑                                            │
      └────────────────────── saving ◀─────────────┘  preempted

The reply goes out as soon as the last token is decoded. The call of a stopped or failed job ends
when no copy of its KV is under way, because its frontend then releases the leases.
"""

from __future__ import annotations

from typing import Any

from backends.workers.lifecycle import states
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import (
    AT_WORK,
    ENDING,
    LEFT,
    JobPhase,
    JobState,
    Result,
    Table,
    before,
    cells,
    ignored,
)

READS = {JobPhase.LOADING, JobPhase.STARTING, JobPhase.COMPUTING, JobPhase.LEAVING}
ACTIVE = {JobPhase.QUEUED, JobPhase.COMPUTING, JobPhase.SAVING} | AT_WORK


def step(state: JobState, event: On, value: Any = None) -> Result:
    return states.step_of(TABLE, state, event, value)


def _kv_read(state: JobState, value: None) -> Result:
    return state._replace(is_given=False), [Do.RELEASE_GIVEN] if state.is_given else []


def _decoded(state: JobState, tokens: int) -> Result:
    assert tokens >= state.sent_tokens, "tokens were sent twice"
    return state._replace(sent_tokens=tokens), [Do.SEND] if tokens > state.sent_tokens else []


def _finished(state: JobState, tokens: int) -> Result:
    state = state._replace(phase=JobPhase.QUITTING, is_call_over=True, sent_tokens=tokens)
    return state, [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE]


def _preempted(state: JobState, value: None) -> Result:
    state = state._replace(phase=JobPhase.SAVING, is_busy=True, is_given=True)
    return state, [Do.TAKE_PAGES, Do.SAVE]


def _saved(state: JobState, value: None) -> Result:
    return state._replace(phase=JobPhase.QUEUED, is_busy=False), [Do.END_SAVE]


TABLE: Table = {
    **states.COMMON,
    **cells(ACTIVE, {On.STOPPED, On.FAILED}, states.leaves),
    **cells(AT_WORK | {JobPhase.COMPUTING}, {On.LOAD_FAILED}, states.thread_failed),
    **cells(READS, {On.KV_READ}, _kv_read),
    (JobPhase.COMPUTING, On.DECODED): _decoded,
    (JobPhase.COMPUTING, On.FINISHED): _finished,
    (JobPhase.COMPUTING, On.PREEMPTED): _preempted,
    (JobPhase.SAVING, On.SAVED): _saved,
    (JobPhase.SAVING, On.SAVE_FAILED): before(Do.END_SAVE, states.thread_failed),
    **cells(
        {JobPhase.LEAVING}, {On.SAVED, On.SAVE_FAILED}, before(Do.END_SAVE, states.thread_over)
    ),
    **cells(ENDING, {On.DECODED, On.FINISHED}, ignored),  # of a step that had begun before
    **cells(LEFT, {On.KV_READ}, ignored),
}
