"""One tenant may fill a frontend only while it is alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.frontend.live_requests import RECENT_S, REJECTED_TENANTS_MAX, TenantCap, slots_of_one


def test_a_tenant_that_is_alone_may_have_every_place() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("a", {"a": 7}, now_s=0.0) == ("", "")
    assert cap.rejection("a", {"a": 8}, now_s=0.0)[0] == "front_full"


def test_beside_another_one_it_may_have_its_share() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("a", {"a": 3, "b": 1}, now_s=0.0) == ("", "")
    kind, reason = cap.rejection("a", {"a": 4, "b": 1}, now_s=0.0)
    assert kind == "tenant_full"
    assert "'a' has 4 requests in flight" in reason and "at most 4 of 8" in reason
    assert cap.rejection("b", {"a": 4, "b": 1}, now_s=0.0) == ("", "")


def test_whoever_names_no_tenant_is_one_too() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("", {"": 4, "b": 1}, now_s=0.0)[0] == "tenant_full"


def test_a_flood_that_filled_every_place_leaves_the_next_free_ones_to_who_was_turned_away() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("b", {"a": 8}, now_s=0.0)[0] == "front_full"
    assert cap.rejection("a", {"a": 7}, now_s=1.0)[0] == "tenant_full"
    assert cap.rejection("b", {"a": 7}, now_s=2.0) == ("", "")


def test_two_floods_leave_a_place_to_a_third_tenant() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("c", {"a": 4, "b": 4}, now_s=0.0)[0] == "front_full"
    assert cap.rejection("a", {"a": 3, "b": 4}, now_s=1.0)[0] == "tenant_full"
    assert cap.rejection("c", {"a": 3, "b": 4}, now_s=2.0) == ("", "")
    assert cap.rejection("a", {"a": 3, "b": 3, "c": 1}, now_s=8.0) == ("", "")


def test_who_does_not_come_back_is_forgotten() -> None:
    cap = TenantCap(requests_max=8, share=0.5)
    assert cap.rejection("b", {"a": 8}, now_s=0.0)[0] == "front_full"
    assert cap.rejection("a", {"a": 7}, now_s=RECENT_S + 0.1) == ("", "")


def test_there_is_a_place_for_each_tenant_however_small_its_share() -> None:
    assert slots_of_one(requests_max=2, share=0.1, tenants=2) == 1
    cap = TenantCap(requests_max=2, share=0.1)
    assert cap.rejection("b", {"a": 1}, now_s=0.0) == ("", "")


def test_names_without_end_do_not_fill_the_memory() -> None:
    cap = TenantCap(requests_max=1, share=0.5)
    for number in range(3 * REJECTED_TENANTS_MAX):
        assert cap.rejection(f"t{number}", {"a": 1}, now_s=0.0)[0] == "front_full"
    assert len(cap._rejected_s) == REJECTED_TENANTS_MAX


@given(
    st.integers(1, 50),
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=300),
)
def test_nobody_gets_a_place_above_its_share_while_others_are_there(
    requests_max: int, share: float, moves: list[tuple[str, bool]]
) -> None:
    cap, in_flight = TenantCap(requests_max, share), dict.fromkeys("abcd", 0)
    for now_s, (tenant, comes) in enumerate(moves):
        if not comes:
            in_flight[tenant] = max(0, in_flight[tenant] - 1)
            continue
        others = sum(n for name, n in in_flight.items() if name != tenant)
        if not cap.rejection(tenant, in_flight, float(now_s))[0]:
            in_flight[tenant] += 1
            own = in_flight[tenant]
            assert sum(in_flight.values()) <= requests_max
            assert not others or own <= slots_of_one(requests_max, share, tenants=2)
