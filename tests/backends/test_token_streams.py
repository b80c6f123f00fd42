"""Tokens by letter: in order, complete or noticed, and one request's trouble is nobody else's."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.errors import WorkerUnavailable
from backends.inbox import Outbox
from backends.text_stream import Emission
from backends.token_streams import TokenStream, TokenStreams
from backends.worker_protocol import Stop, Tokens, TokenUpdate

LIFE = "life-1"


def update(request_id: str, before: int, *token_ids: int) -> TokenUpdate:
    text = "".join(f"<{token_id}>" for token_id in token_ids)
    return TokenUpdate(request_id, before, list(token_ids), text, [], -1)


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[TokenStreams]:
    made = TokenStreams(f"ipc://{tmp_path}/{uuid.uuid4().hex[:8]}")
    yield made
    made.close()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox()
    yield made
    made.close()


def test_every_stream_gets_its_tokens_in_order(
    streams: TokenStreams, outbox: Outbox, seed: int
) -> None:
    chance = random.Random(seed)
    names = [f"r{number}" for number in range(8)]
    sent: dict[str, list[int]] = {name: [] for name in names}
    got: dict[str, list[int]] = {name: [] for name in names}
    texts: dict[str, str] = dict.fromkeys(names, "")

    def deliver(name: str, emission: Emission) -> None:
        got[name] += emission.token_ids
        texts[name] += emission.text

    opened = [
        streams.reading(name, lambda _, emission, name=name: deliver(name, emission))
        for name in names
    ]
    reading = [each.__enter__() for each in opened]
    for _ in range(200):
        updates = []
        for name in chance.sample(names, chance.randint(1, len(names))):
            new = [chance.randrange(1000) for _ in range(chance.randint(1, 3))]
            updates.append(update(name, len(sent[name]), *new))
            sent[name] += new
        outbox.send(streams.address, Tokens(LIFE, updates))
    for name, stream in zip(names, reading, strict=True):
        stream.wait(len(sent[name]))
    for each in opened:
        each.__exit__(None, None, None)
    assert got == sent
    assert texts == {name: "".join(f"<{token}>" for token in sent[name]) for name in names}


def test_what_waits_is_delivered_together() -> None:
    delivered: list[Emission] = []
    stream = TokenStream("a", lambda _, emission: delivered.append(emission))
    stream.take(LIFE, [update("a", 0, 1), update("a", 1, 2, 3)])
    assert [emission.token_ids for emission in delivered] == [(1, 2, 3)]
    stream.wait(3)


def test_a_lost_letter_is_noticed_and_nothing_after_it_is_delivered() -> None:
    delivered: list[Emission] = []
    stream = TokenStream("a", lambda _, emission: delivered.append(emission))
    stream.take(LIFE, [update("a", 0, 1)])
    stream.take(LIFE, [update("a", 2, 3)])
    stream.take(LIFE, [update("a", 3, 4)])
    assert [emission.token_ids for emission in delivered] == [(1,)]
    with pytest.raises(WorkerUnavailable, match="token 1 of a is missing, 2 came"):
        stream.wait(4)


def test_letters_that_never_come_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.token_streams.LETTERS_S_MAX", 0.01)
    stream = TokenStream("a", lambda *_: None)
    stream.take(LIFE, [update("a", 0, 1)])
    with pytest.raises(WorkerUnavailable, match="1 of 2 tokens of a arrived"):
        stream.wait(2)


def test_a_failed_delivery_reaches_the_one_who_waits_and_no_other_stream(
    streams: TokenStreams, outbox: Outbox
) -> None:
    got: list[int] = []

    def fail(_: str, emission: Emission) -> None:
        raise ValueError(f"no room for {emission.token_ids}")

    with (
        streams.reading("bad", fail) as bad,
        streams.reading("good", lambda _, emission: got.extend(emission.token_ids)) as good,
    ):
        outbox.send(streams.address, Tokens(LIFE, [update("bad", 0, 1), update("good", 0, 2)]))
        good.wait(1)
        with pytest.raises(ValueError, match="no room"):
            bad.wait(1)
    assert got == [2]


def test_tokens_for_nobody_and_other_letters_are_dropped(
    streams: TokenStreams, outbox: Outbox
) -> None:
    arrived = threading.Event()
    with streams.reading("a", lambda *_: arrived.set()) as stream:
        outbox.send(streams.address, Stop("a", "not for a front"))
        outbox.send(streams.address, Tokens(LIFE, [update("gone", 0, 1), update("a", 0, 1)]))
        stream.wait(1)
    assert arrived.is_set()
