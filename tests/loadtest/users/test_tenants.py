"""Whose users there are, and what their requests carry."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.client.protocol import GenerateRequest, parameters
from loadtest.users.tenants import LoadTenant, UserIdentity, shown, tenant_of, tenants, turns


def test_tenants_have_weights_and_priorities() -> None:
    found = tenants("acme:3, batch:1@-1,a.b_c@2")
    assert found == (LoadTenant("acme", 3), LoadTenant("batch", 1, -1), LoadTenant("a.b_c", 1, 2))
    assert shown(found) == "acme:3,batch:1@-1,a.b_c:1@2" and tenants(shown(found)) == found
    assert tenants("") == ()
    for wrong in ("acme:0", "acme:x", "a b", "acme@", "acme,acme:2", "ä", "acme@1.5"):
        with pytest.raises(ValueError):
            tenants(wrong)


def test_users_are_spread_over_tenants_by_weight_from_the_first_on() -> None:
    found = tenants("acme:3,batch:1")
    of = [tenant_of(found, number) for number in range(40)]
    assert Counter(one.name for one in of if one) == {"acme": 30, "batch": 10}
    assert {one.name for one in of[:4] if one} == {"acme", "batch"}, "four users are enough"
    assert of[:4] == of[4:8], "in every run alike"
    assert tenant_of((), 7) is None


def test_a_weight_has_a_limit_that_the_error_says_and_the_order_is_made_once() -> None:
    for wrong in ("0", "1000", "999999"):
        with pytest.raises(ValueError, match=f"{wrong} is not a weight of acme; .* from 1 to 999"):
            tenants(f"acme:{wrong},b:1")
    weights = (998, 997)
    assert turns(weights) is turns(weights) and Counter(turns(weights)) == {0: 998, 1: 997}


def test_a_users_requests_are_its_tenants_and_counted_as_such() -> None:
    request = GenerateRequest("r", text_input="a")
    alone = UserIdentity("chat", "1")
    assert alone.group == "chat" and alone.signed(request) is request
    user = UserIdentity("chat", "1", LoadTenant("batch", 1, -1, "mk-secret"))
    assert user.group == "batch/chat"
    assert parameters(user.signed(request)) == {"tenant": "batch", "request_priority": -1}
    assert "mk-secret" not in repr(user)
