"""Two frontends of one fleet: each hears what the other routed, and dies alone."""

from __future__ import annotations

import time

import pytest

from tests.backends.engine.reference import Reference
from tests.e2e.server import Answer, Stream, wait_until
from tests.fleet.site import BACK_S_MAX, Fleet
from tests.fleet.test_fleet import LONG_BEFORE, fresh_prompt, wait_whole

pytestmark = [pytest.mark.e2e, pytest.mark.long]
# More than the reference, so that both pages can be read, and one be killed, in time.
ENDLESS_TOKENS = 7_000
BATCHES = "mooncake_routing_note_batches_total"


def known(fleet: Fleet, host: str) -> float:
    """How many other frontends the one of this host knows; -1 while its page is away."""
    try:
        return fleet.metric(host, "mooncake_frontends_known")
    except OSError:
        return -1.0


def elsewhere(fleet: Fleet, host: str) -> float:
    return fleet.metric(host, "mooncake_routed_elsewhere")


def wait_acquainted(fleet: Fleet) -> None:
    wait_until(lambda: known(fleet, "a") == known(fleet, "b") == 1, "two frontends", BACK_S_MAX)


def beginning_of(stream: Stream, begun: Answer, reference: Reference) -> None:
    """The answer goes on as if nothing had happened; its client leaves when it has seen enough."""
    rest = stream.begun(len(reference.token_ids) - len(begun.output_ids))
    stream.leave()
    seen = begun.output_ids + rest.output_ids
    assert seen[: len(reference.token_ids)] == reference.token_ids


def test_each_frontend_reserves_what_the_other_routed_until_it_is_over(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    wait_acquainted(fleet)
    before = {host: fleet.metric(host, BATCHES, result="received") for host in "ab"}
    streams = {host: fleet.stream(host, story, ENDLESS_TOKENS, tenant="notes") for host in "ab"}
    begun = {host: fleet.begun(stream, LONG_BEFORE) for host, stream in streams.items()}
    for host in "ab":
        wait_until(lambda host=host: elsewhere(fleet, host) == 1, f"{host} to hear of the other")
    for host, stream in streams.items():
        beginning_of(stream, begun[host], reference)
    for host in "ab":
        wait_until(lambda host=host: elsewhere(fleet, host) == 0, f"{host} to hear of the end")
        assert fleet.metric(host, BATCHES, result="received") > before[host]


def test_a_frontend_that_is_killed_costs_its_own_streams_only(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    wait_acquainted(fleet)
    lost = fleet.stream("a", story, ENDLESS_TOKENS, tenant="lost")
    kept = fleet.stream("b", story, ENDLESS_TOKENS, tenant="kept")
    fleet.begun(lost, LONG_BEFORE)
    begun = fleet.begun(kept, LONG_BEFORE)
    killed_s = time.monotonic()
    fleet.hosts["a"].kill("frontend")
    assert lost.all().error, "its client must hear of it"
    print(f"its own stream ended after {time.monotonic() - killed_s:.2f} s")
    beginning_of(kept, begun, reference)
    answers = [fleet.ask("b", fresh_prompt(70 + number), 3) for number in range(5)]
    assert not [answer.error for answer in answers if answer.error]
    wait_until(lambda: elsewhere(fleet, "b") == 0, "b to give its requests up", BACK_S_MAX)
    wait_whole(fleet)
    wait_acquainted(fleet)
