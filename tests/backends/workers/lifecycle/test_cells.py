"""Every cell of both tables has a case: the next phase, and the actions in order."""

from __future__ import annotations

from typing import Any

import pytest

from backends.workers.lifecycle import decode, prefill
from backends.workers.lifecycle import events as e
from backends.workers.lifecycle.events import Do
from backends.workers.lifecycle.states import JobPhase, JobState, Table

ERROR = ValueError("broke")
P = JobPhase
# (phase, changes of its state, event, next phase, actions)
Case = tuple[JobPhase, dict[str, Any], Any, JobPhase, list[Do]]
BUSY = {"is_busy": True}
TURN = [Do.ASK_TURN]
LEFT = (P.QUITTING, P.FLUSHING, P.OVER)
ENDING = (P.LEAVING, *LEFT)

COMMON: list[Case] = [
    (P.QUEUED, {}, e.PagesGiven(), P.LOADING, [Do.LOAD]),
    (P.LOADING, BUSY, e.KvLoaded(), P.STARTING, [Do.START]),
    (P.LOADING, BUSY | {"needs_grammar": True}, e.KvLoaded(), P.COMPILING, [Do.COMPILE]),
    (P.COMPILING, BUSY | {"needs_grammar": True}, e.GrammarReady(), P.STARTING, [Do.START]),
    (P.STARTING, BUSY, e.EngineReady(), P.COMPUTING, [Do.JOIN]),
    (P.LEAVING, BUSY, e.KvLoaded(), P.LEAVING, TURN),
    (P.LEAVING, BUSY, e.LoadFailed(ERROR), P.LEAVING, TURN),
    (P.LEAVING, BUSY, e.GrammarReady(), P.LEAVING, TURN),
    (P.LEAVING, BUSY, e.EngineReady(), P.LEAVING, TURN),
    (P.LEAVING, BUSY, e.BetweenSteps(), P.LEAVING, []),
    (P.LEAVING, {}, e.BetweenSteps(is_reading=True), P.LEAVING, TURN),
    (P.LEAVING, {}, e.BetweenSteps(), P.QUITTING, [Do.REMOVE, Do.STOP_ENGINE]),
    (P.QUITTING, {}, e.EngineLeft(), P.FLUSHING, [Do.AWAIT_WRITES]),
    *[(phase, {}, e.CallLate(), phase, [Do.FAIL]) for phase in LEFT],
    *[(phase, {"is_call_over": True}, e.CallLate(), phase, []) for phase in LEFT],
    *[
        (phase, {}, event, phase, [])
        for phase in ENDING
        for event in (e.JobStopped(), e.JobFailed(ERROR))
    ],
]
END = [Do.RELEASE_PAGES, Do.RELEASE_LEASES, Do.FAIL]
FAILED = [Do.END_WRITES, Do.ASK_TURN]
PREFILL: list[Case] = [
    *COMMON,
    (P.LOADING, BUSY, e.Blocked(), P.BLOCKED, []),
    (P.BLOCKED, {}, e.Unblocked(), P.LOADING, [Do.LOAD]),
    *[(phase, {}, e.JobStopped(), P.LEAVING, TURN) for phase in prefill.ACTIVE],
    *[(phase, {}, e.JobFailed(ERROR), P.LEAVING, FAILED) for phase in prefill.ACTIVE],
    *[
        (phase, BUSY, e.LoadFailed(ERROR), P.LEAVING, FAILED)
        for phase in (*prefill.AT_WORK, P.COMPUTING)
    ],
    (P.COMPUTING, {}, e.LayerDue(), P.COMPUTING, [Do.READ_LAYER]),
    (P.COMPUTING, BUSY, e.LayerRead(is_here=True), P.COMPUTING, [Do.LAYER_LOADED]),
    (P.COMPUTING, BUSY, e.LayerRead(is_here=False), P.RESETTING, TURN),
    (
        P.RESETTING,
        {},
        e.BetweenSteps(),
        P.RESETTING,
        [Do.STOP_BATCH, Do.GIVE_UP_SLOTS, Do.AWAIT_WRITES],
    ),
    (P.RESETTING, {"awaited": 1}, e.Written(), P.LOADING, [Do.LOAD]),
    (P.COMPUTING, {}, e.Sampled(7), P.COMPUTING, [Do.SEND_FIRST]),
    (P.COMPUTING, {"token_id": 7}, e.Sampled(7), P.COMPUTING, []),
    (P.COMPUTING, {}, e.Computed(), P.STORING, [Do.AWAIT_WRITES]),
    (P.COMPUTING, {}, e.Answerable(), P.HANDED, [Do.AWAIT_WRITES]),
    (P.HANDED, {"awaited": 1}, e.Written(), P.ANSWERED, [Do.REPLY]),
    (P.HANDED, {"awaited": 1}, e.Computed(), P.STORING, [Do.AWAIT_WRITES]),
    (P.ANSWERED, {}, e.Computed(), P.STORING, [Do.AWAIT_WRITES]),
    (P.STORING, {"awaited": 2}, e.Written(), P.STORING, []),
    (P.STORING, {"awaited": 1}, e.Written(), P.QUITTING, [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE]),
    (
        P.STORING,
        {"awaited": 1, "keeps_leases": True},
        e.Written(),
        P.QUITTING,
        [Do.REMOVE, Do.KEEP_LEASES, Do.REPLY, Do.STOP_ENGINE],
    ),
    (
        P.STORING,
        {"awaited": 1, "is_call_over": True},
        e.Written(),
        P.QUITTING,
        [Do.REMOVE, Do.STOP_ENGINE],
    ),
    (P.LEAVING, {}, e.PagesGiven(), P.LEAVING, []),
    (P.LEAVING, {"awaited": 1}, e.Written(), P.LEAVING, []),
    (P.QUITTING, {"awaited": 1}, e.Written(), P.QUITTING, []),
    (P.LEAVING, BUSY, e.Blocked(), P.LEAVING, TURN),
    (P.LEAVING, BUSY, e.LayerRead(is_here=True), P.LEAVING, TURN),
    *[
        (phase, {}, event, phase, [])
        for phase in ENDING
        for event in (e.Unblocked(), e.Sampled(7), e.Answerable(), e.Computed())
    ],
    (P.FLUSHING, {"awaited": 2}, e.Written(), P.FLUSHING, []),
    (P.FLUSHING, {"awaited": 1}, e.Written(), P.OVER, [Do.SETTLE, Do.FREE_SLOTS, *END]),
    (
        P.FLUSHING,
        {"awaited": 1, "is_certain": False},
        e.Written(),
        P.OVER,
        [Do.SETTLE, Do.RELEASE_LEASES, Do.FAIL],
    ),
    (
        P.FLUSHING,
        {"awaited": 1, "is_call_over": True, "keeps_leases": True},
        e.Written(),
        P.OVER,
        [Do.SETTLE, Do.FREE_SLOTS, Do.RELEASE_PAGES],
    ),
]
DECODE: list[Case] = [
    *COMMON,
    (P.LOADING, BUSY, e.KvLoaded(releases=True), P.STARTING, [Do.RELEASE_GIVEN, Do.START]),
    *[(phase, {}, e.JobStopped(), P.LEAVING, TURN) for phase in decode.ACTIVE],
    *[(phase, {}, e.JobFailed(ERROR), P.LEAVING, TURN) for phase in decode.ACTIVE],
    *[
        (phase, BUSY, e.LoadFailed(ERROR), P.LEAVING, TURN)
        for phase in (*decode.AT_WORK, P.COMPUTING)
    ],
    (
        P.LOADING,
        BUSY,
        e.LoadFailed(ERROR, releases=True),
        P.LEAVING,
        [Do.RELEASE_GIVEN, Do.ASK_TURN],
    ),
    *[
        (phase, {}, e.EngineRead(), phase, [Do.RELEASE_GIVEN])
        for phase in (P.STARTING, P.COMPUTING, P.LEAVING)
    ],
    (P.COMPUTING, {"is_given": False}, e.EngineRead(), P.COMPUTING, []),
    *[(phase, {}, e.EngineRead(), phase, []) for phase in LEFT],
    (P.COMPUTING, {}, e.Decoded(2, is_last=False), P.COMPUTING, [Do.SEND]),
    (P.COMPUTING, {"sent_tokens": 2}, e.Decoded(2, is_last=False), P.COMPUTING, []),
    (
        P.COMPUTING,
        {"sent_tokens": 2},
        e.Decoded(3, is_last=True),
        P.QUITTING,
        [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE],
    ),
    *[(phase, {}, e.Decoded(3, is_last=True), phase, []) for phase in ENDING],
    (P.COMPUTING, {}, e.Preempted(), P.SAVING, [Do.TAKE_PAGES, Do.SAVE]),
    (P.SAVING, BUSY, e.KvSaved([]), P.QUEUED, [Do.SAVE_OVER]),
    (P.SAVING, BUSY, e.SaveFailed(ERROR), P.LEAVING, [Do.SAVE_OVER, Do.ASK_TURN]),
    (P.LEAVING, BUSY, e.KvSaved([]), P.LEAVING, [Do.SAVE_OVER, Do.ASK_TURN]),
    (P.LEAVING, BUSY, e.SaveFailed(ERROR), P.LEAVING, [Do.SAVE_OVER, Do.ASK_TURN]),
    (P.LEAVING, BUSY, e.KvLoaded(releases=True), P.LEAVING, [Do.RELEASE_GIVEN, Do.ASK_TURN]),
    (P.FLUSHING, {"awaited": 1}, e.Written(), P.OVER, END),
    (P.FLUSHING, {"awaited": 1, "is_call_over": True}, e.Written(), P.OVER, END[:2]),
]


@pytest.mark.parametrize(
    ("table", "case"),
    [
        *[
            pytest.param(prefill.TABLE, case, id=f"prefill {case[0].value} {case[2]}")
            for case in PREFILL
        ],
        *[
            pytest.param(decode.TABLE, case, id=f"decode {case[0].value} {case[2]}")
            for case in DECODE
        ],
    ],
)
def test_a_cell_gives_the_next_phase_and_the_actions_in_order(table: Table, case: Case) -> None:
    phase, changes, event, next_phase, actions = case
    state, found = table[phase, type(event)](JobState(phase)._replace(**changes), event)
    assert (state.phase, found) == (next_phase, actions)


@pytest.mark.parametrize(("table", "cases"), [(prefill.TABLE, PREFILL), (decode.TABLE, DECODE)])
def test_every_cell_has_a_case(table: Table, cases: list[Case]) -> None:
    assert {(case[0], type(case[2])) for case in cases} == table.keys()


@pytest.mark.parametrize("step", [prefill.step, decode.step])
def test_an_event_that_cannot_come_raises(step: Any) -> None:
    with pytest.raises(AssertionError, match="EngineReady cannot come while queued"):
        step(JobState(), e.EngineReady())
    with pytest.raises(AssertionError, match="Written cannot come while over"):
        step(JobState(P.OVER), e.Written())


def test_the_first_error_is_the_one_that_the_client_gets() -> None:
    state, _ = prefill.step(JobState(P.COMPUTING), e.JobFailed(ERROR))
    state, _ = prefill.step(state, e.JobFailed(KeyError("later")))
    assert state.error is ERROR
    stopped, _ = decode.step(JobState(P.COMPUTING), e.JobStopped())
    stopped, _ = decode.step(stopped, e.JobFailed(ERROR))
    assert stopped.error is None, "it ends as cancelled"


def test_a_job_whose_grammar_is_compiled_does_not_compile_it_again() -> None:
    state = JobState(P.COMPILING, is_busy=True, needs_grammar=True)
    state, _ = decode.step(state, e.GrammarReady())
    state, _ = decode.step(state, e.EngineReady())
    state, _ = decode.step(state, e.Preempted())
    state, _ = decode.step(state, e.KvSaved([]))
    state, _ = decode.step(state, e.PagesGiven())
    assert decode.step(state, e.KvLoaded())[1] == [Do.START]
