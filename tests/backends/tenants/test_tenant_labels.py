"""The metrics page names tenants of the file, so many, and nothing that a client made up."""

from __future__ import annotations

import time

from backends.errors import Overloaded
from backends.frontend.request_times import RequestTimes
from backends.metrics.page import Observations
from backends.tenants.principal import Principal
from backends.tenants.tenant_labels import OTHERS, TenantLabels, without_other_tenants
from backends.tenants.tenants_file import NAME, ApiTenant


def known(name: str) -> Principal:
    return Principal(name, ApiTenant(name, f"salt of {name}"))


def test_without_keys_nobody_has_a_label() -> None:
    labels = TenantLabels()
    assert labels.of(Principal("whatever a client says")) == ""
    assert labels.sums({}) == {}


def test_so_many_tenants_have_labels_and_all_later_ones_share_one() -> None:
    labels = TenantLabels(labels_max=3)
    given = [labels.of(known(f"t{number}")) for number in range(1_000)]
    assert given[:3] == ["t0", "t1", "t2"] and set(given[3:]) == {OTHERS}
    assert labels.of(known("t1")) == "t1" and not NAME.fullmatch(OTHERS)
    assert labels.sums({"t1": 2, "t7": 3, "t8": 4}) == {"t0": 0, "t1": 2, "t2": 0, OTHERS: 7}


def test_what_is_counted_of_a_tenant_is_its_first_reading_of_the_prompt() -> None:
    observations = Observations()
    times = RequestTimes(observations, time.monotonic())
    times.tenant = "a"
    times.read(100, 64)
    times.read(100, 100)  # another attempt finds what the first one left
    times.sent(3, 1.0)
    times.ended(Overloaded("decode_overload", "x", 1.0), 2.0)
    seen = {
        (name, labels.get("kind") or labels.get("reason") or labels.get("outcome")): value
        for name, value, labels in observations.drain()
        if labels.get("tenant") == "a"
    }
    assert seen == {
        ("mooncake_tenant_requests_total", "rejected"): 1.0,
        ("mooncake_tenant_rejections_total", "other"): 1.0,
        ("mooncake_tenant_tokens_total", "prompt"): 100,
        ("mooncake_tenant_tokens_total", "cached"): 64,
        ("mooncake_tenant_tokens_total", "output"): 3,
    }


PAGE = b"""# HELP mooncake_tenant_tokens_total Tokens of a tenant="a".
mooncake_tenant_tokens_total{kind="cached",model="conductor",tenant="a"} 64
mooncake_tenant_tokens_total{kind="cached",model="conductor",tenant="ab"} 7
mooncake_tenant_requests_live{tenant="(others)",model="conductor"} 1
mooncake_requests_live{model="conductor"} 2
mooncake_worker_info{node="tenant=\\"a\\""} 1
"""


def test_on_the_page_that_a_key_reads_there_is_no_number_of_another_tenant() -> None:
    lines = without_other_tenants(PAGE, "a").splitlines()
    assert lines == [line for line in PAGE.splitlines() if b"ab" not in line and b"oth" not in line]
    assert b'tenant="' not in b"".join(without_other_tenants(PAGE, "c").splitlines()[1:-1])
