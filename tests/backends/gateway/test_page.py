"""The status page: who is served it, who sees how much, and what looking costs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import msgspec
import pytest

from backends.gateway.page import live_status
from backends.gateway.page.html import PAGE
from backends.gateway.page.live_status import LiveStatus, StatusReading, shown_to
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.metrics.status.view import parse
from backends.statuses import unavailable
from backends.tenants import GATEWAY, ApiKeys, ApiTenant
from backends.tenants.proof import is_proven
from tests.backends.gateway.rig import Rig, run
from tests.backends.metrics.status.pages import server, text

SECRET = "a-secret"
CLUSTER = {
    "decisions": [{"request_id": "1", "tenant": "acme"}, {"request_id": "2", "tenant": "other"}],
    "hot_prefixes": [{"prefix": "00"}],
    "workers": [],
}
TENANTS = {"acme": {}, "other": {}, "ops": {"operator": True}}


def keys() -> ApiKeys:
    known = [
        {"sha256": hashlib.sha256(f"key-of-{name}".encode()).hexdigest(), "tenant": name}
        for name in TENANTS
    ]
    found = ApiKeys.of(json.dumps({"tenants": TENANTS, "keys": known}))
    assert found is not None
    return found


def test_the_page_is_one_file_that_draws_in_nothing_and_makes_no_element_of_text() -> None:
    page = PAGE.read_text()
    assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert not re.search(r"<[^>]+ on[a-z]+=|<[^>]+ style=", page)
    assert "localStorage" not in page


def test_it_is_served_without_a_key_and_lets_run_nothing_but_itself() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.send("GET", "/")
        assert answer.status == 200 and answer.body == PAGE.read_bytes()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        script = re.search(rb"<script>(.*?)</script>", answer.body, re.DOTALL)
        assert script is not None
        digest = base64.b64encode(hashlib.sha256(script[1]).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert (await rig.send("GET", "/status")).status == 401

    run(check, keys())


def test_an_operator_sees_everything_and_a_tenant_its_own_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_SECRET", SECRET)
    monkeypatch.setattr(live_status, "FRESH_S", 600.0)  # one look for all, however slow this is

    async def check(rig: Rig) -> None:
        rig.frontend.described = json.dumps(CLUSTER)
        seen: dict[str, Any] = {}
        for name in TENANTS:
            rig.key = f"key-of-{name}"
            seen[name] = (await rig.send("GET", "/status")).json
        assert seen["ops"]["cluster"] == CLUSTER
        assert seen["ops"]["asker"] == {"tenant": "ops", "is_operator": True}
        for name in ("acme", "other"):
            cluster = seen[name]["cluster"]
            assert [each["tenant"] for each in cluster["decisions"]] == [name]
            assert cluster["hot_prefixes"] is None and not seen[name]["asker"]["is_operator"]
        [asked] = rig.frontend.requests
        parameters = asked.parameters
        assert parameters["describe"].string_param == "cluster"
        assert parameters["tenant"].string_param == GATEWAY
        proof = parameters["tenant_proof"].string_param
        assert is_proven(GATEWAY, proof, SECRET, float(proof.split()[0]))

    run(check, keys())


def test_without_keys_everybody_is_an_operator_and_nothing_is_proven() -> None:
    async def check(rig: Rig) -> None:
        rig.frontend.described = json.dumps(CLUSTER)
        seen = (await rig.send("GET", "/status")).json
        assert seen["cluster"] == CLUSTER and seen["asker"]["is_operator"]
        assert seen["model"] == "demo" and seen["metrics"] is None
        assert "--metrics" in seen["problems"][0]
        assert "tenant" not in rig.frontend.requests[0].parameters

    run(check)


def test_a_tenant_whose_name_is_in_no_decision_sees_none() -> None:
    shown = shown_to(StatusReading(cluster=dict(CLUSTER)), ApiTenant("new", "new"))
    assert shown["cluster"]["decisions"] == []


def test_many_viewers_cost_one_look_and_a_broken_frontend_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = parse(text(server()), 1.0)
    monkeypatch.setattr(live_status, "fetch", lambda url: page)
    asked = []

    async def describe() -> bytes:
        asked.append(1)
        await asyncio.sleep(0)
        if len(asked) > 1:
            raise unavailable("it went away")
        return b"{}"

    async def look() -> None:
        live = LiveStatus("http://x/metrics", describe)
        seen = await asyncio.gather(*(live.now() for _ in range(20)))
        assert len(asked) == 1 and len({id(each) for each in seen}) == 1
        assert seen[0].metrics is not None and seen[0].cluster == {} and not seen[0].problems
        msgspec.json.encode(seen[0].metrics)
        monkeypatch.setattr(live_status, "FRESH_S", 0.0)
        broken = await live.now()
        assert broken.cluster is None and "it went away" in broken.problems[0]

    asyncio.run(look())


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_a_decision_comes_to_who_asks_for_it_and_to_nobody_else(route: str) -> None:
    async def check(rig: Rig) -> None:
        asked = {"max_tokens": 3, "return_decision": True}
        events = (await rig.post(route, stream=True, **asked)).events
        decisions = [each["decision"] for each in events[:-1] if "decision" in each]
        assert decisions == [{"prefill": "prefill_0", "decode": "decode_0"}]
        whole = (await rig.post(route, **asked)).json
        assert whole["decision"] == decisions[0] and whole["usage"]["completion_tokens"] == 3
        without = await rig.post(route, stream=True, max_tokens=3)
        assert "decision" not in without.body.decode()
        assert "decision" not in (await rig.post(route, max_tokens=3)).json
        refused = await rig.post(route, return_decision="yes")
        assert (refused.status, refused.error["param"]) == (400, "return_decision")

    run(check)
