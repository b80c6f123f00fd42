"""Faults follow from the seed, meet what runs, are undone, and wait for hosts that recover."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos_serve import fault_injector
from tests.chaos_serve.fault_injector import KINDS, FaultInjector

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
    monkeypatch.setattr(fault_injector, "PAUSE_S", 0.0)
    monkeypatch.setattr(fault_injector, "LOOK_S", 0.001)
    for name in ("DARK_S", "FROZEN_S", "NETWORK_S"):
        monkeypatch.setattr(fault_injector, name, (0.001, 0.002))


def injected(fleet: FakeFleet, seed: int, count: int) -> FaultInjector:
    injector = FaultInjector(fleet, seed)  # type: ignore[arg-type]
    for _ in range(count):
        injector._inject(lambda _: None)
        injector._make_undone(float("inf"))
    return injector


def test_the_same_seed_injects_the_same_faults(seed: int) -> None:
    one, other = injected(FakeFleet(), seed, 40), injected(FakeFleet(), seed, 40)
    assert [each.what for each in one.injected] == [each.what for each in other.injected]
    different = injected(FakeFleet(), seed + 1, 40)
    assert [each.what for each in one.injected] != [each.what for each in different.injected]


def test_every_kind_comes_once_before_any_comes_again(seed: int) -> None:
    injector = injected(FakeFleet(), seed, len(KINDS))
    assert Counter(each.kind for each in injector.injected) == Counter(KINDS)


def test_a_process_that_does_not_run_gets_no_fault(seed: int) -> None:
    fleet = FakeFleet()
    fleet.hosts["a"].running.remove("directory")
    injector = injected(fleet, seed, 2 * len(KINDS))
    assert not [each for each in injector.injected if "directory" in each.kind]


def test_no_child_of_a_launcher_is_killed_more_often_than_it_starts_it_again(seed: int) -> None:
    injector = FaultInjector(FakeFleet(), seed, ("kill node", "loss"))  # type: ignore[arg-type]
    for _ in range(50):
        injector._inject(lambda _: None)
    counts = Counter(each.kind for each in injector.injected)
    assert (
        counts["kill node"] == fault_injector.KILLS_MAX
        and counts["loss"] == 50 - fault_injector.KILLS_MAX
    )


def test_everything_is_undone_and_recovered_at_the_end(quick: None, seed: int) -> None:
    fleet = FakeFleet()
    injector = FaultInjector(fleet, seed)  # type: ignore[arg-type]
    injector.run(2.5, lambda _: None)
    assert len(injector.injected) > 3 and fleet.open == []
    assert all(each.recovery_s is not None for each in injector.injected)


def test_the_next_fault_waits_while_two_hosts_recover(
    quick: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(fault_injector, "RECOVERED_S_MAX", 0.1)
    fleet = FakeFleet()
    fleet.problem = "b: no decode_b_0"
    injector = FaultInjector(fleet, seed)  # type: ignore[arg-type]
    injector.run(2.0, lambda _: None)
    hosts = [set(each.hosts) for each in injector.injected]
    assert len(set().union(*hosts[:-1])) <= 1, "it injected although two hosts were recovering"
    assert all(each.recovery_s is None and each.problem for each in injector.injected)
    assert injector.watch.problems()
