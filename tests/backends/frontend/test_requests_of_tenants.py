"""One request of a tenant that API keys name: its salt, its priority, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.errors import TIMEOUT_PASSED, Overloaded
from backends.frontend.decisions.latest import Decided
from backends.frontend.lifecycle.events import Unwanted
from backends.tenants.principal import Principal
from backends.tenants.tenants_file import ApiTenant
from conductor.messages import Reject, Request, TenantLimits
from mooncake_store.block_keys import block_keys, chain_seed
from tests.backends.frontend.test_live_request import (
    ANSWER,
    CLIENT_LEFT,
    CRASHED,
    KV_GONE,
    PROMPT,
    SERVED,
    Case,
    reject,
)

LIMITED = Principal("a", ApiTenant("a", "salt of a", 1, TenantLimits(requests_per_minute=5)))


class LimitedCase(Case):
    """Notes what comes back of the limits: each request once, by the id that they were taken by."""

    def __init__(self, *outcomes: Any, **options: Any) -> None:
        super().__init__(*outcomes, **options)
        self.used: dict[str, int] = {}
        self.cluster.used = self.used.setdefault
        self.charged: list[str] = []
        self.cluster.charged = self.charged.append


def test_a_known_tenant_has_its_own_salt_and_priority_whatever_the_client_says() -> None:
    case = LimitedCase({}, principal=LIMITED, parameters={"tenant": "a", "request_priority": 9})
    assert case.run() == ANSWER
    assert {body.cache_salt for body in case.calls.bodies} == {"salt of a"}
    [asked] = case.cluster.asked
    assert (asked.tenant, asked.priority) == ("a", 1)


def test_the_blocks_of_a_known_tenant_have_keys_of_its_salt() -> None:
    prompt = list(range(1, 131))
    case = LimitedCase({}, principal=LIMITED, decisions=[reject("x")], input_ids=prompt)
    case.error()
    [asked] = case.cluster.asked
    seed = chain_seed(SERVED.fingerprint, cache_salt="salt of a")
    keys = block_keys(np.array(prompt), SERVED.block_tokens, seed)
    assert asked.block_keys == keys and len(keys) == 2


def test_without_keys_the_client_says_its_tenant_and_nothing_is_counted() -> None:
    case = LimitedCase(
        {}, principal=Principal("b"), parameters={"tenant": "b", "request_priority": 9}
    )
    assert case.run() == ANSWER
    assert {body.cache_salt for body in case.calls.bodies} == {"b"}
    [asked] = case.cluster.asked
    assert (asked.tenant, asked.priority, asked.limits) == ("b", 9, None)
    assert not case.used


def test_limits_are_asked_of_the_attempt_that_is_let_in_and_of_none_after_it() -> None:
    case = LimitedCase({"decode_0": [KV_GONE] * 2}, principal=LIMITED)
    assert case.run() == ANSWER
    limits = [request.limits for request in case.cluster.asked]
    assert limits == [TenantLimits(requests_per_minute=5), None, None]
    assert case.used == {case.cluster.asked[0].request_id: len(PROMPT) + len(ANSWER)}


def test_limits_come_back_before_the_client_reads_that_its_answer_is_over() -> None:
    case = LimitedCase({}, principal=LIMITED)
    there: list[list[str]] = []
    send = case.client.send

    def look(outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        if is_final:
            there.append(list(case.used))
        send(outputs, is_final)

    case.client.send = look  # type: ignore[method-assign]
    case.run()
    assert there == [["r-1"]]


def test_a_request_that_failed_before_its_first_token_has_used_nothing() -> None:
    case = LimitedCase({"prefill_0": [CRASHED] * 5}, principal=LIMITED)
    case.error()
    assert case.used == {"r-1": 0}


def test_a_prompt_counts_when_its_clients_own_timeout_ends_its_prefill() -> None:
    """Else a timeout just below the prefill time would be prefill for nothing, again and again."""
    case = LimitedCase({}, principal=LIMITED, parameters={"timeout_ms": 1_000})
    case.calls.on_call = lambda model: case.request.look(case.request._arrived_s + 1.1, 0.0)
    error = case.error()
    assert TIMEOUT_PASSED in str(error) and case.calls.bodies
    assert case.used == {"r-1": len(PROMPT)}


def test_a_frontend_names_every_attempt_that_it_still_has() -> None:
    case = LimitedCase({"decode_0": [KV_GONE]}, principal=LIMITED)
    seen: list[set[str]] = []
    send = case.client.send

    def look(outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        seen.append(case.request.held_ids())
        send(outputs, is_final)

    case.client.send = look  # type: ignore[method-assign]
    assert case.request.held_ids() == set()
    assert case.run() == ANSWER
    assert {"r-1"} <= seen[0] and seen[-1] >= {"r-1", "r-2"}


def test_limits_come_back_when_the_client_leaves_while_its_request_is_being_let_in() -> None:
    case = LimitedCase({}, principal=LIMITED)
    decide = case.cluster.decide

    def leave(request: Request, wants_candidates: bool) -> Decided | Reject:
        case.request.post(Unwanted(CLIENT_LEFT))
        return decide(request, wants_candidates)

    case.cluster.decide = leave  # type: ignore[method-assign]
    case.streams.forget = lambda request_id: None  # type: ignore[method-assign]
    case.run()
    assert case.client.ends == ["finished"] and not case.calls.bodies
    assert case.cluster.finished_ids == ["r-1"] and case.used == {"r-1": 0}


def test_what_a_client_got_counts_whatever_ends_its_answer() -> None:
    case = LimitedCase({"decode_0": [CRASHED] * 5}, principal=LIMITED)
    case.error()
    assert case.client.ids and case.used == {"r-1": len(PROMPT) + len(case.client.ids)}


def test_who_is_rejected_for_a_limit_has_used_none() -> None:
    case = LimitedCase({}, principal=LIMITED, decisions=[reject("request_rate")])
    error = case.error()
    assert isinstance(error, Overloaded) and error.kind == "request_rate"
    assert not case.used and not case.calls.bodies


def test_a_request_that_was_read_and_refused_counts_as_one() -> None:
    """Reading it took time: without a price, wrong requests were for nothing, however long."""
    case = LimitedCase({}, principal=LIMITED, input_ids=[10**9])
    assert "outside the vocabulary" in str(case.error())
    assert case.charged == ["a"] and not case.used
    nobody = LimitedCase({}, input_ids=[10**9])
    assert nobody.error() and not nobody.charged
