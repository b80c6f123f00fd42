"""The benchmark of a fleet counts leader changes only when the prefix was found after each."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from bench import fleet
from bench.fleet import LeaderChange


@pytest.mark.parametrize(
    ("changes_s", "values"), [([4.0, 3.0, 7.5], [4.0, 7.5]), ([4.0, None], [None, None])]
)
def test_the_median_and_the_worst_leader_change_count_if_all_came(
    changes_s: list[float | None], values: list[float | None]
) -> None:
    targets = fleet.targets_of([LeaderChange("a", each) for each in changes_s])
    assert [target.value for target in targets] == values
    assert [(target.name, target.goal) for target in targets] == [
        ("leader_change_s", 5.0),
        ("leader_change_s_worst", 8.0),
    ]


def test_without_namespaces_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fleet, "why_no_namespaces", lambda: "needs root")
    with pytest.raises(typer.Exit):
        fleet.main(seed=1)
    assert "cannot measure: needs root" in "".join(capsys.readouterr())
