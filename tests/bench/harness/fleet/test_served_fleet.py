"""The cluster file of a fleet of namespaces, as the product's own reader takes it."""

from __future__ import annotations

import pytest

from backends.cluster.cluster_file import parse
from backends.cluster.host_plan import host_plan
from bench.harness.fleet import Namespaces, why_no_namespaces
from bench.harness.fleet.served_fleet import cluster_file, not_ready


@pytest.mark.servers
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_any_one_host_may_be_lost_and_every_part_is_still_there() -> None:
    with Namespaces(("a", "b", "c")) as hosts:
        deployment = parse(cluster_file(hosts))
    plans = {name: host_plan(deployment, name) for name in hosts.hosts}
    for lost in plans:
        rest = [plan for name, plan in plans.items() if name != lost]
        assert sum(plan.etcd is not None for plan in rest) == 2
        assert any(plan.directory for plan in rest) and any(plan.frontend for plan in rest)
        roles = {worker.role for plan in rest for worker in plan.workers}
        assert roles == {"prefill", "decode"}, lost
    assert {plan.address for plan in plans.values()} == {hosts.address(name) for name in plans}


def test_who_does_not_answer_is_not_ready() -> None:
    assert not_ready("127.0.0.1:1").startswith("no answer")
