"""Every cell of both tables has a case: the next phase, and the actions in order."""

from __future__ import annotations

from typing import Any

import pytest

from backends.workers.lifecycle import decode, prefill
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import JobPhase, JobState, Table

ERROR = ValueError("broke")
P = JobPhase
# (phase, changes of its state, event and value, next phase, actions)
Case = tuple[JobPhase, dict[str, Any], tuple[On, Any], JobPhase, list[Do]]
BUSY = {"is_busy": True}
TURN = [Do.ASK_TURN]
LEFT = (P.QUITTING, P.FLUSHING, P.OVER)
ENDING = (P.LEAVING, *LEFT)

COMMON: list[Case] = [
    (P.QUEUED, {}, (On.PAGES_GIVEN, None), P.LOADING, [Do.LOAD]),
    (P.LOADING, BUSY, (On.LOADED, None), P.STARTING, [Do.START]),
    (P.LOADING, BUSY | {"needs_grammar": True}, (On.LOADED, None), P.COMPILING, [Do.COMPILE]),
    (P.COMPILING, BUSY | {"needs_grammar": True}, (On.GRAMMAR_READY, None), P.STARTING, [Do.START]),
    (P.STARTING, BUSY, (On.ENGINE_READY, None), P.COMPUTING, [Do.JOIN]),
    (P.LEAVING, BUSY, (On.LOADED, None), P.LEAVING, TURN),
    (P.LEAVING, BUSY, (On.LOAD_FAILED, ERROR), P.LEAVING, TURN),
    (P.LEAVING, BUSY, (On.GRAMMAR_READY, None), P.LEAVING, TURN),
    (P.LEAVING, BUSY, (On.ENGINE_READY, None), P.LEAVING, TURN),
    (P.LEAVING, BUSY, (On.BETWEEN_STEPS, False), P.LEAVING, []),
    (P.LEAVING, {}, (On.BETWEEN_STEPS, True), P.LEAVING, TURN),
    (P.QUITTING, {}, (On.ENGINE_LEFT, True), P.FLUSHING, [Do.AWAIT_WRITES]),
    *[(phase, {}, (On.CALL_LATE, None), phase, [Do.FAIL]) for phase in ENDING],
    *[(phase, {"is_call_over": True}, (On.CALL_LATE, None), phase, []) for phase in ENDING],
    *[(phase, {}, (On.LOAD_FAILED, ERROR), phase, []) for phase in LEFT],
    *[
        (phase, {}, event, phase, [])
        for phase in ENDING
        for event in ((On.STOPPED, None), (On.FAILED, ERROR))
    ],
]
END = [Do.RELEASE_PAGES, Do.RELEASE_LEASES, Do.FAIL]
GOES = [Do.SETTLE, Do.STOP_ENGINE]
FAILED = [Do.END_WRITES, Do.ASK_TURN]
PREFILL: list[Case] = [
    *COMMON,
    (P.LEAVING, {}, (On.BETWEEN_STEPS, False), P.QUITTING, [Do.REMOVE, Do.STOP_ENGINE, Do.SETTLE]),
    (P.LOADING, BUSY, (On.BLOCKED, None), P.BLOCKED, []),
    (P.BLOCKED, {}, (On.UNBLOCKED, None), P.LOADING, [Do.LOAD]),
    *[(phase, {}, (On.STOPPED, None), P.LEAVING, TURN) for phase in sorted(prefill.ACTIVE)],
    *[(phase, {}, (On.FAILED, ERROR), P.LEAVING, FAILED) for phase in sorted(prefill.ACTIVE)],
    *[
        (phase, BUSY, (On.LOAD_FAILED, ERROR), P.LEAVING, FAILED)
        for phase in (*sorted(prefill.AT_WORK), P.COMPUTING)
    ],
    (P.COMPUTING, {}, (On.LAYER_DUE, None), P.COMPUTING, [Do.READ_LAYER]),
    (P.COMPUTING, BUSY, (On.LAYER_READ, True), P.COMPUTING, [Do.LAYER_LOADED]),
    (P.COMPUTING, BUSY, (On.LAYER_READ, False), P.RESETTING, TURN),
    (
        P.RESETTING,
        {},
        (On.BETWEEN_STEPS, False),
        P.RESETTING,
        [Do.STOP_BATCH, Do.GIVE_UP_SLOTS, Do.AWAIT_WRITES],
    ),
    (P.RESETTING, {"awaited": 1}, (On.WRITTEN, None), P.LOADING, [Do.LOAD]),
    (P.COMPUTING, {}, (On.SAMPLED, 7), P.COMPUTING, [Do.SEND_FIRST]),
    (P.COMPUTING, {"token_id": 7}, (On.SAMPLED, 7), P.COMPUTING, []),
    (P.COMPUTING, {}, (On.COMPUTED, None), P.STORING, [Do.AWAIT_WRITES]),
    (P.COMPUTING, {}, (On.ANSWERABLE, None), P.HANDED, [Do.AWAIT_WRITES]),
    (P.HANDED, {"awaited": 1}, (On.WRITTEN, None), P.ANSWERED, [Do.REPLY]),
    (P.HANDED, {"awaited": 1}, (On.COMPUTED, None), P.HANDED, [Do.AWAIT_WRITES]),
    (P.HANDED, {"awaited": 2}, (On.WRITTEN, None), P.STORING, [Do.REPLY]),
    *[
        (phase, {}, event, phase, [])
        for phase in sorted(prefill.COMPUTED)
        for event in ((On.SAMPLED, 7), (On.ANSWERABLE, None))
    ],
    (P.STORING, {}, (On.COMPUTED, None), P.STORING, []),
    (P.ANSWERED, {}, (On.COMPUTED, None), P.STORING, [Do.AWAIT_WRITES]),
    (P.STORING, {"awaited": 2}, (On.WRITTEN, None), P.STORING, []),
    (P.STORING, {"awaited": 1}, (On.WRITTEN, None), P.QUITTING, [Do.REMOVE, Do.REPLY, *GOES]),
    (
        P.STORING,
        {"awaited": 1, "keeps_leases": True},
        (On.WRITTEN, None),
        P.QUITTING,
        [Do.REMOVE, Do.KEEP_LEASES, Do.REPLY, *GOES],
    ),
    (
        P.STORING,
        {"awaited": 1, "is_call_over": True},
        (On.WRITTEN, None),
        P.QUITTING,
        [Do.REMOVE, *GOES],
    ),
    (P.LEAVING, {}, (On.PAGES_GIVEN, None), P.LEAVING, []),
    (P.LEAVING, {"awaited": 1}, (On.WRITTEN, None), P.LEAVING, []),
    (P.QUITTING, {"awaited": 1}, (On.WRITTEN, None), P.QUITTING, []),
    (P.LEAVING, BUSY, (On.BLOCKED, None), P.LEAVING, TURN),
    (P.LEAVING, BUSY, (On.LAYER_READ, True), P.LEAVING, TURN),
    *[
        (phase, {}, event, phase, [])
        for phase in ENDING
        for event in (
            (On.UNBLOCKED, None),
            (On.SAMPLED, 7),
            (On.ANSWERABLE, None),
            (On.COMPUTED, None),
        )
    ],
    (P.FLUSHING, {"awaited": 2}, (On.WRITTEN, None), P.FLUSHING, []),
    (P.FLUSHING, {"awaited": 1}, (On.WRITTEN, None), P.OVER, [Do.FREE_SLOTS, *END]),
    (
        P.FLUSHING,
        {"awaited": 1, "is_certain": False},
        (On.WRITTEN, None),
        P.OVER,
        [Do.PARK_PAGES, Do.KEEP_LEASES, Do.FAIL],
    ),
    (
        P.FLUSHING,
        {"awaited": 1, "is_call_over": True, "keeps_leases": True},
        (On.WRITTEN, None),
        P.OVER,
        [Do.FREE_SLOTS, Do.RELEASE_PAGES],
    ),
]
DECODE: list[Case] = [
    *COMMON,
    (P.LEAVING, {}, (On.BETWEEN_STEPS, False), P.QUITTING, [Do.REMOVE, Do.STOP_ENGINE]),
    *[(phase, {}, (On.STOPPED, None), P.LEAVING, TURN) for phase in sorted(decode.ACTIVE)],
    *[(phase, {}, (On.FAILED, ERROR), P.LEAVING, TURN) for phase in sorted(decode.ACTIVE)],
    *[
        (phase, BUSY, (On.LOAD_FAILED, ERROR), P.LEAVING, TURN)
        for phase in (*sorted(decode.AT_WORK), P.COMPUTING)
    ],
    *[(phase, {}, (On.KV_READ, None), phase, [Do.RELEASE_GIVEN]) for phase in sorted(decode.READS)],
    (P.COMPUTING, {"is_given": False}, (On.KV_READ, None), P.COMPUTING, []),
    *[(phase, {}, (On.KV_READ, None), phase, []) for phase in LEFT],
    (P.COMPUTING, {}, (On.DECODED, 2), P.COMPUTING, [Do.SEND]),
    (P.COMPUTING, {"sent_tokens": 2}, (On.DECODED, 2), P.COMPUTING, []),
    (
        P.COMPUTING,
        {"sent_tokens": 2},
        (On.FINISHED, 3),
        P.QUITTING,
        [Do.REMOVE, Do.REPLY, Do.STOP_ENGINE],
    ),
    *[
        (phase, {}, event, phase, [])
        for phase in ENDING
        for event in ((On.FINISHED, 3), (On.DECODED, 3))
    ],
    (P.COMPUTING, {}, (On.PREEMPTED, None), P.SAVING, [Do.TAKE_PAGES, Do.SAVE]),
    (P.SAVING, BUSY, (On.SAVED, None), P.QUEUED, [Do.END_SAVE]),
    (P.SAVING, BUSY, (On.SAVE_FAILED, ERROR), P.LEAVING, [Do.END_SAVE, Do.ASK_TURN]),
    (P.LEAVING, BUSY, (On.SAVED, None), P.LEAVING, [Do.END_SAVE, Do.ASK_TURN]),
    (P.LEAVING, BUSY, (On.SAVE_FAILED, ERROR), P.LEAVING, [Do.END_SAVE, Do.ASK_TURN]),
    (P.FLUSHING, {"awaited": 1}, (On.WRITTEN, None), P.OVER, END),
    (P.FLUSHING, {"awaited": 1, "is_call_over": True}, (On.WRITTEN, None), P.OVER, END[:2]),
]


@pytest.mark.parametrize(
    ("table", "case"),
    [
        *[
            pytest.param(prefill.TABLE, case, id=f"prefill {case[0].name} {case[2][0].name}")
            for case in PREFILL
        ],
        *[
            pytest.param(decode.TABLE, case, id=f"decode {case[0].name} {case[2][0].name}")
            for case in DECODE
        ],
    ],
)
def test_a_cell_gives_the_next_phase_and_the_actions_in_order(table: Table, case: Case) -> None:
    phase, changes, (event, value), next_phase, actions = case
    state, found = table[phase, event](JobState(phase)._replace(**changes), value)
    assert (state.phase, found) == (next_phase, actions)


@pytest.mark.parametrize(("table", "cases"), [(prefill.TABLE, PREFILL), (decode.TABLE, DECODE)])
def test_every_cell_has_a_case(table: Table, cases: list[Case]) -> None:
    assert {(case[0], case[2][0]) for case in cases} == table.keys()


@pytest.mark.parametrize("step", [prefill.step, decode.step])
def test_an_event_that_cannot_come_raises(step: Any) -> None:
    with pytest.raises(AssertionError, match="ENGINE_READY cannot come while QUEUED"):
        step(JobState(), On.ENGINE_READY)
    with pytest.raises(AssertionError, match="WRITTEN cannot come while OVER"):
        step(JobState(P.OVER), On.WRITTEN)


def test_the_first_error_is_the_one_that_the_client_gets() -> None:
    state, _ = prefill.step(JobState(P.COMPUTING), On.FAILED, ERROR)
    state, _ = prefill.step(state, On.FAILED, KeyError("later"))
    assert state.error is ERROR
    stopped, _ = decode.step(JobState(P.COMPUTING), On.STOPPED)
    stopped, _ = decode.step(stopped, On.FAILED, ERROR)
    assert stopped.error is None, "it ends as cancelled"


def test_a_job_whose_grammar_is_compiled_does_not_compile_it_again() -> None:
    state = JobState(P.COMPILING, is_busy=True, needs_grammar=True)
    state, _ = decode.step(state, On.GRAMMAR_READY)
    state, _ = decode.step(state, On.ENGINE_READY)
    state, _ = decode.step(state, On.PREEMPTED)
    state, _ = decode.step(state, On.SAVED)
    state, _ = decode.step(state, On.PAGES_GIVEN)
    assert decode.step(state, On.LOADED)[1] == [Do.START]
