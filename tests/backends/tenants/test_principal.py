"""Whose request it is: with keys the gateway's word, proven; without them the client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import launch_secret
from backends.errors import Forbidden
from backends.tenants import ApiKeys, tenant_parameters
from backends.tenants.principal import Principal, check_is_gateway, principal_of
from backends.tenants.proof import AGE_S_MAX, GATEWAY, is_proven, prove
from mooncake_store.block_keys import SALT_SEPARATOR

SECRET, NOW_S = "0123456789abcdef", 1_800_000_000.0


def keys(keyless: str = "served") -> ApiKeys:
    tenants = {"a": {"salt": "salt of a", "priority": 2}, "b": {}}
    return ApiKeys(None, json.dumps({"tenants": tenants, "keyless": keyless}))


def ask(parameters: dict[str, Any], known: ApiKeys | None, now_s: float = NOW_S) -> Principal:
    return principal_of(parameters, known, SECRET, now_s)


def proven(name: str, at_s: float = NOW_S, secret: str = SECRET) -> dict[str, str]:
    return {"tenant": name, "tenant_proof": prove(name, at_s, secret)}


def test_only_the_gateway_itself_is_told_of_all_tenants_where_there_are_keys() -> None:
    check_is_gateway({}, None, SECRET, NOW_S)
    check_is_gateway(proven(GATEWAY), keys(), SECRET, NOW_S)
    for parameters in (
        {},
        {"tenant": GATEWAY},
        proven("a"),
        proven("default"),
        proven(GATEWAY, secret="another"),
        proven(GATEWAY, NOW_S - 2 * AGE_S_MAX),
        proven("a") | {"tenant": GATEWAY},
    ):
        with pytest.raises(Forbidden):
            check_is_gateway(parameters, keys(), SECRET, NOW_S)
    with pytest.raises(Forbidden):
        ask(proven(GATEWAY), keys())  # it is nobody to generate for


def test_without_keys_the_client_says_who_it_is_what_it_salts_and_how_much_it_matters() -> None:
    principal = ask({"tenant": "a", "request_priority": 7}, None)
    assert principal.tenant == "a" and principal.known is None
    assert (
        principal.salt("a") == "a" and principal.priority(7) == 7 and principal.priority(None) == 0
    )
    assert ask({"tenant": 5}, None).tenant == "", "it is refused by name later"


def test_a_proven_tenant_gets_the_salt_of_the_file_and_may_only_lower_its_priority() -> None:
    principal = ask(proven("a"), keys())
    assert (principal.tenant, principal.salt("b"), principal.salt("")) == (
        "a",
        "salt of a",
        "salt of a",
    )
    assert principal.salt(f"b{SALT_SEPARATOR}c") == f"salt of a{SALT_SEPARATOR}c"
    assert [principal.priority(said) for said in (None, 9, 2, 1, -3)] == [2, 2, 2, 1, -3]


def test_who_names_no_tenant_is_of_the_default_one_and_cannot_raise_its_priority() -> None:
    principal = ask({}, keys())
    assert (principal.tenant, principal.salt("a")) == ("default", "")
    assert [principal.priority(said) for said in (None, 9, -3)] == [0, 0, -3]
    with pytest.raises(Forbidden, match="API key"):
        ask({}, keys("refused"))
    assert ask(proven("a"), keys("refused")).tenant == "a"


def test_what_is_served_is_said_to_everybody() -> None:
    """A gateway asks for it before anybody has come with a key."""
    assert ask({"describe": True}, keys("refused")).tenant == "default"
    for said in (False, 1, "true", None):
        with pytest.raises(Forbidden):
            ask({"describe": said}, keys("refused"))


WRONG: dict[str, dict[str, Any]] = {
    "the client's word alone": {"tenant": "a"},
    "a proof of another tenant": {"tenant": "a", "tenant_proof": proven("b")["tenant_proof"]},
    "by another secret": proven("a", secret="fedcba9876543210"),
    "by no secret": proven("a", secret=""),
    "an old one": proven("a", NOW_S - AGE_S_MAX - 1),
    "one of the future": proven("a", NOW_S + AGE_S_MAX + 1),
    "a later moment": {
        "tenant": "a",
        "tenant_proof": proven("a", NOW_S - 999)["tenant_proof"].replace(
            f"{NOW_S - 999:.3f}", f"{NOW_S:.3f}"
        ),
    },
    "a proof alone": {"tenant_proof": prove("", NOW_S, SECRET)},
    "a number": {"tenant": 7, "tenant_proof": prove("7", NOW_S, SECRET)},
    "a flag": {"tenant": "a", "tenant_proof": True},
    "nobody's name": proven("nobody"),
    "not a moment": {
        "tenant": "a",
        "tenant_proof": "nan " + prove("a", float("nan"), SECRET).split(" ")[1],
    },
    "surrogates": {"tenant": "\ud800", "tenant_proof": "\ud800 \ud800"},
}


@pytest.mark.parametrize("parameters", WRONG.values(), ids=WRONG.keys())
def test_a_word_that_is_not_proven_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(Forbidden):
        ask(parameters, keys())


def test_a_process_without_a_secret_believes_nothing() -> None:
    with pytest.raises(Forbidden):
        principal_of(proven("a", secret=""), keys(), "", NOW_S)


def test_the_gateway_proves_with_the_secret_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)
    parameters = tenant_parameters("a", NOW_S)
    assert parameters == proven("a") and SECRET not in parameters["tenant_proof"]
    assert (
        principal_of(tenant_parameters("a"), keys(), SECRET, __import__("time").time()).tenant
        == "a"
    )


@given(st.text(), st.text())
def test_no_proof_of_one_name_proves_another(name: str, other: str) -> None:
    proof = prove(name, NOW_S, SECRET)
    assert is_proven(name, proof, SECRET, NOW_S)
    assert is_proven(other, proof, SECRET, NOW_S) == (other == name)


@given(st.text() | st.none() | st.booleans() | st.integers() | st.binary())
def test_nothing_that_a_client_makes_up_is_a_proof(proof: Any) -> None:
    assert not is_proven("a", proof, SECRET, NOW_S)
