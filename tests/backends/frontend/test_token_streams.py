"""Tokens by letter: in order, complete or noticed, and one request's trouble is nobody else's."""

from __future__ import annotations

import contextlib
import random
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.errors import WorkerUnavailable
from backends.frontend.token_streams import TokenStream, TokenStreams
from backends.text.text_stream import Emission
from backends.workers.protocol import (
    FirstToken,
    Heartbeat,
    Stop,
    Tokens,
    TokenUpdate,
    WorkerMessage,
    WorkerOutbox,
    open_outbox,
)

LIFE = "life-1"


def update(request_id: str, before: int, *token_ids: int) -> TokenUpdate:
    text = "".join(f"<{token_id}>" for token_id in token_ids)
    return TokenUpdate(request_id, before, list(token_ids), text, [], -1)


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[TokenStreams]:
    made = TokenStreams(f"ipc://{tmp_path}/{uuid.uuid4().hex[:8]}", messages_per_s_max=500)
    yield made
    made.close()


@pytest.fixture
def outbox() -> Iterator[WorkerOutbox]:
    made = open_outbox()
    yield made
    made.close()


class Receiver:
    """What was delivered of one stream."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.deliveries: list[tuple[int, ...]] = []

    def __call__(self, incarnation: str, emission: Emission) -> None:
        assert incarnation == LIFE
        self.deliveries.append(tuple(emission.token_ids))
        self.add(emission)

    def add(self, emission: Emission) -> None:
        self.ids += emission.token_ids
        self.text += emission.text


@pytest.mark.parametrize("is_paced", [True, False])
def test_every_stream_gets_its_tokens_once_and_in_order(
    streams: TokenStreams, outbox: WorkerOutbox, seed: int, is_paced: bool
) -> None:
    chance = random.Random(seed)
    names = [f"r{number}" for number in range(8)]
    sent: dict[str, list[int]] = {name: [] for name in names}
    receivers = {name: Receiver() for name in names}
    with contextlib.ExitStack() as opened:
        reading = {
            name: opened.enter_context(streams.reading(name, receivers[name], is_paced))
            for name in names
        }
        for _ in range(300):
            updates = []
            for name in chance.sample(names, chance.randint(1, len(names))):
                new = [chance.randrange(1000) for _ in range(chance.randint(1, 3))]
                updates.append(update(name, len(sent[name]), *new))
                sent[name] += new
            outbox.send(streams.address, Tokens(LIFE, updates))
        for name, stream in reading.items():
            for emission in stream.rest(len(sent[name])):
                receivers[name].add(emission)
    assert {name: receivers[name].ids for name in names} == sent
    for name in names:
        assert receivers[name].text == "".join(f"<{token}>" for token in sent[name])


def test_tokens_that_come_within_the_gap_share_a_message_and_none_waits_longer() -> None:
    receiver = Receiver()
    stream = TokenStream("a", receiver, is_paced=True)
    assert stream.deliver_due(0.0, gap_s=0.1) is None, "nothing has come"
    for number in range(20):  # a token every 30 ms
        stream.take(LIFE, update("a", number, number))
        stream.deliver_due(number * 0.03, gap_s=0.1)
    assert receiver.deliveries[0] == (0,), "the first one does not wait"
    assert {len(ids) for ids in receiver.deliveries[1:]} == {4}
    last_s = 16 * 0.03
    assert stream.deliver_due(last_s + 0.09, gap_s=0.1) == pytest.approx(0.01)
    assert stream.deliver_due(last_s + 0.1, gap_s=0.1) is None
    assert receiver.ids == list(range(20))


def test_a_stream_whose_client_chose_an_interval_is_not_paced() -> None:
    receiver = Receiver()
    stream = TokenStream("a", receiver, is_paced=False)
    for number in range(3):
        stream.take(LIFE, update("a", number, number))
        assert stream.deliver_due(number * 0.001, gap_s=0.1) is None
    assert receiver.deliveries == [(0,), (1,), (2,)]


def test_what_waits_is_delivered_when_it_is_due_even_if_no_letter_comes(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    arrived = threading.Event()
    seen: list[int] = []

    def deliver(_: str, emission: Emission) -> None:
        seen.extend(emission.token_ids)
        if len(seen) == 2:
            arrived.set()

    with streams.reading("a", deliver, is_paced=True):
        outbox.send(streams.address, Tokens(LIFE, [update("a", 0, 1)]))
        outbox.send(streams.address, Tokens(LIFE, [update("a", 1, 2)]))
        assert arrived.wait(10)
    assert seen == [1, 2]


def test_what_waits_at_the_end_is_handed_over_and_not_delivered() -> None:
    receiver = Receiver()
    stream = TokenStream("a", receiver, is_paced=True)
    for number in range(3):
        stream.take(LIFE, update("a", number, number))
        stream.deliver_due(0.0, gap_s=1.0)
    assert [tuple(emission.token_ids) for emission in stream.rest(3)] == [(1,), (2,)]
    assert stream.deliver_due(9.0, gap_s=0.0) is None
    assert receiver.deliveries == [(0,)]


def test_a_lost_letter_is_noticed_and_nothing_after_it_is_delivered() -> None:
    receiver = Receiver()
    stream = TokenStream("a", receiver, is_paced=True)
    for before, token_id in ((0, 1), (2, 3), (3, 4)):
        stream.take(LIFE, update("a", before, token_id))
        stream.deliver_due(before, gap_s=0.0)
    assert receiver.deliveries == [(1,)]
    with pytest.raises(WorkerUnavailable, match="token 1 of a is missing, 2 came"):
        stream.rest(4)


def test_letters_that_never_come_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.frontend.token_streams.LETTERS_S_MAX", 0.01)
    stream = TokenStream("a", Receiver(), is_paced=True)
    stream.take(LIFE, update("a", 0, 1))
    with pytest.raises(WorkerUnavailable, match="1 of 2 tokens of a arrived"):
        stream.rest(2)


def test_a_failed_delivery_reaches_the_one_who_waits_and_no_other_stream(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    good = Receiver()

    def fail(_: str, emission: Emission) -> None:
        raise ValueError(f"no room for {emission.token_ids}")

    with (
        streams.reading("bad", fail, is_paced=False) as failing,
        streams.reading("good", good, is_paced=False) as working,
    ):
        outbox.send(streams.address, Tokens(LIFE, [update("bad", 0, 1), update("good", 0, 2)]))
        outbox.send(streams.address, Tokens(LIFE, [update("bad", 1, 1), update("good", 1, 3)]))
        for emission in working.rest(2):
            good.add(emission)
        with pytest.raises(ValueError, match="no room"):
            failing.rest(2)
    assert good.ids == [2, 3]


def test_tokens_for_nobody_and_other_letters_are_dropped(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    receiver = Receiver()
    with streams.reading("a", receiver, is_paced=False) as stream:
        outbox.send(streams.address, Stop("a", "not for a front"))
        outbox.send(streams.address, Tokens(LIFE, [update("gone", 0, 1), update("a", 0, 1)]))
        for emission in stream.rest(1):
            receiver.add(emission)
    assert receiver.ids == [1]


def test_a_first_token_reaches_whoever_expects_it_and_nobody_else(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    came: list[FirstToken] = []
    receiver = Receiver()
    with (
        streams.expecting("a", came.append),
        streams.reading("b", receiver, is_paced=False) as later,
    ):
        outbox.send(streams.address, FirstToken("gone", 1, 0))
        outbox.send(streams.address, FirstToken("a", 2, 64))
        outbox.send(streams.address, Tokens(LIFE, [update("b", 0, 3)]))
        later.rest(1)
    assert came == [FirstToken("a", 2, 64)]


def test_any_word_of_a_worker_is_a_sign_of_life_of_the_requests_that_it_speaks_of(
    streams: TokenStreams,
) -> None:
    """Straight into the inbox's own thread's method: what counts is who is spoken of."""

    def hear(letter: WorkerMessage) -> None:
        assert before is not None
        streams._heard["r"].at_s = before - 100.0
        streams._on_letters([letter])

    assert streams.heard_s("r") is None
    with streams.expecting("r", lambda letter: None):
        before = streams.heard_s("r")
        for letter in (FirstToken("r", 1, 0), Heartbeat(LIFE, ["q", "r"])):
            hear(letter)
            assert streams.heard_s("r") >= before  # type: ignore[operator]
        hear(Heartbeat(LIFE, ["q"]))
        assert streams.heard_s("r") < before  # type: ignore[operator]
    with streams.reading("r", Receiver(), is_paced=False):
        before = streams.heard_s("r")
        hear(Tokens(LIFE, [update("r", 0, 5)]))
        assert streams.heard_s("r") >= before  # type: ignore[operator]
    assert streams.heard_s("r") is None and streams.heard_s("q") is None
