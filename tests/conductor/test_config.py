"""A wrong knob is named with its remedy, and all of them at once."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from conductor import ConductorConfig, config
from conductor.admission.admission import LOAD_POLICIES
from conductor.config import parse_shares
from conductor.routing.policies import POLICIES


def test_the_names_that_the_config_knows_are_those_of_the_tables() -> None:
    assert tuple(POLICIES) == config.POLICIES
    assert set(LOAD_POLICIES) == set(config.ADMISSIONS)


def test_the_defaults_have_no_problem() -> None:
    assert ConductorConfig().problems() == []


def test_every_mistake_is_listed_at_once_with_its_remedy() -> None:
    config = ConductorConfig(
        ttft_slo_s=-1,
        tbt_slo_s=float("nan"),
        policy="fastest",
        admission="x",
        kvcache_balancing_threshold=0.5,
        retry_after_s_min=9,
        retry_after_s_max=3,
        low_priority_load_max=2,
        report_lag_s=5,
        shedding="all",
        backlog_share=1.5,
        priority_weight=0.5,
        tenant_shares="a:2,b",
    )
    found = "\n".join(config.problems())
    named = (
        "ttft_slo_s tbt_slo_s policy admission report_lag_s retry_after_s_min "
        "kvcache_balancing_threshold low_priority_load_max shedding backlog_share priority_weight "
        "tenant_shares"
    )
    for name in named.split():
        assert name in found
    assert "use one of adaptive, kvcache_centric, cache_aware, load_balance, random" in found
    assert len(config.problems()) == 12


@pytest.mark.parametrize("field", fields(ConductorConfig), ids=lambda field: field.name)
def test_a_field_is_flat_and_refuses_what_makes_no_sense(field: object) -> None:
    name, kind = field.name, field.type  # type: ignore[attr-defined]
    flat = ("str", "int", "float", "bool", "SecondsOrAuto")
    assert kind in flat, "config.pbtxt parameters are flat"
    if kind not in ("str", "bool"):
        assert replace(ConductorConfig(), **{name: -1}).problems()
        assert replace(ConductorConfig(), **{name: float("inf")}).problems()


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:-1", "a:nan", "a:1,a:2"])
def test_shares_that_make_no_sense_are_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|keep one"):
        parse_shares(text)


def test_shares_are_weights_by_name_and_a_name_may_hold_a_colon() -> None:
    assert parse_shares(" a:2, team:b:0.5 ,") == {"a": 2.0, "team:b": 0.5}
    assert parse_shares("") == {}
