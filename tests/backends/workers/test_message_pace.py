"""Tokens of short steps leave in one message: none is lost, and none waits for a long step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.text.tokenizer import Tokenizer
from backends.workers.decode_worker import MessagePace
from backends.workers.protocol import GAP_S_MAX, Tokens, TokenUpdate, gap_s
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import Asked, Pair, pairs, prompt
from tests.backends.workers.test_preemption import wanted

GAP_S = 0.032


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch)


def test_short_steps_wait_until_the_gap_is_over_and_then_begin_a_new_one() -> None:
    pace = MessagePace()
    found = [pace.is_due("a", GAP_S, 0.005, step * 0.005) for step in range(15)]
    assert [step for step, is_due in enumerate(found) if is_due] == [0, 7, 14]


@pytest.mark.parametrize("step_s", [0.0, 0.009, 0.5])
def test_a_step_that_is_long_beside_the_gap_or_of_unknown_length_is_told_at_once(
    step_s: float,
) -> None:
    pace = MessagePace()
    assert all(pace.is_due("a", GAP_S, step_s, step * 0.001) for step in range(5))


def test_frontends_do_not_wait_for_each_other() -> None:
    pace = MessagePace()
    assert pace.is_due("a", GAP_S, 0.001, 1.0)
    assert pace.is_due("b", GAP_S, 0.001, 1.01)
    assert not pace.is_due("a", GAP_S, 0.001, 1.02)
    assert not pace.is_due("b", GAP_S, 0.001, 1.04)
    assert pace.is_due("a", GAP_S, 0.001, 1.04)


def test_a_frontend_that_comes_and_goes_leaves_nothing_that_grows() -> None:
    pace = MessagePace()
    for number in range(10 * pace.INBOXES_MAX):
        assert pace.is_due(f"frontend {number}", GAP_S, 0.001, 0.0)
        assert len(pace._sent_s) <= pace.INBOXES_MAX


def test_the_gap_grows_with_the_streams_up_to_a_limit() -> None:
    assert gap_s(1, 500.0) == 0.002
    assert gap_s(16, 500.0) == 0.032
    assert gap_s(10_000, 500.0) == GAP_S_MAX


class Inboxes:
    """Keeps what is sent to frontends; the rest goes on."""

    def __init__(self, outbox: Any) -> None:
        self.updates: list[TokenUpdate] = []
        self._outbox = outbox

    def send(self, address: str, message: Any) -> bool:
        if isinstance(message, Tokens):
            self.updates += message.updates
            return True
        return bool(self._outbox.send(address, message))


@pytest.mark.slow
@pytest.mark.parametrize("messages_per_s_max", [1.0, 10.0, 1e6])
def test_messages_and_reply_bring_each_token_once_in_order_with_its_text(
    messages_per_s_max: float, pair: Pair
) -> None:
    process: Any = pair.decode.process
    process.outbox = inboxes = Inboxes(process.outbox)
    prompts = [prompt(number, 70) for number in range(3)]
    asked = []
    for number, ids in enumerate(prompts):
        stop_words = ("no such words",) if number == 1 else ()
        each = Asked(pair, f"m{number}", ids, max_tokens=40, stop_words=stop_words)
        each.messages_per_s_max = messages_per_s_max
        pair.submit(each)
        asked.append(each)
    tokenizer = Tokenizer.load(DEMO)
    for ids, each in zip(prompts, asked, strict=True):
        last = each.wait()
        updates = [update for update in inboxes.updates if update.request_id == each.request_id]
        by_message: list[int] = []
        for update in updates:
            assert update.tokens_before == len(by_message)
            by_message += update.token_ids
        assert each.decode_reply is not None and each.decode_reply.tokens_before == len(by_message)
        answer = [last[0], *by_message, *last[1:]]
        assert answer == wanted(ids, 40)
        text = "".join(update.text for update in updates) + each.decode_reply.text
        assert tokenizer.decode(answer).endswith(text.lstrip("\ufffd"))


def test_no_stream_starves_where_an_engine_says_tokens_one_request_after_the_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    process: Any = pair.decode.process
    process.outbox = inboxes = Inboxes(process.outbox)
    whole = pair.decode.decoded

    def one_by_one(tokens_of: Any) -> None:
        monkeypatch.setattr(process.steps, "recent_s", 1e-6)  # short, however busy the machine is
        for each in tokens_of:
            whole([each])

    monkeypatch.setattr(pair.decode, "decoded", one_by_one)
    asked = [Asked(pair, f"s{number}", prompt(number, 70), max_tokens=100) for number in range(3)]
    for each in asked:
        each.messages_per_s_max = 1e3
        pair.submit(each)
    for each in asked:
        each.wait()
        updates = [one for one in inboxes.updates if one.request_id == each.request_id]
        assert len(updates) > 10, f"{each.request_id} had {len(updates)} messages"
