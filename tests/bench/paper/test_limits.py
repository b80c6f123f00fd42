"""The experiment on limits: what counts as within 10x and 5x, and which settings are compared."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.paper.experiments import limits
from conductor.config import AUTO
from loadtest.simulator.cluster.gpu import Roofline, prompt_s
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import start_of_trace

CHUNK_TOKENS, TOKENS = 2_048, 8_000


def job(ttft_share: float, tbt_share: float, finished_s: float | None = 1.0) -> Any:
    """A request whose times are these shares of 10x and 5x of itself alone."""
    gpu = Roofline()
    return SimpleNamespace(
        prompt_tokens=TOKENS,
        finished_s=finished_s,
        ttft_s=ttft_share * 10 * prompt_s(gpu, 0, TOKENS, CHUNK_TOKENS),
        tbt_s=tbt_share * 5 * gpu.decode_s(1, TOKENS),
    )


@pytest.mark.parametrize(
    ("found", "is_within"),
    [
        (job(0.99, 0.99), True),
        (job(1.01, 0.5), False),
        (job(0.5, 1.01), False),
        (job(0.5, 0.5, None), False),
    ],
)
def test_a_request_is_within_when_it_finished_and_kept_both_multiples(
    found: Any, is_within: bool
) -> None:
    assert limits.is_within_multiples(cast(Any, found), Roofline(), CHUNK_TOKENS) == is_within


def test_auto_is_compared_with_the_shipped_settings_of_before() -> None:
    auto, late = limits.config_for("auto"), limits.config_for(limits.LATE)
    assert (auto.ttft_slo_s, auto.tbt_slo_s) == (AUTO, AUTO)
    assert late == replace(auto, ttft_slo_s=30.0, tbt_slo_s=1.0)


def test_every_request_of_a_crowd_is_finished_or_rejected_by_auto() -> None:
    settings = ClusterSettings(prefills=1, decodes=1)
    found = limits.run(start_of_trace()[:80], "auto", 8.0, settings)
    outcome = found.outcome
    assert outcome.finished + outcome.rejected_in_all == outcome.offered == 80
    assert 0 < found.within_multiples <= outcome.finished and outcome.rejected_in_all
    [row] = limits.rows_of([found], capacity=4.0)
    assert (row["load"], row["within_10x_5x"]) == (2.0, found.within_multiples)
