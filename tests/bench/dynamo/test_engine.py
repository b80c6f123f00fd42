"""The rules of Dynamo's engine one by one, on traces small enough to do by hand."""

from __future__ import annotations

import random

import pytest

from bench.dynamo.decode_worker import DynamoDecodeWorker, OutOfBlocks
from bench.dynamo.fleet import RoundRobinFleet
from bench.dynamo.prefill_worker import DynamoPrefillWorker
from bench.dynamo.timing import Steps, alone_s, prefill_pass_s
from conductor import Request
from conductor.queue_order import ALWAYS
from loadtest.simulator.cluster.job import Offered, SimulatedJob

STEP_S = 5.74e-3  # a decode step of next to no context


def prompt(tokens: int, at_s: float = 0.0, output: int = 1, first_key: int = 0) -> Offered:
    keys = [key.to_bytes(8, "little") for key in range(first_key, first_key + tokens // 512)]
    return Offered(first_key, at_s, tokens, output, keys)


def own(tokens: int, number: int, at_s: float = 0.0, output: int = 1) -> Offered:
    """A prompt that shares nothing with others."""
    return prompt(tokens, at_s, output, first_key=1_000_000 * (number + 1))


def job(one: Offered) -> SimulatedJob:
    """The same as a worker gets it."""
    request = Request(f"r{one.number}", one.prompt_tokens, one.keys, one.output_tokens)
    return SimulatedJob(one.number, request, one.output_tokens, one.at_s)


def replayed(
    *offered: Offered, workers: int = 1, overhead_tokens: float = ALWAYS
) -> list[SimulatedJob]:
    """In order of the offered; `run` checks that nothing stayed behind."""
    return RoundRobinFleet(2_048, workers, workers, overhead_tokens).run(offered)


def test_a_pass_takes_what_the_polynomial_says() -> None:
    assert prefill_pass_s(8192) == pytest.approx(0.16913692, abs=1e-7)
    assert alone_s(8192 + 100) == prefill_pass_s(8192) + prefill_pass_s(100)


def test_many_steps_at_once_are_the_steps_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    room = 2_048 * 512
    for _ in range(50):
        count, context = rng.randrange(1, 200), rng.randrange(1_000, room // 2)
        steps, spent_s = Steps.of(count, context, room), 0.0
        for number in range(rng.randrange(1, 300)):
            assert steps.until(spent_s - 1e-9) == max(1, number)
            spent_s += Steps.of(count, context + number * count, room).first_s
            assert steps.seconds(number + 1) == pytest.approx(spent_s, rel=1e-12)


def test_prompts_that_wait_share_a_pass_in_their_order_and_the_last_is_cut() -> None:
    first, second, third = replayed(own(5_000, 1), own(5_000, 2), own(5_000, 3))
    full_s = prefill_pass_s(8_192)
    assert first.prefilled_s == full_s
    assert second.started_s == 0.0 and third.started_s == full_s
    assert second.prefilled_s == third.prefilled_s == full_s + prefill_pass_s(15_000 - 8_192)


def test_what_arrives_at_the_moment_a_pass_ends_is_in_the_next_one() -> None:
    end_s = prefill_pass_s(8_192)
    _, waiting, late = replayed(own(8_192, 1), own(3_000, 2, 0.01), own(100, 3, end_s))
    assert waiting.started_s == late.started_s == end_s
    assert waiting.prefilled_s == late.prefilled_s == end_s + prefill_pass_s(3_100)


def test_the_first_token_comes_one_decode_step_after_the_prefill() -> None:
    (alone,) = replayed(own(2_000, 1, output=3))
    step_s = Steps.of(1, 2_000, 2_048 * 512).first_s
    assert alone.ttft_s == prefill_pass_s(2_000) + step_s
    assert alone.itl_s == pytest.approx(step_s, rel=1e-4)


def test_a_prompt_that_comes_during_a_step_joins_at_its_end() -> None:
    long, late = replayed(own(1_000, 1, output=2_000), own(1_000, 2, at_s=1.0))
    assert late.joined_s is not None and long.joined_s is not None
    assert long.first_token_s is not None and late.prefilled_s is not None
    assert late.prefilled_s == 1.0 + prefill_pass_s(1_000)
    assert 0 <= late.joined_s - late.prefilled_s < 2 * STEP_S
    assert late.joined_s == pytest.approx(
        long.first_token_s
        - Steps.of(1, 1_000, 2_048 * 512).first_s
        + Steps.of(1, 1_000, 2_048 * 512).seconds(
            Steps.of(1, 1_000, 2_048 * 512).until(late.prefilled_s - long.joined_s)
        ),
        abs=1e-12,
    )


def test_only_whole_blocks_hit_and_the_last_token_is_always_computed() -> None:
    first, same, longer = replayed(prompt(1_024), prompt(1_024, 5.0), prompt(1_300, 10.0))
    assert (first.cached_tokens, same.cached_tokens, longer.cached_tokens) == (0, 512, 1_024)


def test_blocks_can_be_hit_within_the_pass_that_computes_them() -> None:
    _, second = replayed(prompt(1_000), prompt(1_000))
    assert second.cached_tokens == 512
    assert second.prefilled_s == prefill_pass_s(1_000 + 488)


def test_a_prompt_that_does_not_fit_blocks_those_behind_it() -> None:
    worker = DynamoPrefillWorker("p0", blocks=10)
    jobs = held, large, small = job(own(512 * 6, 1)), job(own(512 * 6, 2)), job(own(512, 3))
    for found in jobs:
        worker.add(found)
    worker.start_pass(0.0)
    assert worker.end_pass() == [held]
    assert worker.start_pass(1.0) == 0.0  # its source is held until decode took it over
    worker.release(held)
    worker.start_pass(2.0)
    assert worker.end_pass() == [large, small]
    assert [found.started_s for found in jobs] == [0.0, 2.0, 2.0]


def test_what_somebody_holds_of_its_prefix_needs_no_room() -> None:
    worker = DynamoPrefillWorker("p0", blocks=10)
    worker.add(job(prompt(512 * 6)))
    worker.start_pass(0.0)
    worker.end_pass()
    longer = job(prompt(512 * 8))  # six of its eight blocks are held, four are free
    worker.add(longer)
    worker.start_pass(1.0)
    assert longer.started_s == 1.0 and longer.cached_tokens == 512 * 6


def test_a_decode_worker_takes_over_first_come_first_served_while_prompts_fit() -> None:
    worker = DynamoDecodeWorker("d0", blocks=10)
    first, large = job(own(512 * 6, 1, output=3)), job(own(512 * 6, 2))
    small = job(own(512, 3))
    worker.pending.extend((first, large, small))
    came, end_s = worker.plan(0.0)
    assert came == [first] and end_s is not None
    assert worker.end_span(end_s) == [first]
    assert worker.plan(end_s)[0] == [large, small]


def test_a_decode_worker_decodes_at_most_256_sequences() -> None:
    worker = DynamoDecodeWorker("d0", blocks=2_048)
    worker.pending.extend(job(own(512, number, output=9)) for number in range(300))
    worker.plan(0.0)
    assert len(worker.batch) == 256 and len(worker.waiting) == 44


def test_an_answer_takes_one_more_block_for_each_512_tokens() -> None:
    worker = DynamoDecodeWorker("d0", blocks=10)
    worker.pending.append(job(own(600, 1, output=1_000)))
    _, end_s = worker.plan(0.0)
    assert worker.pool.room == 8 and end_s is not None
    worker.end_span(end_s)
    worker.pool.check()
    assert worker.pool.room == 10 and len(worker.pool._idle) == 3  # 1,600 tokens: 3 whole blocks


def handed_over(blocks: int, *offered: Offered) -> RoundRobinFleet:
    """One decode worker of this size behind a prefill worker that is never short of room."""
    fleet = RoundRobinFleet(2_048, 1, 1)
    fleet.decodes = {"d0": DynamoDecodeWorker("d0", blocks)}
    fleet.run(offered)
    return fleet


def test_a_sequence_that_cannot_grow_preempts_the_last_that_joined_as_in_dynamos_replay() -> None:
    # Times of Dynamo 1.6.1's own replay of these requests with 16 blocks.
    offered = own(2_100, 1, output=3_000), own(2_200, 2, output=3_000)
    first, second, third = handed_over(16, *offered, own(2_500, 3, 50.0, output=10)).jobs
    assert (first.preemptions, second.preemptions, third.preemptions) == (0, 1, 0)
    assert first.finished_s == pytest.approx(90.2766616, abs=1e-4)
    assert second.finished_s == pytest.approx(121.2881733, abs=1e-4)
    # Its blocks were there since 59.7 s; it waited behind what was preempted.
    assert third.joined_s == pytest.approx(59.6915405, abs=1e-4)
    assert third.first_token_s == pytest.approx(90.3092032, abs=1e-4)
    assert third.finished_s == pytest.approx(90.6022154, abs=1e-4)


def test_prompts_that_come_to_an_idle_worker_together_make_copies_of_what_they_share() -> None:
    worker = DynamoDecodeWorker("d0", blocks=10)
    worker.pending.extend([job(prompt(1_024)), job(prompt(1_024))])
    worker.plan(0.0)
    assert worker.pool.room == 6
    worker.pending.append(job(prompt(1_024)))
    _, end_s = worker.plan(0.0)
    assert worker.pool.room == 6 and end_s is not None  # a busy one finds them


def test_what_was_lost_is_computed_again_in_no_time_of_its_own() -> None:
    first, second = handed_over(
        100, own(20_000, 1, output=25_000), own(20_100, 2, output=25_000)
    ).jobs
    assert second.preemptions == 1
    assert first.finished_s == pytest.approx(776.8191277, abs=1e-4)
    assert second.finished_s == pytest.approx(1370.5425609, abs=1e-4)


def test_with_one_batch_that_never_grows_back_the_engine_ends_as_dynamos_does() -> None:
    with pytest.raises(OutOfBlocks, match="8193 tokens"):
        handed_over(16, own(2_100, 1, output=9_000))
    with pytest.raises(OutOfBlocks, match="4097 tokens, 5000 tokens"):
        handed_over(
            16, own(2_100, 1, output=3_000), own(2_200, 2, output=3_000), own(5_000, 3, 10.0)
        )


def test_preempted_sequences_end_once_and_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    offered = [
        own(rng.randrange(100, 9_000), number, number / 10, rng.randrange(1, 3_000))
        for number in range(30)
    ]
    try:
        fleet = handed_over(64, *offered)
    except OutOfBlocks:
        return  # as in Dynamo's own replay, what waits in front may not fit for ever
    assert all(found.finished_s is not None for found in fleet.jobs)
    assert fleet.decodes["d0"].pool.room == 64


def test_round_robin_turns_by_arrival_for_prefill_and_by_completion_for_decode() -> None:
    long, short, third = replayed(own(8_000, 1), own(600, 2), own(600, 3), workers=2)
    assert [found.prefill for found in (long, short, third)] == ["p0", "p1", "p0"]
    assert [found.decode for found in (short, long)] == ["d0", "d1"]


def test_with_keys_a_short_prompt_overtakes_a_long_one_between_two_chunks() -> None:
    worker = DynamoPrefillWorker("p0", blocks=2_048)
    long, short = job(own(40_000, 1)), job(own(600, 2))
    worker.add(long, order_key_s=5.0)
    worker.start_pass(0.0)
    assert worker.end_pass() == []
    worker.add(short, order_key_s=0.1)
    worker.start_pass(1.0)
    assert worker.end_pass() == [short]
    assert worker.queue_tokens == 40_000 - (2 * 8_192 - 600)


def test_an_overtaken_prompt_keeps_the_room_it_was_promised() -> None:
    worker = DynamoPrefillWorker("p0", blocks=100)
    long, other = job(own(512 * 90, 1)), job(own(512 * 20, 2))
    worker.add(long, order_key_s=5.0)
    worker.start_pass(0.0)
    worker.end_pass()
    worker.add(other, order_key_s=0.1)
    worker.start_pass(1.0)
    assert other.started_s is None  # 90 of 100 blocks are spoken for
    worker.pool.check()


def test_shared_passes_end_before_a_long_prompt_fills_them() -> None:
    short, long = replayed(own(600, 1), own(20_000, 2), overhead_tokens=1_000.0)
    assert short.prefilled_s == prefill_pass_s(600)
    assert long.started_s == short.prefilled_s
