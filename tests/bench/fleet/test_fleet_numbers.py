"""The benchmark of a fleet promises each number once, and what cannot be measured says why."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import cross_host
from bench.fleet import __main__ as bench
from bench.fleet.leader import LeaderChange
from loadtest.harness.server import CannotMeasure

PROMISED = {
    "frontends_ttft_4_over_1": ("<=", 1.05),
    "leader_change_s": ("<=", 5.0),
    "leader_change_s_worst": ("<=", 8.0),
    "handover_cross_host_over_raw_nixl_tcp": (">=", 0.7),
    "chaos_finished_share": (">=", 0.99),
    "chaos_wrong_tokens": ("<=", 0.0),
}
REPORT = {
    "outcomes": {"finished": 99, "unavailable": 1},
    "finished_share": 0.99,
    "wrong_tokens": 0,
    "broken": [],
}


def refuse() -> None:
    raise CannotMeasure("not here")


def test_every_promised_number_is_there_or_says_why_not() -> None:
    numbers = bench.FleetNumbers()
    for name in PROMISED:
        numbers.measure((name,), refuse)
    targets = numbers.targets()
    assert {t.name: (t.op, t.goal) for t in targets} == PROMISED
    assert all(t.value is None and t.why == "not here" for t in targets)


def test_without_traces_the_simulated_number_says_what_to_name() -> None:
    numbers = bench.FleetNumbers()
    numbers.measure(("frontends_ttft_4_over_1",), lambda: numbers.frontends(None))
    assert "--traces" in numbers.why["frontends_ttft_4_over_1"]


def test_without_namespaces_the_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "why_no_namespaces", lambda: "needs root")
    numbers = bench.FleetNumbers()
    monkeypatch.setattr(cross_host, "why_no_namespaces", lambda: "needs root")
    numbers.measure(("handover_cross_host_over_raw_nixl_tcp",), lambda: numbers.handover(1))
    numbers.measure(("leader_change_s", "leader_change_s_worst"), lambda: numbers.leader(1, 1))
    numbers.measure(("chaos_wrong_tokens",), lambda: numbers.chaos(10.0, 1))
    assert set(numbers.why.values()) == {"needs root"} and len(numbers.why) == 4


@pytest.mark.parametrize(
    ("changes_s", "expected"),
    [([4.0, 3.0, 7.5], {"leader_change_s": 4.0, "leader_change_s_worst": 7.5}), ([4.0, None], {})],
)
def test_the_median_and_the_worst_leader_change_count_if_all_came(
    monkeypatch: pytest.MonkeyPatch, changes_s: list[float | None], expected: dict[str, float]
) -> None:
    class NoFleet:
        def __init__(self, folder: Path) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    changes = [LeaderChange("a", each) for each in changes_s]
    monkeypatch.setattr(bench, "why_no_namespaces", lambda: "")
    monkeypatch.setattr(bench, "ServedFleet", NoFleet)
    monkeypatch.setattr(bench, "leader_changes", lambda *_: changes)
    numbers = bench.FleetNumbers()
    numbers.measure(("leader_change_s",), lambda: numbers.leader(len(changes), 1))
    assert numbers.values == expected
    assert len(numbers.rows) == len(changes)
    assert bool(numbers.why) is not bool(expected)


@pytest.mark.parametrize(
    ("printed", "values"),
    [
        (json.dumps(REPORT), {"chaos_finished_share": 0.99, "chaos_wrong_tokens": 0}),
        (json.dumps(REPORT | {"finished_share": None}), {"chaos_wrong_tokens": 0}),
        ("cannot be tried here: no root", {}),
        ("", {}),
    ],
)
def test_what_the_attack_says_last_is_what_counts(
    monkeypatch: pytest.MonkeyPatch, printed: str, values: dict[str, Any]
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout=f"seed 1\n{printed}\n", stderr="")

    monkeypatch.setattr(bench, "why_no_namespaces", lambda: "")
    monkeypatch.setattr(bench.subprocess, "run", run)
    numbers = bench.FleetNumbers()
    numbers.measure(("chaos_finished_share",), lambda: numbers.chaos(10.0, 1))
    assert numbers.values == values
    assert bool(numbers.why) is (len(values) < 2)
