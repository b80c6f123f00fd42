"""Observations: nothing is lost between threads, and memory is bounded."""

from __future__ import annotations

import threading

from backends.metrics.page import Observations


def test_every_value_of_every_thread_arrives_once_and_in_the_thread_s_order() -> None:
    observations, got = Observations(), []
    threads = [
        threading.Thread(
            target=lambda n=n: [observations.observe(f"m{n}", value) for value in range(5000)]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        got += observations.drain()
    got += observations.drain()
    assert len(got) == 20_000
    for n in range(4):
        assert [each.value for each in got if each.name == f"m{n}"] == list(range(5000))


def test_what_comes_while_it_is_drained_waits_for_the_next_time() -> None:
    observations = Observations()
    observations.observe("a")
    for _ in observations.drain():
        observations.observe("b")
    assert [each.name for each in observations.drain()] == ["b"]


def test_the_oldest_give_way_when_nobody_fetches() -> None:
    observations = Observations(values_max=10)
    for value in range(9):
        observations.observe("m", value)
    assert not observations.is_full
    for value in range(9, 25):
        observations.observe("m", value)
    assert observations.is_full
    assert [each.value for each in observations.drain()] == list(range(15, 25))
    assert not observations.is_full
