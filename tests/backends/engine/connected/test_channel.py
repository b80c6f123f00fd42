"""What worker and connector say to each other: order, deadlines, and who is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.engine.connected import messages as m
from backends.engine.connected.channel import (
    SCHEDULER,
    ChannelError,
    ConnectorHost,
    ConnectorLink,
    rank_name,
)
from mooncake_store.block_keys import block_keys, chain_seed
from tests.backends.engine.connected.listening import WAIT_S, Heard

SEED = chain_seed("print")


class Side:
    """A scheduler and some ranks that answer only when a test says so."""

    def __init__(self, address: str, ranks: int) -> None:
        self.got: list[m.ToConnector] = []
        self._arrived = threading.Condition()
        self.scheduler = ConnectorLink(address, SCHEDULER, self._note)
        self.ranks = [ConnectorLink(address, rank_name(r), self._note) for r in range(ranks)]

    def _note(self, message: m.ToConnector) -> None:
        with self._arrived:
            self.got.append(message)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.got) >= count, WAIT_S), self.got

    def ready(self) -> None:
        for rank, link in enumerate(self.ranks):
            link.send(m.Ready(rank, len(self.ranks), 1024, 16, 8, 64))

    def close(self) -> None:
        for link in (self.scheduler, *self.ranks):
            link.close()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def host(tmp_path: Path, heard: Heard) -> Iterator[ConnectorHost]:
    host = ConnectorHost(f"ipc://{tmp_path}/kv", heard)
    yield host
    host.close()


@pytest.fixture
def side(tmp_path: Path, host: ConnectorHost) -> Iterator[Side]:
    side = Side(f"ipc://{tmp_path}/kv", ranks=2)
    side.ready()
    host.wait_ready(WAIT_S)
    yield side
    side.close()


def stage(request_id: str = "a") -> m.Stage:
    ids = np.arange(100, 150)
    return m.Stage.of(request_id, ids, 16, SEED, "", places=[3, 1, 2, 0], loaded_tokens=32)


def test_a_stage_carries_the_keys_that_everybody_uses() -> None:
    made = stage()
    assert made.keys == block_keys(np.arange(100, 150), 16, SEED)
    assert made.token_count == 50


def test_a_site_reaches_another_process_by_one_variable() -> None:
    site = m.Site("ipc:///x/kv", "/dev/shm/pool", 64, 4096)
    environment = site.to_environment()
    assert all(name.startswith("TLLM") for name in environment)
    assert m.Site.from_environment(environment) == site
    with pytest.raises(RuntimeError, match="is not set"):
        m.Site.from_environment({})


def test_a_stage_is_acknowledged_and_arrives_as_it_was_sent(
    host: ConnectorHost, side: Side
) -> None:
    future = host.stage(stage(), WAIT_S)
    side.wait_for(1)
    assert side.got == [stage()] and not future.done()
    side.scheduler.send(m.Staged("a"))
    assert future.result(WAIT_S) is None


def test_a_refused_stage_says_why(host: ConnectorHost, side: Side) -> None:
    future = host.stage(stage(), WAIT_S)
    side.scheduler.send(m.Refused("a", "its keys are not those of its tokens"))
    with pytest.raises(ChannelError, match="its keys"):
        future.result(WAIT_S)


def test_unstaging_waits_for_the_slowest_rank(host: ConnectorHost, side: Side) -> None:
    future = host.unstage("a", WAIT_S)
    side.wait_for(1)
    side.scheduler.send(m.Unstaged("a", moves=7))
    side.wait_for(3)
    assert side.got[1:] == [m.Drain("a", 7), m.Drain("a", 7)]
    side.ranks[1].send(m.Drained("a", 1))
    other = host.unstage("b", WAIT_S)  # goes its way meanwhile
    side.wait_for(4)
    side.scheduler.send(m.Unstaged("b", moves=0))
    side.wait_for(6)
    for rank in (0, 1):
        side.ranks[rank].send(m.Drained("b", rank))
    other.result(WAIT_S)
    assert not future.done()
    side.ranks[0].send(m.Drained("a", 0))
    assert future.result(WAIT_S) is None


def test_asking_twice_waits_for_the_same_answer(host: ConnectorHost, side: Side) -> None:
    assert host.unstage("a", WAIT_S) is host.unstage("a", WAIT_S)


def test_tokens_are_saved_when_the_slowest_rank_has_them(
    host: ConnectorHost, side: Side, heard: Heard
) -> None:
    zero, one = side.ranks
    zero.send(m.Saved("a", 0, 16))
    zero.send(m.Saved("a", 0, 64))
    zero.send(m.Saved("b", 0, 32))
    one.send(m.Saved("b", 1, 32))
    heard.wait_for("saved", "b", 32)  # so rank 0's earlier words have arrived
    one.send(m.Saved("a", 1, 48))
    heard.wait_for("saved", "a", 48)
    one.send(m.Saved("a", 1, 64))
    heard.wait_for("saved", "a", 64)
    assert [what for what in heard.all if what[:2] == ("saved", "a")] == [
        ("saved", "a", 48),
        ("saved", "a", 64),
    ]


def test_what_nobody_answers_fails_at_its_deadline(host: ConnectorHost, side: Side) -> None:
    futures = [host.stage(stage(), 0.0), host.unstage("b", 0.0)]
    for future in futures:
        with pytest.raises(ChannelError, match="did not answer"):
            future.result(WAIT_S)


def test_a_broken_connector_fails_everything_with_its_reason(
    host: ConnectorHost, side: Side, heard: Heard
) -> None:
    future = host.stage(stage(), WAIT_S)
    side.ranks[0].send(m.Broken("a page has 10 bytes, not 20"))
    with pytest.raises(ChannelError, match="10 bytes"):
        future.result(WAIT_S)
    heard.wait_for("broken", "a page has 10 bytes, not 20")
    for ask in (lambda: host.stage(stage(), 1.0), lambda: host.wait_ready(1.0)):
        with pytest.raises(ChannelError, match="10 bytes"):
            ask()


def test_ranks_that_are_missing_are_named(host: ConnectorHost, tmp_path: Path) -> None:
    link = ConnectorLink(f"ipc://{tmp_path}/kv", rank_name(1), lambda message: None)
    link.send(m.Ready(1, 2, 1024, 16, 8, 64))
    with pytest.raises(ChannelError, match="ranks that did"):
        host.wait_ready(0.0)
    link.close()


def test_closing_fails_what_is_waited_for(tmp_path: Path, heard: Heard) -> None:
    host = ConnectorHost(f"ipc://{tmp_path}/kv", heard)
    future = host.stage(stage(), WAIT_S)
    host.close()
    with pytest.raises(ChannelError, match="closed"):
        future.result(WAIT_S)
    for ask in (lambda: host.stage(stage(), WAIT_S), lambda: host.unstage("b", WAIT_S)):
        with pytest.raises(ChannelError, match="closed"):
            ask()
