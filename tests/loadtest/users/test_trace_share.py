"""A trace among workers, at its own times, and how many users it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.trace import read_trace
from loadtest.users.trace_share import (
    AHEAD_S,
    LEAD_S,
    USERS_MAX,
    TraceProgress,
    TraceShare,
    due_after_start_s,
    users_needed,
)

ROWS = read_trace(Path(__file__).parents[2] / "data" / "conversation_turns.jsonl", 30)
SCALE, SPEED = 0.05, 2.0
SOURCE = TokenSource(2_048, (), seed=3)


def share(part: int = 0, parts: int = 1) -> TraceShare:
    return TraceShare(ROWS, SOURCE, SCALE, SPEED, part, parts)


def test_alone_it_sends_what_a_replay_sends_at_the_same_times() -> None:
    taken = list(iter(share().take, None))
    for ours, theirs in zip(taken, plan(ROWS, SOURCE, SCALE, SPEED), strict=True):
        assert (ours.index, ours.line, pytest.approx(ours.due_s), ours.output_tokens) == (
            theirs.index, theirs.line, theirs.due_s + LEAD_S, theirs.output_tokens,
        )  # fmt: skip
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
