"""A tenant gets what it may have within any minute and at once: never more, and in time again."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from conductor import Conductor, ConductorConfig, Reject, Request, Route
from conductor.admission.tenant_quotas import TENANTS_MAX, WINDOW_S, TenantQuotas, UsageWindow
from conductor.messages import TenantLimits
from conductor.notes import UsageNote
from tests.conductor.fleet import fleet

TOKENS, OUTPUT = 50, 50  # of a prompt, and its max_tokens
numbers = count()


def test_what_is_given_back_a_moment_beside_the_second_of_its_use_comes_back() -> None:
    quotas = TenantQuotas(600.0)
    note = UsageNote(0.0, "a", 1, 100)
    quotas.used_elsewhere(note, 11.01, 11.2)  # the batch was longer under way than the next one
    quotas.used_elsewhere(replace(note, requests=0, tokens=-60), 10.99, 11.3)
    asked = ask(tokens=30, output=30, tokens_per_minute=100)
    assert quotas.rejection(asked, 0, 11.4) is None
    refused = quotas.rejection(replace(asked, output_tokens_max=31), 0, 11.4)
    assert refused is not None and refused.kind == "token_rate"
    quotas.check()


def ask(tenant: str = "a", tokens: int = TOKENS, output: int = OUTPUT, **limits: int) -> Request:
    return Request(
        f"r{next(numbers)}", tokens, (), output, tenant=tenant, limits=TenantLimits(**limits)
    )


def made(frontend: str = "f0", **config: object) -> Conductor:
    found = Conductor(
        ConductorConfig(admission="none", report_s_max=1e6, **config), frontend=frontend
    )  # type: ignore[arg-type]
    found.on_events(fleet(3, 3, 3), 0.0)
    return found


def acquainted(number: int) -> list[Conductor]:
    found = [made(f"f{each}") for each in range(number)]
    pass_on(found, 0.0)
    return found


def pass_on(conductors: list[Conductor], now_s: float) -> None:
    for batch in [one.take_notes(now_s, 10_000) for one in conductors]:
        for other in conductors:
            other.on_routed_elsewhere(batch, now_s)
    for one in conductors:
        one.check()


def serve(one: Conductor, request: Request, now_s: float, used: int | None = None) -> str:
    """Ask, and end at once what is admitted; "" or the kind of rejection."""
    found = one.on_request(request, now_s)
    if isinstance(found, Reject):
        return found.kind
    one.on_used(request.request_id, now_s, TOKENS + OUTPUT if used is None else used)
    one.on_finished(request.request_id, now_s)
    return ""


def rejection(one: Conductor, request: Request, now_s: float) -> Reject:
    found = one.on_request(request, now_s)
    assert isinstance(found, Reject), found
    return found


def test_requests_of_a_minute_are_counted_and_the_next_minute_is_a_new_one() -> None:
    one = made()
    kinds = [serve(one, ask(requests_per_minute=3), at_s) for at_s in (0.0, 0.9, 30.0, 59.9)]
    assert kinds == ["", "", "", "request_rate"]
    refused = rejection(one, ask(requests_per_minute=3), 59.9)
    assert (
        "3 requests within a minute" in refused.reason and "requests_per_minute" in refused.reason
    )
    assert serve(one, ask(requests_per_minute=3), 59.9 + refused.retry_after_s) == ""
    one.check()


def test_tokens_of_a_minute_are_prompt_and_answer_and_what_was_not_used_is_given_back() -> None:
    one, limits = made(), {"tokens_per_minute": 250}
    assert serve(one, ask(**limits), 0.0) == "" == serve(one, ask(**limits), 1.0)
    refused = rejection(one, ask(**limits), 2.0)
    assert refused.kind == "token_rate" and "200 tokens" in refused.reason
    assert 59.0 < refused.retry_after_s < 59.1, "the first 100 are over then"
    other = made()
    assert [serve(other, ask(**limits), 0.0, used=60) for _ in range(4)] == [
        "",
        "",
        "",
        "token_rate",
    ]
    assert serve(other, ask(tokens=40, output=30, **limits), 0.0) == "", "180 are used, 70 are left"


def test_what_no_minute_has_room_for_is_too_large_and_asking_again_does_not_help() -> None:
    refused = rejection(made(), ask(tokens=50, output=51, tokens_per_minute=100), 0.0)
    assert (refused.kind, refused.retry_after_s) == ("too_large", 0.0)
    assert serve(made(), ask(tokens=50, output=50, tokens_per_minute=100), 0.0) == ""


def test_requests_in_flight_are_counted_until_the_request_is_over_through_all_its_attempts() -> (
    None
):
    one, limits = made(), TenantLimits(requests_in_flight_max=2)
    first, second, third = (replace(ask(), limits=limits) for _ in range(3))
    assert isinstance(one.on_request(first, 0.0), Route)
    assert isinstance(one.on_request(second, 0.0), Route)
    one.on_finished(first.request_id, 1.0)  # this attempt; another one follows
    refused = rejection(one, third, 1.0)
    assert (refused.kind, refused.retry_after_s) == ("tenant_full", 1.0)
    again = replace(first, request_id="again", limits=None, is_resumed=True)
    assert isinstance(one.on_request(again, 1.0), Route)
    one.on_finished("again", 2.0)
    one.on_used(first.request_id, 2.0, 0)
    assert isinstance(one.on_request(third, 2.0), Route)
    one.check()


def test_who_is_refused_pays_nothing() -> None:
    one = made()
    limits = {"requests_per_minute": 2, "requests_in_flight_max": 1}
    held = ask(**limits)
    assert isinstance(one.on_request(held, 0.0), Route)
    assert [serve(one, ask(**limits), 0.0) for _ in range(50)] == ["tenant_full"] * 50
    one.on_used(held.request_id, 0.0, 1)
    empty = Conductor(ConductorConfig(), frontend="f")
    assert serve(empty, ask(requests_per_minute=1), 0.0) == "no_prefill_worker"
    empty.on_events(fleet(1, 1, 1), 0.0)
    assert serve(empty, ask(requests_per_minute=1), 0.0) == ""
    assert serve(one, ask(**limits), 0.0) == ""
    assert serve(one, ask(**limits), 0.0) == "request_rate"


def test_advice_on_service_levels_leaves_limits_of_tenants_in_force() -> None:
    one = made(advisory=True)
    assert [serve(one, ask(requests_per_minute=1), 0.0) for _ in range(2)] == ["", "request_rate"]


def test_tenants_have_limits_of_their_own_and_nobody_without_limits_is_counted() -> None:
    one = made()
    kinds = [serve(one, ask(name, requests_per_minute=1), 0.0) for name in "aabb"]
    assert kinds == ["", "request_rate", "", "request_rate"]
    free = [serve(one, replace(ask("a"), limits=None), 0.0) for _ in range(5)]
    assert free == [""] * 5 and len(one._quotas._windows) == 2


def test_limits_that_change_count_at_once_with_what_was_used_before() -> None:
    one = made()
    assert serve(one, ask(requests_per_minute=9), 0.0) == ""
    assert serve(one, ask(requests_per_minute=1), 1.0) == "request_rate"
    assert serve(one, ask(requests_per_minute=2), 1.0) == ""
    assert serve(one, ask(), 1.0) == "", "and without any, nothing is refused"


@pytest.mark.parametrize("seed", range(12))
def test_no_60_seconds_have_more_than_the_limits_and_waiting_as_told_is_enough(seed: int) -> None:
    chance = random.Random(seed)
    one, now_s = made(), chance.random()
    requests_max, tokens_max = chance.randint(1, 8), chance.randint(100, 600)
    limits = {"requests_per_minute": requests_max, "tokens_per_minute": tokens_max}
    let_in: list[tuple[float, int]] = []
    for _ in range(120):
        now_s += chance.expovariate(chance.choice((0.05, 0.3, 3.0)))
        request = ask(tokens=chance.randint(1, 60), output=chance.randint(0, 40), **limits)
        found = one.on_request(request, now_s)
        if isinstance(found, Reject):
            assert 0 < found.retry_after_s <= WINDOW_S + 1.1
            now_s += found.retry_after_s
            found = one.on_request(request, now_s)
            assert isinstance(found, Route), "nobody else asked meanwhile"
        used = chance.randint(request.prompt_tokens, request.prompt_tokens + 40)
        used = min(used, request.prompt_tokens + request.output_tokens_max)
        one.on_used(request.request_id, now_s, used)
        one.on_finished(request.request_id, now_s)
        let_in.append((now_s, used))
        lately = [tokens for at_s, tokens in let_in if at_s > now_s - 60.0]
        assert len(lately) <= requests_max and sum(lately) <= tokens_max
    one.check()


# ---- several frontends


def test_frontends_count_together_what_a_tenant_asks_them_for() -> None:
    first, second = acquainted(2)
    limits = {"requests_per_minute": 3, "tokens_per_minute": 1_000}
    kinds = []
    for at_s in range(1, 6):
        kinds.append(serve((first, second)[at_s % 2], ask(**limits), float(at_s)))
        pass_on([first, second], at_s + 0.5)
    assert kinds == ["", "", "", "request_rate", "request_rate"]


def test_what_was_given_back_elsewhere_may_be_used_here() -> None:
    first, second = acquainted(2)
    assert serve(first, ask(tokens_per_minute=150), 1.0, used=60) == ""
    pass_on([first, second], 1.5)
    assert serve(second, ask(tokens=90, output=0, tokens_per_minute=150), 2.0) == ""
    pass_on([first, second], 2.5)
    assert serve(first, ask(tokens=1, output=0, tokens_per_minute=150), 3.0) == "token_rate"


def test_requests_in_flight_elsewhere_count_until_their_frontend_falls_silent() -> None:
    first, second = acquainted(2)
    held, limits = ask(requests_in_flight_max=1), TenantLimits(requests_in_flight_max=1)
    assert isinstance(first.on_request(held, 1.0), Route)
    pass_on([first, second], 1.5)
    assert serve(second, replace(ask(), limits=limits), 2.0) == "tenant_full"
    assert serve(second, replace(ask("b"), limits=limits), 2.0) == ""
    silent_s = 2.0 + second.config.frontend_silent_s_max + 1.0
    second.on_tick(silent_s)
    assert serve(second, replace(ask(), limits=limits), silent_s) == ""
    second.check()


@pytest.mark.slow
def test_a_stream_of_hours_counts_as_in_flight_here_and_elsewhere_while_its_frontend_has_it() -> (
    None
):
    first, second = acquainted(2)
    held = ask(requests_in_flight_max=1)
    assert isinstance(first.on_request(held, 1.0), Route)
    pass_on([first, second], 1.5)
    for now_s in range(2, 4_000, 2):
        first.on_tick(float(now_s), lambda: {held.request_id})
        second.on_tick(float(now_s))
        pass_on([first, second], float(now_s))
    for one in (first, second):
        assert serve(one, ask(requests_in_flight_max=1), 4_000.0) == "tenant_full"
    first.on_tick(4_001.0)  # a request that the frontend lost without a word
    pass_on([first, second], 4_001.0)
    for one in (first, second):
        assert serve(one, ask(requests_in_flight_max=1), 4_002.0) == ""
        one.check()


def test_an_end_that_is_told_frees_the_place_elsewhere() -> None:
    first, second = acquainted(2)
    held = ask(requests_in_flight_max=1)
    assert isinstance(first.on_request(held, 1.0), Route)
    pass_on([first, second], 1.5)
    first.on_used(held.request_id, 2.0, 60)
    first.on_finished(held.request_id, 2.0)
    pass_on([first, second], 2.5)
    assert serve(second, ask(requests_in_flight_max=1), 3.0) == ""


def test_notes_that_come_twice_count_once() -> None:
    first, second = acquainted(2)
    assert serve(first, ask(requests_per_minute=2), 1.0) == ""
    batch = first.take_notes(1.0, 10_000)
    assert [note.requests for note in batch.usage] == [1]
    for _ in range(5):
        second.on_routed_elsewhere(batch, 1.1)
    assert serve(second, ask(requests_per_minute=2), 1.2) == ""
    assert serve(second, ask(requests_per_minute=2), 1.2) == "request_rate"


def test_clocks_of_frontends_differ() -> None:
    """Moments of a note are on the clock of its sender, which may be a day ahead."""
    first, second = acquainted(2)
    assert serve(first, ask(requests_per_minute=1), 90_000.0) == ""
    second.on_routed_elsewhere(first.take_notes(90_010.0, 10_000), 20.0)
    refused = rejection(second, ask(requests_per_minute=1), 20.0)
    assert refused.kind == "request_rate" and 50.0 < refused.retry_after_s <= 51.1


# ---- what is kept


def test_nothing_that_is_given_back_makes_use_of_less_than_nothing() -> None:
    window = UsageWindow()
    window.add(5.0, 0, -100, 6.0)  # the note before it was lost
    assert window.used(6.0) == (0, 0)
    window.add(5.0, 1, 30, 6.0)
    window.add(4.0, 1, 20, 6.0)
    window.add(9_999.0, 1, 1, 6.0)  # of a clock that ran ahead: now
    assert window.used(6.0) == (3, 51) and window.used(6.0 + 62) == (0, 0)
    window.check()


def test_many_tenants_do_not_fill_memory_and_a_request_that_nobody_ends_is_forgotten() -> None:
    quotas = TenantQuotas(request_s_max=100.0)
    for number in range(TENANTS_MAX + 50):
        quotas.used_elsewhere(UsageNote(0.0, f"t{number}", 1, 1), 0.0, 0.0)
    assert len(quotas._windows) == TENANTS_MAX
    assert "t0" not in quotas._windows and f"t{TENANTS_MAX}" in quotas._windows
    for number in range(50):
        quotas.admitted(ask(f"u{number}"), float(number))
    quotas.check()
    quotas.tick(130.0, frozenset)
    assert len(quotas._admitted) == 19 and quotas._in_flight_of["u0"] == 0
    quotas.check()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_notes_a_frontend_never_lets_in_more_than_it_saw_itself(
    seed: int,
) -> None:
    """Lost, doubled and late notes make counts too low or too high, never wrong about the own."""
    chance = random.Random(seed)
    frontends, limits = acquainted(3), {"requests_per_minute": 4, "requests_in_flight_max": 3}
    own: list[list[float]] = [[] for _ in frontends]
    running: list[list[Request]] = [[] for _ in frontends]
    late, now_s = [], 1.0
    for _ in range(250):
        now_s += chance.choice((0.0, 0.3, 2.0, 9.0))
        number = chance.randrange(3)
        one = frontends[number]
        if running[number] and chance.random() < 0.5:
            over = running[number].pop(0)
            one.on_used(over.request_id, now_s, chance.randint(0, 200))
            one.on_finished(over.request_id, now_s)
        request = ask(**limits)
        if isinstance(one.on_request(request, now_s), Route):
            own[number].append(now_s)
            running[number].append(request)
        assert sum(at_s > now_s - 60.0 for at_s in own[number]) <= 4
        assert len(running[number]) <= 3
        late.append(one.take_notes(now_s, 10_000))
        for batch in chance.sample(late, min(len(late), chance.randint(0, 3))):
            for other in frontends:
                other.on_routed_elsewhere(batch, now_s)
        for each in frontends:
            each.on_tick(now_s)
            each.check()


def arrival(one: Conductor, now_s: float, in_flight: int | None = 0, **limits: int) -> str:
    found = one.on_arrival("a", TenantLimits(**limits), in_flight, now_s)
    assert found is None or found.retry_after_s > 0
    return "" if found is None else found.kind


def test_an_arrival_is_refused_for_what_is_used_up_before_its_prompt_is_read() -> None:
    first, second = acquainted(2)
    for one in (first, second):
        assert arrival(one, 0.0, requests_per_minute=1, requests_in_flight_max=1) == ""
    assert arrival(first, 0.0, 2, requests_in_flight_max=2) == "tenant_full"
    assert arrival(first, 0.0, None, requests_in_flight_max=2) == "", "nothing will be in flight"
    held = ask(requests_in_flight_max=1)
    assert isinstance(first.on_request(held, 1.0), Route)
    pass_on([first, second], 1.5)
    for one, here in ((first, 1), (second, 0)):
        assert arrival(one, 2.0, here, requests_in_flight_max=1) == "tenant_full"
        assert arrival(one, 2.0, here, requests_per_minute=1) == "request_rate"
        assert arrival(one, 2.0, here, tokens_per_minute=TOKENS + OUTPUT - 1) == "token_rate"
        assert arrival(one, 2.0, here, requests_per_minute=2, requests_in_flight_max=2) == ""
        one.check()


def test_a_request_that_is_charged_without_a_route_counts_here_and_elsewhere() -> None:
    first, second = acquainted(2)
    first.on_charged("a", 1.0)
    pass_on([first, second], 1.5)
    for one in (first, second):
        assert arrival(one, 2.0, requests_per_minute=1) == "request_rate"
        assert arrival(one, 63.0, requests_per_minute=1) == ""


def test_each_of_several_answers_counts_as_a_request() -> None:
    quotas = TenantQuotas(600.0)
    limits = TenantLimits(requests_per_minute=5, requests_in_flight_max=4)
    assert quotas.arrival_rejection("a", limits, 0, 0.0, arriving=4) is None
    full = quotas.arrival_rejection("a", limits, 1, 0.0, arriving=4)
    assert full is not None and full.kind == "tenant_full" and "asks for 4" in full.reason
    for _ in range(3):
        quotas.admitted(ask(requests_per_minute=5), 0.0)
    assert quotas.arrival_rejection("a", limits, 0, 1.0, arriving=2) is None
    many = quotas.arrival_rejection("a", limits, 0, 1.0, arriving=3)
    assert many is not None and many.kind == "request_rate"
    assert "has had 3 requests within a minute, asks for 3" in many.reason
    new = quotas.arrival_rejection("b", TenantLimits(requests_per_minute=2), 0, 1.0, arriving=3)
    assert new is not None and new.kind == "request_rate", "also before its first request"


def test_the_tokens_of_all_answers_are_asked_for_at_once() -> None:
    quotas = TenantQuotas(600.0)
    several = replace(ask(tokens=100, output=100, tokens_per_minute=1_000), answers=5)
    assert quotas.rejection(several, 0, 0.0) is None
    never = quotas.rejection(replace(several, answers=6), 0, 0.0)
    assert never is not None and never.kind == "too_large" and "6 times" in never.reason
    quotas.admitted(ask(tokens=100, output=100, tokens_per_minute=1_000), 0.0)
    later = quotas.rejection(several, 0, 1.0)
    assert later is not None and later.kind == "token_rate" and "asks for 1000" in later.reason
