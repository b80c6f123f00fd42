"""Strikes follow from the seed, meet what runs, are undone, and wait for hosts that recover."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos_serve import strikes
from tests.chaos_serve.strikes import KINDS, Striker

RUNNING = {
    "a": [
        "etcd",
        "directory",
        "node a0",
        "triton frontend",
        "conductor",
        "triton prefill_a_0",
        "prefill_a_0",
    ],
    "b": ["etcd", "node b0", "triton decode_b_0", "decode_b_0"],
}


class FakeFault:
    def __init__(self, fleet: FakeFleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        fleet.open.append(name)

    def undo(self) -> None:
        self.fleet.open.remove(self.name)

    go_on = undo


class FakeHost:
    def __init__(self, fleet: FakeFleet, name: str) -> None:
        self.fleet, self.name, self.running = fleet, name, list(RUNNING[name])

    def named(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.running]

    def kill(self, name: str) -> None:
        assert name in self.running
        self.fleet.seen.append(f"kill {name}")

    def freeze(self, name: str) -> FakeFault:
        assert name in self.running
        return FakeFault(self.fleet, f"freeze {name}")

    def kill_all(self) -> None:
        self.fleet.open.append(f"dark {self.name}")

    def start(self) -> None:
        self.fleet.open.remove(f"dark {self.name}")


class FakeFleet:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open: list[str] = []
        self.problem = ""
        self.hosts = {name: FakeHost(self, name) for name in RUNNING}

        def fault(*words: Any, **_: Any) -> FakeFault:
            return FakeFault(self, " ".join(map(str, words)))

        self.namespaces = SimpleNamespace(
            cut=fault, cut_one_way=fault, loss=fault, rate=fault, link=fault
        )

    def why_not_whole(self, _: str) -> str:
        return self.problem


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes, "PAUSE_S", 0.0)
    monkeypatch.setattr(strikes, "LOOK_S", 0.001)
    for name in ("DARK_S", "FROZEN_S", "NETWORK_S"):
        monkeypatch.setattr(strikes, name, (0.001, 0.002))


def struck(fleet: FakeFleet, seed: int, count: int) -> Striker:
    striker = Striker(fleet, seed)  # type: ignore[arg-type]
    for _ in range(count):
        striker._strike(lambda _: None)
        striker._make_undone(float("inf"))
    return striker


def test_the_same_seed_strikes_the_same(seed: int) -> None:
    one, other = struck(FakeFleet(), seed, 40), struck(FakeFleet(), seed, 40)
    assert [each.what for each in one.strikes] == [each.what for each in other.strikes]
    different = struck(FakeFleet(), seed + 1, 40)
    assert [each.what for each in one.strikes] != [each.what for each in different.strikes]


def test_every_kind_comes_once_before_any_comes_again(seed: int) -> None:
    striker = struck(FakeFleet(), seed, len(KINDS))
    assert Counter(each.kind for each in striker.strikes) == Counter(KINDS)


def test_what_does_not_run_just_now_is_not_struck(seed: int) -> None:
    fleet = FakeFleet()
    fleet.hosts["a"].running.remove("directory")
    striker = struck(fleet, seed, 2 * len(KINDS))
    assert not [each for each in striker.strikes if "directory" in each.kind]


def test_no_child_of_a_launcher_is_killed_more_often_than_it_starts_it_again(seed: int) -> None:
    striker = Striker(FakeFleet(), seed, ("kill node", "loss"))  # type: ignore[arg-type]
    for _ in range(50):
        striker._strike(lambda _: None)
    counts = Counter(each.kind for each in striker.strikes)
    assert counts["kill node"] == strikes.KILLS_MAX and counts["loss"] == 50 - strikes.KILLS_MAX


def test_everything_is_undone_and_recovered_at_the_end(quick: None, seed: int) -> None:
    fleet = FakeFleet()
    striker = Striker(fleet, seed)  # type: ignore[arg-type]
    striker.run(2.5, lambda _: None)
    assert len(striker.strikes) > 3 and fleet.open == []
    assert all(each.recovery_s is not None for each in striker.strikes)


def test_the_next_strike_waits_while_two_hosts_recover(
    quick: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(strikes, "RECOVERED_S_MAX", 0.1)
    fleet = FakeFleet()
    fleet.problem = "b: no decode_b_0"
    striker = Striker(fleet, seed)  # type: ignore[arg-type]
    striker.run(2.0, lambda _: None)
    hosts = [set(each.hosts) for each in striker.strikes]
    assert len(set().union(*hosts[:-1])) <= 1, "it struck although two hosts were recovering"
    assert all(each.recovery_s is None and each.problem for each in striker.strikes)
    assert striker.watch.problems()
