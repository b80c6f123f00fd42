"""Tokens by message: each to its request, and one request's trouble is nobody else's."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.frontend.lifecycle.attempts import Attempts
from backends.frontend.lifecycle.events import (
    FirstText,
    LifecycleEvent,
    PrefillReplied,
    Routed,
    Send,
    TokensArrived,
    Understood,
)
from backends.frontend.lifecycle.machine import State, step
from backends.frontend.token_streams import TokenStreams
from backends.text.text_stream import OutputDelta
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

INCARNATION = "incarnation-1"


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
    """A request that a decode worker is at; what its client was sent."""

    def __init__(self, is_paced: bool = False, tokens: int = 0) -> None:
        self.state = State()
        self.ids: list[int] = []
        self.text = ""
        self.messages = 0
        self.firsts: list[tuple[int, FirstToken]] = []
        self.events: list[LifecycleEvent] = []
        self.is_complete = threading.Event()
        self._tokens = tokens  # to come
        first = FirstText(OutputDelta((), ""), "", 0)
        self.post(Understood(Attempts(3, 0.0, 600.0), is_paced, 0.0))
        self.post(Routed(1, ("p", "p"), ("d", "d"), 0.0))
        self.post(PrefillReplied(1, first, 0.0, {}, 0.0))

    def post(self, event: LifecycleEvent) -> None:
        self.events.append(event)
        self.state, actions = step(self.state, event)
        for action in actions:
            if isinstance(action, Send):
                self.messages += 1
                self.ids += action.delta.token_ids
                self.text += action.delta.text
        if self._tokens and len(self.ids) >= self._tokens:
            self.is_complete.set()

    def first_token(self, attempt: int, message: FirstToken) -> None:
        self.firsts.append((attempt, message))
        self.is_complete.set()


@pytest.mark.parametrize("is_paced", [True, False])
def test_every_request_gets_its_tokens_once_and_in_order(
    streams: TokenStreams, outbox: WorkerOutbox, seed: int, is_paced: bool
) -> None:
    chance = random.Random(seed)
    names = [f"r{number}" for number in range(8)]
    sent: dict[str, list[int]] = {name: [] for name in names}
    steps = []
    for _ in range(300):
        updates = []
        for name in chance.sample(names, chance.randint(1, len(names))):
            new = [chance.randrange(1000) for _ in range(chance.randint(1, 3))]
            updates.append(update(name, len(sent[name]), *new))
            sent[name] += new
        steps.append(Tokens(INCARNATION, updates))
    receivers = {name: Receiver(is_paced, len(sent[name])) for name in names}
    for name, receiver in receivers.items():
        streams.listen(name, receiver, 1)
    for tokens in steps:
        outbox.send(streams.address, tokens)
    for receiver in receivers.values():
        assert receiver.is_complete.wait(30.0)
    assert {name: receivers[name].ids for name in names} == sent
    for name in names:
        assert receivers[name].text == "".join(f"<{token}>" for token in sent[name])


def test_what_waits_is_sent_when_it_is_due_even_if_no_message_comes(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    receiver = Receiver(is_paced=True, tokens=2)
    streams.listen("a", receiver, 1)
    outbox.send(streams.address, Tokens(INCARNATION, [update("a", 0, 1)]))
    outbox.send(streams.address, Tokens(INCARNATION, [update("a", 1, 2)]))
    assert receiver.is_complete.wait(30.0)
    assert receiver.ids == [1, 2]


def test_tokens_of_one_request_that_wait_together_are_one_event(streams: TokenStreams) -> None:
    """A step of the machine for each message would cost more than the tokens."""
    receiver = Receiver()
    streams.listen("a", receiver, 1)
    streams._on_messages([Tokens(INCARNATION, [update("a", n, n)]) for n in range(3)])
    [arrived] = [event for event in receiver.events if isinstance(event, TokensArrived)]
    assert [before for before, _ in arrived.updates] == [0, 1, 2]
    assert receiver.messages == 1 and receiver.ids == [0, 1, 2]


def test_a_request_whose_tokens_fail_costs_no_other_one_a_token(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    bad, good = Receiver(), Receiver(tokens=2)
    streams.listen("bad", bad, 1)
    streams.listen("good", good, 1)
    outbox.send(streams.address, Tokens(INCARNATION, [update("bad", 5, 1), update("good", 0, 2)]))
    outbox.send(streams.address, Tokens(INCARNATION, [update("bad", 6, 1), update("good", 1, 3)]))
    assert good.is_complete.wait(30.0)
    assert good.ids == [2, 3] and bad.ids == [] and bad.state.attempt.number == 2


def test_tokens_for_nobody_and_other_messages_are_dropped(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    receiver, gone = Receiver(tokens=1), Receiver()
    streams.listen("a", receiver, 1)
    streams.listen("gone", gone, 1)
    streams.forget("gone")
    outbox.send(streams.address, Stop("a", "not for a frontend"))
    outbox.send(streams.address, Tokens(INCARNATION, [update("gone", 0, 1), update("a", 0, 1)]))
    assert receiver.is_complete.wait(30.0)
    assert receiver.ids == [1] and not gone.ids


def test_a_first_token_reaches_whoever_expects_it_and_nobody_else(
    streams: TokenStreams, outbox: WorkerOutbox
) -> None:
    receiver, other = Receiver(), Receiver()
    streams.listen("a", receiver, 3)
    streams.listen("b", other, 1)
    outbox.send(streams.address, FirstToken("gone", 1, 0))
    outbox.send(streams.address, FirstToken("a", 2, 64))
    assert receiver.is_complete.wait(30.0)
    assert receiver.firsts == [(3, FirstToken("a", 2, 64))] and not other.firsts


def test_any_word_of_a_worker_is_a_sign_of_life_of_the_requests_that_it_speaks_of(
    streams: TokenStreams,
) -> None:
    """Straight into the inbox's own thread's method: what counts is who is spoken of."""

    def hear(message: WorkerMessage) -> None:
        assert before is not None
        streams._streams["r"].seen_s = before - 100.0
        streams._on_messages([message])

    assert streams.seen_s("r") is None
    streams.listen("r", Receiver(), 1)
    before = streams.seen_s("r")
    for message in (
        FirstToken("r", 1, 0),
        Heartbeat(INCARNATION, ["q", "r"]),
        Tokens(INCARNATION, [update("r", 0, 5)]),
    ):
        hear(message)
        assert streams.seen_s("r") >= before  # type: ignore[operator]
    hear(Heartbeat(INCARNATION, ["q"]))
    assert streams.seen_s("r") < before  # type: ignore[operator]
    streams.called("r")
    assert streams.seen_s("r") >= before  # type: ignore[operator]
    streams.forget("r")
    assert streams.seen_s("r") is None and streams.seen_s("q") is None


def test_requests_that_are_still_in_prefill_do_not_slow_the_streams_that_decode(
    streams: TokenStreams,
) -> None:
    decoding = Receiver()
    streams.listen("r0", decoding, 1)
    streams.called("r0")
    for number in range(1, 40):
        streams.listen(f"r{number}", Receiver(), 1)
    streams._on_messages([Tokens(INCARNATION, [update("r0", 0, 7)])])
    arrived = decoding.events[-1]
    assert isinstance(arrived, TokensArrived) and arrived.gap_s == 1 / 500
    for number in range(1, 5):
        streams.called(f"r{number}")
    streams.called("r4")  # a worker may be called again
    streams.forget("r1")
    streams.forget("r1")
    streams.forget("r39")
    streams._on_messages([Tokens(INCARNATION, [update("r0", 1, 8)])])
    arrived = decoding.events[-1]
    assert isinstance(arrived, TokensArrived) and arrived.gap_s == 4 / 500
