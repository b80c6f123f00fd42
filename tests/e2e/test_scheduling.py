"""What the conductor decides is what the real workers do: hot prefixes, overload, a new policy.

Whether service levels are kept, and how soon an edit takes effect, is measured by
`python -m bench.overload`: on a busy machine a time proves nothing, a counter does.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton

from bench.overload.load import COUNTER as COMPUTED
from bench.overload.load import OverloadClient, OverloadShape
from loadtest.harness.server import set_parameters
from loadtest.replay.prompts import TokenSource
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED
from tests.e2e.load import B, Load, ask, assert_all_answered, prompt
from tests.e2e.server import Answer, Server, Stream, wait_until
from tests.e2e.test_failures import is_back
from tests.e2e.test_pools import holders

PREFIX_BLOCKS = 32
SENT = 20
OVERLOAD_TOKENS = 1024  # of each prompt
LONG_TOKENS, BURST = 2048, 60  # three times what two workers compute in 10x of one prompt


@pytest.fixture(scope="module")
def server(restarted: Server) -> Server:
    for worker in ("prefill_0", "prefill_1", "decode_0", "decode_1"):
        wait_until(lambda w=worker: is_back(restarted, w), f"{worker} to serve", 60.0)
    return restarted


@pytest.mark.long  # tests/e2e/test_pools.py counts the copies of hot prefixes
def test_a_prefix_that_is_sent_20_times_at_load_gets_a_second_copy(
    server: Server, seed: int
) -> None:
    chance = random.Random(seed)
    prefix = [chance.randrange(16, 2048) for _ in range(PREFIX_BLOCKS * B)]

    def send(_: int) -> Answer:
        own = [chance.randrange(16, 2048) for _ in range(B + 5)]
        answer = server.ask(input_ids=prefix + own, max_tokens=2, end_id=-1, return_decision=True)
        assert not answer.error, answer.error
        return answer

    before = copies(server)
    cold = send(0)
    assert cold.cached_tokens == 0
    assert len(set().union(*holders(server, prefix))) == 1, "one node has it"
    with ThreadPoolExecutor(SENT - 1) as pool:
        list(pool.map(send, range(1, SENT)))
    wait_until(
        lambda: all(found == {"s0", "s1"} for found in holders(server, prefix)),
        "both nodes to have every block of the prefix",
    )
    assert copies(server) > before
    with ThreadPoolExecutor(4) as pool:
        warm = list(pool.map(send, range(8)))
    assert all(answer.cached_tokens == PREFIX_BLOCKS * B for answer in warm)
    ttft_s = statistics.median(answer.decision["ttft_s"] for answer in warm)
    print(f"TTFT {cold.decision['ttft_s']:.3f} s when it was new, {ttft_s:.3f} s with two copies")
    assert ttft_s < cold.decision["ttft_s"], "69 tokens are computed instead of 2,117"


def copies(server: Server) -> float:
    return server.metric("mooncake_fetches_total") + server.metric(
        "mooncake_replicated_blocks_total"
    )


def test_a_new_policy_takes_effect_under_load_and_loses_no_request(server: Server) -> None:
    with Load(server) as load:
        load.wait_for_more(5)
        edited_s = time.monotonic()
        server.edit("conductor", "policy", "load_balance")

        def decided_by_it() -> bool:
            return bool(load.answers[-1].decision.get("policy") == "load_balance")

        wait_until(decided_by_it, "a decision of the new policy")
        took_s = time.monotonic() - edited_s
        load.wait_for_more(10)
    print(f"the new policy decided after {took_s:.1f} s")
    assert_all_answered(load)
    policies = [answer.decision["policy"] for answer in load.answers]
    assert policies[0] == "adaptive" and policies[-1] == "load_balance"


def ttft_alone_s(server: Server, number: int) -> float:
    answer = server.ask(
        input_ids=prompt(number, OVERLOAD_TOKENS), max_tokens=1, end_id=-1, return_decision=True
    )
    assert not answer.error, answer.error
    return float(answer.decision["ttft_s"])


def test_under_overload_no_token_of_a_rejected_prompt_is_computed(
    server: Server, seed: int
) -> None:
    alone_s = statistics.median(ttft_alone_s(server, 300 + number) for number in range(3))
    slo_s = max(1.0, 4 * alone_s)  # a slow machine shall serve some as well
    set_parameters(server.repository, "conductor", {"admission": "predictive", "ttft_slo_s": slo_s})
    wait_until(
        lambda: ask(server, 3).decision.get("admission") == "predictive",
        "the service level to be in force",
    )
    shape = OverloadShape(prompt_tokens=OVERLOAD_TOKENS, output_tokens=4, seconds=2.0, at_once=1)
    load = OverloadClient(server.addresses, TokenSource(2048, range(16), seed), shape, seed)
    phase = asyncio.run(load.overload("4x", rate_per_s=40.0, seed=seed))
    assert len(phase.records) == 80 and not phase.of(FAILED)
    assert phase.of(COMPLETED), "whoever comes first is served"
    assert phase.of(REJECTED), "40 prompts/s of 1,024 tokens are about four times what fits"
    assert phase.rejected_without_retry == 0
    assert phase.wasted_tokens == 0
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_with_auto_limits_long_prompts_are_rejected_under_load_and_a_short_one_is_answered(
    server: Server,
) -> None:
    auto = {"ttft_slo_s": "auto", "tbt_slo_s": "auto", "shedding": "limit", "policy": "adaptive"}
    fixed = {"ttft_slo_s": 30, "tbt_slo_s": 1}  # an earlier test may have left the least of auto
    set_parameters(server.repository, "conductor", fixed)
    wait_until(lambda: ask(server, 399).decision["limits"]["ttft_slo_s"] == 30, "fixed limits")
    set_parameters(server.repository, "conductor", auto)
    wait_until(
        lambda: ask(server, 400).decision["limits"]["ttft_slo_s"] == 1.0,
        "the limit of a short prompt to be the least of auto",
    )
    wait_until(server.is_idle, "an idle start")

    def send(number: int) -> Answer:
        return server.ask(input_ids=prompt(number, LONG_TOKENS), max_tokens=1, end_id=-1)

    with ThreadPoolExecutor(BURST) as pool:
        long = [pool.submit(send, 410 + number) for number in range(BURST)]
        wait_until(lambda: any(each.done() and each.result().error for each in long), "a rejection")
        short = server.ask(input_ids=prompt(401, 32), max_tokens=1, end_id=-1, return_decision=True)
        answers = [each.result() for each in long]
    assert not short.error and short.decision["limits"]["ttft_predicted_s"] <= 1.0
    errors = [answer.error for answer in answers if answer.error]
    assert 0 < len(errors) < BURST, "the first ones keep their limit"
    assert all("rejected kind=ttft_slo" in error for error in errors), errors
    assert all(f"(auto: 10x unloaded, at least 1 s, {LONG_TOKENS} tokens" in e for e in errors)
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_a_batch_that_would_be_too_slow_is_predicted_before_any_prefill(server: Server) -> None:
    """Any batch of two is too slow here. Both idle decode workers accept one request each; the next
    request is rejected before its prompt is computed."""
    set_parameters(
        server.repository,
        "conductor",
        {
            "admission": "predictive",
            "shedding": "limit",
            "policy": "cache_aware",
            "ttft_slo_s": 30,
            "tbt_slo_s": 0.0001,
        },
    )
    wait_until(
        lambda: ask(server, 4).decision.get("policy") == "cache_aware", "the limits to be in force"
    )
    wait_until(server.is_idle, "an idle start")
    before = server.metric(COMPUTED, path="computed")
    streams: list[Stream] = []

    def is_decoded(number: int) -> bool:
        """Not at once: the conductor may not have heard yet that a worker is idle again."""
        stream = server.stream(input_ids=prompt(number), max_tokens=7_900, end_id=-1, stream=True)
        try:
            assert all(stream.next() is not None for _ in range(3))
        except triton.InferenceServerException:
            stream.leave()
            return False
        streams.append(stream)
        return True

    try:
        for number in (5, 6):
            wait_until(lambda n=number: is_decoded(n), "an idle decode worker", 120.0)
        refused = server.ask(input_ids=prompt(7), max_tokens=200, end_id=-1)
    finally:
        for stream in streams:
            stream.leave()
    assert "rejected kind=tbt_slo retry_after_s=" in refused.error and not refused.output_ids
    wait_until(server.is_idle, "pages, slots and leases to be free")
    assert not ask(server, 8).error
    served = before + sum(len(prompt(number)) for number in (5, 6, 8))
    wait_until(
        lambda: server.metric(COMPUTED, path="computed") >= served,
        "the prompts that were served to be counted",
    )
    counted = server.metric(COMPUTED, path="computed")
    assert counted < served + len(prompt(7)), "and no other one"
