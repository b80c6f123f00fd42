"""Admission, prefill chunks and decode batches, without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from backends.engine.batching.batching import (
    Chunk,
    DecodeBatching,
    PrefillBatching,
    Progress,
    next_chunks,
)
from backends.engine.batching.pages import PagePool
from conductor.queue_order import ALWAYS, QueueOrder, short_step_tokens

BLOCK_TOKENS = 16


def prefill(
    pages: int = 64, chunk_tokens: int = 64, slots: int = 8, waiting: int = 8
) -> tuple[PagePool, PrefillBatching]:
    pool = PagePool(pages)
    return pool, PrefillBatching(pool, BLOCK_TOKENS, chunk_tokens, slots, waiting)


def decode(pages: int = 64, slots: int = 8, waiting: int = 8) -> tuple[PagePool, DecodeBatching]:
    pool = PagePool(pages)
    return pool, DecodeBatching(pool, BLOCK_TOKENS, slots, waiting)


def start_all(batching: PrefillBatching, computed_tokens: int = 0) -> None:
    for admitted in batching.admit():
        batching.start(admitted.request_id, computed_tokens)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    _, batching = prefill()
    batching.add("a", 150)
    start_all(batching)
    steps = []
    while chunks := batching.next_step():
        steps.append([(chunk.start, chunk.tokens, chunk.is_last) for chunk in chunks])
        batching.computed(chunks)
    assert steps == [[(0, 64, False)], [(64, 64, False)], [(128, 22, True)]]


def test_short_prompts_share_a_step() -> None:
    _, batching = prefill()
    for name, tokens in (("a", 10), ("b", 20), ("c", 30), ("d", 40)):
        batching.add(name, tokens)
    start_all(batching)
    chunks = batching.next_step()
    assert [(chunk.request_id, chunk.tokens) for chunk in chunks] == [
        ("a", 10),
        ("b", 20),
        ("c", 30),
    ]
    assert batching.computed(chunks) == ["a", "b", "c"]
    assert [chunk.request_id for chunk in batching.next_step()] == ["d"]


def test_a_long_prompt_does_not_fill_the_step_of_a_short_one() -> None:
    short, long = Progress("a", 10, 0), Progress("b", 500, 0)
    chunks = next_chunks([short, long], 64, BLOCK_TOKENS, overhead_tokens=32.0)
    assert [chunk.request_id for chunk in chunks] == ["a"]
    filled = next_chunks([short, long], 64, BLOCK_TOKENS)
    assert [chunk.tokens for chunk in filled] == [10, 48]


def test_short_prompts_share_a_step_when_many_wait() -> None:
    prompts = [Progress(name, 20, 0) for name in "abcd"]
    few = next_chunks(prompts[:2], 64, BLOCK_TOKENS, overhead_tokens=16.0)
    many = next_chunks(prompts, 64, BLOCK_TOKENS, overhead_tokens=16.0)
    behind = next_chunks(prompts[:2], 64, BLOCK_TOKENS, overhead_tokens=16.0, waiting=1)
    assert [len(chunks) for chunks in (few, many, behind)] == [1, 2, 2]


def test_the_rest_of_the_budget_goes_to_the_next_prompt_in_whole_blocks() -> None:
    _, batching = prefill()
    batching.add("a", 20)
    batching.add("b", 100)
    start_all(batching)
    assert batching.next_step() == [Chunk("a", 0, 20, True), Chunk("b", 0, 32, False)]


def test_a_chunk_after_a_cached_prefix_ends_with_a_block() -> None:
    assert next_chunks([Progress("a", 200, 31)], 64, BLOCK_TOKENS) == [Chunk("a", 31, 49, False)]
    assert next_chunks([Progress("a", 200, 199)], 64, BLOCK_TOKENS) == [Chunk("a", 199, 1, True)]


def test_a_request_whose_prefix_is_still_fetched_does_not_hold_back_the_others() -> None:
    _, batching = prefill()
    batching.add("fetching", 100)
    batching.add("ready", 30)
    assert [admitted.request_id for admitted in batching.admit()] == ["fetching", "ready"]
    batching.start("ready", 0)
    assert [chunk.request_id for chunk in batching.next_step()] == ["ready"]
    batching.start("fetching", 96)
    in_order = [chunk.request_id for chunk in batching.next_step()]
    assert in_order == ["fetching", "ready"], "its turn was first, and is again"


ORDER = QueueOrder(stretch=10.0, wait_s_max=5.0)


def test_a_short_prompt_overtakes_a_long_one_between_two_chunks() -> None:
    _, batching = prefill()
    batching.add("long", 200, ORDER.key_s(0.0, work_s=2.0))
    start_all(batching)
    batching.computed(batching.next_step())
    batching.add("short", 20, ORDER.key_s(1.0, work_s=0.2))
    assert (batching.ahead("short"), batching.ahead("long")) == (0, 1)
    start_all(batching)
    assert batching.next_step() == [Chunk("short", 0, 20, True), Chunk("long", 64, 32, False)]
    assert batching.computed(batching.next_step()) == ["short"]
    assert batching.ahead("long") == 0, "the short one only waits to be taken away"
    batching.remove("short")
    assert batching.next_step() == [Chunk("long", 96, 64, False)], "and loses nothing by it"
    batching.check()


def test_a_step_is_short_while_a_prompt_that_goes_first_is_loaded() -> None:
    batching = PrefillBatching(PagePool(64), BLOCK_TOKENS, 64, 8, 8, overhead_tokens=5.0)
    batching.add("long", 200, ORDER.key_s(0.0, work_s=2.0))
    start_all(batching)
    assert batching.next_step() == [Chunk("long", 0, 64, False)]
    batching.add("first", 100, ORDER.key_s(0.0, work_s=0.1))
    batching.add("last", 100, ORDER.key_s(0.0, work_s=9.0))
    batching.admit()
    assert batching.next_step() == [Chunk("long", 0, 32, False)], "4 x 5 tokens, in whole blocks"
    batching.start("first", 96)
    assert batching.next_step() == [Chunk("first", 96, 4, True)]
    batching.computed(batching.next_step())
    batching.remove("first")
    assert batching.next_step() == [Chunk("long", 0, 64, False)], "nobody waits for the last one"
    batching.check()


@pytest.mark.parametrize(
    ("overhead_tokens", "short"), [(0.0, 16), (3.9, 16), (4.1, 32), (15.9, 64), (1e9, 64)]
)
def test_a_short_step_is_whole_blocks_and_no_more_than_a_step(
    overhead_tokens: float, short: int
) -> None:
    assert short_step_tokens(64, BLOCK_TOKENS, overhead_tokens) == short
    assert short_step_tokens(64, BLOCK_TOKENS, ALWAYS) == 64


def test_a_short_prompt_that_waits_gets_its_pages_before_a_long_one() -> None:
    pool, batching = prefill(pages=4)
    for name, arrived_s, work_s, tokens in (
        ("running", 0.0, 0.1, 64),
        ("long", 0.1, 2.0, 64),
        ("short", 0.2, 0.1, 64),
    ):
        batching.add(name, tokens, ORDER.key_s(arrived_s, work_s))
        batching.admit()
    pool.release(batching.remove("running"))
    assert [admitted.request_id for admitted in batching.admit()] == ["short"]
    batching.check()


def test_a_stream_of_short_prompts_delays_a_long_one_by_no_more_than_the_bound() -> None:
    _, batching = prefill(waiting=64)
    batching.add("long", 128, ORDER.key_s(0.0, work_s=100.0))
    served_at_s: dict[str, int] = {}
    for now_s in range(20):  # one prompt of a whole step comes every second, and takes a second
        batching.add(f"short at {now_s}", 64, ORDER.key_s(float(now_s), work_s=0.1))
        start_all(batching)
        chunks = batching.next_step()
        for request_id in batching.computed(chunks):
            served_at_s[request_id] = now_s + 1
            batching.remove(request_id)
        batching.check()
    overtook = [name for name, at_s in served_at_s.items() if at_s < served_at_s["long"]]
    assert overtook == [f"short at {now_s}" for now_s in range(4)]


def test_equal_keys_are_served_as_they_came_and_a_removed_one_leaves_no_gap() -> None:
    _, batching = prefill(slots=1)
    for name in "abcd":
        batching.add(name, 10)
    batching.remove("b")
    served = []
    while admitted := batching.admit():
        served.append(admitted[0].request_id)
        batching.remove(served[-1])
        batching.check()
    assert served == ["a", "c", "d"]


def test_queue_tokens_are_the_prompt_tokens_not_computed_yet() -> None:
    _, batching = prefill(slots=1)
    batching.add("a", 100)
    batching.add("b", 50)
    assert batching.queue_tokens == 150
    start_all(batching, computed_tokens=48)
    assert batching.queue_tokens == 102
    batching.computed(batching.next_step())
    assert batching.queue_tokens == 50
    batching.remove("b")
    assert batching.queue_tokens == 0


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    _, batching = decode(waiting=1)
    assert batching.add("a", 10, 10)
    assert not batching.has_room
    assert not batching.add("b", 10, 10)
    batching.check()
    assert batching.waiting == 1


@pytest.mark.parametrize("make", [prefill, decode])
def test_a_request_that_goes_on_waits_in_a_full_queue_and_takes_no_place_of_others(
    make: Callable[..., tuple[PagePool, Any]],
) -> None:
    _, batching = make(slots=1, waiting=1)
    assert batching.add("first", 16, 1) and batching.admit()
    assert batching.add("waiting", 16, 1) and not batching.add("refused", 16, 1)
    assert batching.add("resumed", 16, 1, is_resumed=True)
    batching.check()
    batching.remove("waiting")
    assert batching.has_room and batching.add("next", 16, 1)
    assert not batching.has_room
    batching.remove("resumed")
    batching.check()
    assert not batching.has_room


def test_decode_reserves_the_pages_of_the_longest_output() -> None:
    pool, batching = decode()
    batching.add("a", 17, 100)
    [admitted] = batching.admit()
    assert len(admitted.pages) == 8, "117 tokens touch 8 blocks of 16"
    assert pool.used_pages == 8


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request() -> None:
    pool, batching = decode(pages=4)
    batching.add("first", 10, 38)
    batching.add("large", 10, 38)
    batching.add("small", 10, 6)
    assert [admitted.request_id for admitted in batching.admit()] == ["first"]
    assert batching.waiting == 2
    pool.release(batching.remove("first"))
    assert [admitted.request_id for admitted in batching.admit()] == ["large", "small"]


def test_slots_bound_the_batch() -> None:
    _, batching = decode(slots=2)
    for name in "abc":
        batching.add(name, 4, 4)
    assert len(batching.admit()) == 2
    batching.remove("a")
    assert [admitted.request_id for admitted in batching.admit()] == ["c"]


def test_a_removed_requests_pages_stay_taken_until_the_caller_releases_them() -> None:
    pool, batching = decode()
    batching.add("a", 4, 4)
    batching.admit()
    batching.start("a", 5)
    pages = batching.remove("a")
    assert pool.used_pages == 1, "a late transfer may still write into them"
    pool.release(pages)
    assert batching.next_step() == []


def test_adding_a_request_larger_than_the_engine_fails_an_assertion() -> None:
    _, batching = decode(pages=2)
    with pytest.raises(AssertionError):
        batching.add("a", 30, 3)


def test_two_thousand_random_prefill_steps_keep_the_invariants(seed: int) -> None:
    chance = random.Random(seed)
    pool, batching = prefill(pages=40, slots=5, waiting=6)
    left: dict[str, int] = {}
    for step in range(2000):
        verb = chance.choice(["add", "add", "admit", "step", "step", "remove"])
        if verb == "add" and batching.has_room:
            left[str(step)] = chance.randint(1, 300)
            assert batching.add(str(step), left[str(step)], chance.choice([0.0, chance.random()]))
        elif verb == "admit":
            for admitted in batching.admit():
                cached = chance.randrange(left[admitted.request_id])
                batching.start(admitted.request_id, cached)
                left[admitted.request_id] -= cached
        elif verb == "step":
            chunks = batching.next_step()
            assert sum(chunk.tokens for chunk in chunks) <= 64
            for chunk in chunks:
                left[chunk.request_id] -= chunk.tokens
                end = chunk.start + chunk.tokens
                assert chunk.tokens > 0
                assert chunk.is_last == (left[chunk.request_id] == 0)
                assert chunk.is_last or end % BLOCK_TOKENS == 0
            for request_id in batching.computed(chunks):
                pool.release(batching.remove(request_id))
                assert left.pop(request_id) == 0
        elif verb == "remove" and left:
            request_id = chance.choice(list(left))
            pool.release(batching.remove(request_id))
            del left[request_id]
        assert batching.queue_tokens == sum(left.values())
        batching.check()
        pool.check()


def test_steps_that_are_alike_may_be_taken_at_once() -> None:
    _, batching = decode()
    for name, output_tokens in (("a", 7), ("b", 4)):
        assert batching.add(name, 10, output_tokens)
        batching.admit()
        batching.start(name, 11)
    ends = {"a": 17, "b": 13}  # b says less than it might
    assert batching.steps_alike(ends) == 2
    batching.advance(2)
    assert batching.context_tokens == 26 and batching.steps_alike(ends) == 0
    batching.remove("b")
    assert batching.steps_alike(ends) == 4
    with pytest.raises(AssertionError):
        batching.advance(5)


def test_two_thousand_random_decode_steps_never_run_out_of_pages(seed: int) -> None:
    chance = random.Random(seed)
    pool, batching = decode(pages=40, slots=5, waiting=6)
    left: dict[str, int] = {}  # output tokens that a request may still produce
    prompts: dict[str, int] = {}
    for step in range(2000):
        verb = chance.choice(["add", "admit", "step", "step", "remove"])
        if verb == "add" and batching.has_room:
            name = str(step)
            prompts[name], left[name] = chance.randint(1, 200), chance.randint(1, 100)
            assert batching.add(name, prompts[name], left[name])
        elif verb == "admit":
            for admitted in batching.admit():
                batching.start(admitted.request_id, prompts[admitted.request_id])
        elif verb == "step":
            running = batching.next_step()
            batching.computed(running)
            for request_id in running:
                left[request_id] -= 1
                if left[request_id] == 0:
                    pool.release(batching.remove(request_id))
                    del left[request_id]
        elif verb == "remove" and left and chance.random() < 0.2:
            request_id = chance.choice(list(left))
            pool.release(batching.remove(request_id))
            del left[request_id]
        batching.check()
        pool.check()
