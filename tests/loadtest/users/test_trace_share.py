"""A trace among workers, at its own times, and how many users it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadtest.replay.datasets import DATA_SETS
from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.trace import read_trace
from loadtest.users.text import ServerFacts
from loadtest.users.trace_share import (
    AHEAD_S,
    LEAD_S,
    USERS_MAX,
    DataSetShare,
    TraceProgress,
    TraceShare,
    data_set_too_long,
    due_after_start_s,
    users_needed,
)

ROWS = read_trace(Path(__file__).parents[2] / "data" / "conversation_turns.jsonl", 30)
SCALE, SPEED = 0.05, 2.0
DEMO = ServerFacts(64, 8_192, 2_048, (0, 1, 2))
SOURCE = TokenSource(2_048, (), seed=3)


def share(part: int = 0, parts: int = 1) -> TraceShare:
    return TraceShare(ROWS, SOURCE, SCALE, SPEED, part, parts)


def test_alone_it_sends_what_a_replay_sends_at_the_same_times() -> None:
    taken = list(iter(share().take, None))
    for ours, theirs in zip(taken, plan(ROWS, SOURCE, SCALE, SPEED), strict=True):
        assert (ours.index, ours.line, pytest.approx(ours.due_s), ours.output_tokens) == (
            theirs.index,
            theirs.line,
            theirs.due_s + LEAD_S,
            theirs.output_tokens,
        )
        np.testing.assert_array_equal(ours.prompt_ids, theirs.prompt_ids)


def test_workers_together_send_every_row_once() -> None:
    parts = [list(iter(share(part, 3).take, None)) for part in range(3)]
    indices = sorted(planned.index for taken in parts for planned in taken)
    assert indices == list(range(30))
    assert all(np.diff([planned.due_s for planned in taken]).min() >= 0 for taken in parts)


def test_it_is_over_when_all_is_sent_and_answered() -> None:
    alone = share()
    while alone.take():
        pass
    assert not alone.is_over, "taken, but not sent"
    alone.sent, alone.sending = 30, 1
    assert not alone.is_over
    alone.sending = 0
    assert alone.is_over


@pytest.mark.parametrize(
    ("now_s", "sent", "sending", "users"),
    [
        (0.0, 0, 0, 3),  # due within AHEAD_S: 0, 1 and 2 s
        (0.0, 1, 1, 3),
        (20.0, 3, 2, 2),  # nothing is due soon
        (94.5, 3, 0, 1),
        (20.0, 3, 0, 1),  # never none: Locust would stop ticking
        (100.0, 3, 4, 5),
    ],
)
def test_users_are_those_that_send_and_one_for_each_row_due_soon(
    now_s: float, sent: int, sending: int, users: int
) -> None:
    due_s = [0.0, 1.0, 2.0, 100.0]
    assert users_needed(due_s, [TraceProgress(sent, sending)], now_s) == users


def test_every_worker_gets_as_many_users_as_the_busiest_needs() -> None:
    due_s = [0.0, 1.0, 2.0, 3.0, 100.0]  # rows 0, 2, 4 and rows 1, 3
    idle, busy = TraceProgress(sent=3), TraceProgress(sent=1, sending=4)
    assert users_needed(due_s, [idle, busy], 0.0) == 2 * (4 + 1)


def test_the_users_follow_the_bursts_of_a_trace_and_stay_bounded() -> None:
    due_s = due_after_start_s(ROWS, SPEED)
    assert due_s[0] == LEAD_S
    nothing = [TraceProgress()]
    assert users_needed(due_s, nothing, due_s[-1]) == 30
    assert users_needed([0.0] * 10_000, nothing, 0.0) == USERS_MAX
    assert users_needed([0.0, AHEAD_S + 1.0], nothing, 0.0) == 1


def test_users_of_several_processes_share_a_data_set_between_them() -> None:
    def ids(part: int, parts: int, count: int) -> list[list[int]]:
        share = DataSetShare(DATA_SETS["16k"], DEMO, 5, 1 / 16, part, parts)
        return [share.take().prompt_ids.tolist() for _ in range(count)]

    whole = ids(0, 1, 6)
    assert whole == [
        prompt for pair in zip(ids(0, 2, 3), ids(1, 2, 3), strict=True) for prompt in pair
    ]
    share = DataSetShare(DATA_SETS["16k"], DEMO, 5, 1 / 16)
    brought = [one.prompt_ids.tolist() for one in share.bringing()]
    assert all(len(prefix) == 512 for prefix in brought)
    assert all(prompt[:512] in brought and len(prompt) == 1_024 for prompt in whole)
    assert {one.output_tokens for one in share.bringing()} == {1}
    assert share.take().output_tokens == 32


def test_a_data_set_that_does_not_fit_says_at_which_scale_it_would() -> None:
    problem = data_set_too_long(DATA_SETS["128k"], 1.0, DEMO) or ""
    assert "131,584 tokens" in problem and "8,192" in problem
    offered = float(problem.rpartition(" ")[2])
    assert 0.05 < offered < 0.0625 and data_set_too_long(DATA_SETS["128k"], offered, DEMO) is None
