"""What a frontend keeps of its latest decisions, and what it says of its cluster."""

from __future__ import annotations

import msgspec
import pytest

from backends.frontend.cluster_view import ClusterView
from backends.frontend.decisions.fields import overview
from backends.frontend.decisions.latest import (
    CANDIDATES_MAX,
    DECISIONS_MAX,
    EXPLAIN_EVERY_S,
    Decided,
)
from conductor.messages import Reject
from tests.backends.frontend.conftest import Clock
from tests.conductor.fleet import added, fleet, prompt


@pytest.fixture
def view(view: ClusterView) -> ClusterView:
    """Two nodes with a pair each."""
    view._on_events(fleet())
    return view


def shown(view: ClusterView) -> dict[str, object]:
    """As a gateway reads it."""
    return dict(msgspec.json.decode(msgspec.json.encode(overview(view.reading(), view.config))))


def decisions(view: ClusterView) -> list[dict[str, object]]:
    return list(shown(view)["decisions"])  # type: ignore[call-overload]


def test_the_latest_decisions_are_kept_newest_first_and_no_more_than_so_many(
    view: ClusterView,
) -> None:
    for number in range(DECISIONS_MAX + 9):
        view.decide(prompt(f"r{number}", "a*2"))
        view.finished(f"r{number}")
    names = [each["request_id"] for each in decisions(view)]
    assert names == [f"r{number}" for number in range(DECISIONS_MAX + 8, 8, -1)]


def test_a_decision_has_its_terms_those_of_the_other_pairs_and_what_came(
    view: ClusterView, clock: Clock
) -> None:
    view.decide(prompt("r", "a*2"))
    clock.now_s += 0.25
    view.prefill_finished("r", 64, 0.125)
    [found] = decisions(view)
    assert (found["age_s"], found["blocks"]) == (0.25, 2)
    assert found["came"] == {"cached_tokens": 64, "prefill_s": 0.125, "first_token_s": 0.25}
    candidates = found["candidates"]
    assert isinstance(candidates, list) and len(candidates) == 4
    assert candidates[0]["verdict"] == "chosen"
    assert candidates[0]["predicted"] == found["predicted"]
    assert (candidates[0]["prefill"], candidates[0]["decode"]) == (
        found["prefill"],
        found["decode"],
    )


def test_other_pairs_are_listed_now_and_then_and_for_who_asks(
    view: ClusterView, clock: Clock
) -> None:
    explained = []
    explain = view._conductor.explain

    def count(*arguments: object) -> object:
        explained.append(arguments)
        return explain(*arguments)  # type: ignore[arg-type]

    view._conductor.explain = count  # type: ignore[method-assign, assignment]
    for number in range(10):
        found = view.decide(prompt(f"r{number}", "a*1"))
        assert isinstance(found, Decided) and not found.explained.candidates, "nobody asked"
    assert len(explained) == 1
    asked = view.decide(prompt("asked", "a*1"), wants_candidates=True)
    assert isinstance(asked, Decided) and len(asked.explained.candidates) == 4
    clock.now_s += EXPLAIN_EVERY_S
    view.decide(prompt("later", "a*1"))
    assert len(explained) == 3
    assert len(decisions(view)[0]["candidates"]) <= CANDIDATES_MAX  # type: ignore[arg-type]


def test_in_a_fleet_other_pairs_are_listed_only_for_who_asks(view: ClusterView) -> None:
    view._on_events(fleet(30, 30, 30))
    kept = view.decide(prompt("r", "a*1"))
    assert isinstance(kept, Decided) and decisions(view)[0]["candidates"] == []
    assert decisions(view)[0]["predicted"]
    asked = view.decide(prompt("asked", "a*1"), wants_candidates=True)
    assert isinstance(asked, Decided) and asked.explained.candidates


def test_a_rejection_is_kept_with_its_reason(view: ClusterView) -> None:
    found = view.decide(prompt("r", prompt_tokens=10**9))
    assert isinstance(found, Reject)
    [kept] = decisions(view)
    assert (kept["rejected"], kept["reason"]) == (found.kind, found.reason)
    assert "came" not in kept and kept["prefix"] == ""


def test_a_decision_and_the_overview_have_the_limits_that_applied(view: ClusterView) -> None:
    decided = view.decide(prompt("r", prompt_tokens=2_000), wants_candidates=True)
    assert isinstance(decided, Decided)
    [kept] = decisions(view)
    assert kept["limits"] == decided.route.limits._asdict()
    assert decided.explained.limits == decided.route.limits
    assert kept["limits"]["ttft_slo_s"] == pytest.approx(10 * 2.01)  # type: ignore[index]
    limits = shown(view)["limits"]
    assert limits == {
        "ttft_slo_s": decided.route.limits.ttft_slo_s,
        "tbt_slo_s": decided.route.limits.tbt_slo_s,
        "auto": ["ttft_slo_s", "tbt_slo_s"],
    }


def test_a_rejection_by_a_limit_is_kept_with_the_limit(view: ClusterView) -> None:
    rejected = None
    for number in range(40):
        found = view.decide(prompt(f"r{number}", prompt_tokens=2_000))
        if isinstance(found, Reject):
            rejected = found
            break
    assert rejected is not None and rejected.limits is not None
    assert decisions(view)[0]["limits"] == rejected.limits._asdict()


def test_a_prefix_that_is_found_again_is_hot_and_its_copies_are_named(view: ClusterView) -> None:
    wanted = prompt("r", "a*3")
    view._on_events([*added("s0", "a*3"), *added("s1", "a*2")])
    for number in range(5):
        view.decide(prompt(f"r{number}", "a*3"))
        view.finished(f"r{number}")
    seen = shown(view)
    [hot] = seen["hot_prefixes"]  # type: ignore[misc]
    assert hot["prefix"] == wanted.block_keys[-1][:6].hex()
    assert (hot["blocks"], hot["blocks_on"]) == (3, {"s0": 3, "s1": 2})
    assert hot["hits_per_s"] > 0
    names = [each["name"] for each in seen["workers"]]  # type: ignore[attr-defined]
    assert sorted(names) == ["d0", "d1", "p0", "p1"]
    assert seen["served"] == {"block_tokens": 64, "context_tokens_max": 100_000}
