"""The connector's scheduler in the order in which vLLM calls it: asks, allocations, steps, ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import Move, Orders
from backends.engine.vllm.scheduler import NAME, PinnedPages, StepData, VllmScheduler
from mooncake_store.block_keys import chain_seed

BLOCK, PAGE = 64, 32
SEED = chain_seed("print")


def prompt_of(tokens: int) -> list[int]:
    return list(range(5, 5 + tokens))


class Driven:
    """A scheduler, and what it has sent."""

    def __init__(self, can_continue: bool = True) -> None:
        self.sent: list[Any] = []
        self.scheduler = VllmScheduler(BLOCK, PAGE, self.sent.append, can_continue)

    def stage(self, name: str, tokens: int, loaded: int = 0, saved: int = 0) -> None:
        count = -(-tokens // BLOCK) + 1
        places = [index * 1000 for index in range(count)]
        stage = m.Stage.of(name, prompt_of(tokens), BLOCK, SEED, "", places, loaded)
        stage = type(stage)(
            **{f: getattr(stage, f) for f in stage.__struct_fields__} | {"saved_tokens_max": saved}
        )
        self.scheduler.on_message(stage)
        assert self.sent.pop() == m.Staged(name)

    def unstage(self, name: str) -> None:
        self.scheduler.on_message(m.Unstage(name))

    def step(self, *data: StepData, new: bool = True) -> Orders:
        orders = self.scheduler.orders(data if new else (), () if new else data)
        self.scheduler.check()
        return orders

    def take(self) -> list[Any]:
        sent, self.sent[:] = list(self.sent), []
        return sent


def request(number: int, name: str | None, tokens: int) -> Any:
    params = None if name is None else {NAME: name}
    return SimpleNamespace(
        request_id=f"llm-{number}", kv_transfer_params=params, num_prompt_tokens=tokens
    )


def pages(tokens: int, first: int = 10) -> list[int]:
    return list(range(first, first + -(-tokens // PAGE)))


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 129])
def test_a_load_covers_all_tokens_but_the_last_and_ends_inside_a_page(tokens: int) -> None:
    driven, asked = Driven(), request(1, "a", tokens)
    driven.stage("a", tokens, loaded=tokens - 1)
    assert driven.scheduler.match(asked, 0) == tokens - 1
    driven.scheduler.promised("llm-1", pages(tokens), tokens - 1)
    [move] = driven.step().loads
    assert move.block_ids == pages(tokens - 1)
    assert move.is_aside
    assert driven.take() == [m.Claimed("a", 0, tokens - 1)]


def test_asked_again_it_plans_anew_and_promises_nothing_before_pages_are_allocated() -> None:
    driven, asked = Driven(), request(1, "a", 200)
    driven.stage("a", 200, loaded=192)
    for local in (0, 64, 128, 192):
        assert driven.scheduler.match(asked, local) == 192 - local
        assert driven.step() == Orders([], [], [])
    assert driven.take() == []


def test_the_second_allocation_and_a_preemption_claim_and_load_nothing() -> None:
    driven, asked = Driven(), request(1, "a", 200)
    driven.stage("a", 200, loaded=192)
    driven.scheduler.match(asked, 0)
    driven.scheduler.promised("llm-1", pages(200), 192)
    assert len(driven.step().loads) == 1
    driven.scheduler.promised("llm-1", (), 0)
    assert driven.scheduler.match(asked, 64) == 0  # preempted: its places may be given away
    driven.scheduler.promised("llm-1", (), 0)
    assert driven.step(StepData("llm-1", pages(200), 200)).loads == []
    assert driven.take() == [m.Claimed("a", 0, 192)]


def test_a_stage_that_is_taken_back_between_ask_and_allocation_is_loaded_first() -> None:
    driven, asked = Driven(), request(1, "a", 200)
    driven.stage("a", 200, loaded=192)
    driven.scheduler.match(asked, 0)
    driven.unstage("a")
    assert driven.take() == []
    driven.scheduler.promised("llm-1", pages(200), 192)
    assert len(driven.step().loads) == 1
    assert driven.take() == [m.Claimed("a", 0, 192), m.Unstaged("a", 1)]


def test_a_stage_that_is_taken_back_is_unstaged_when_vllm_finds_no_pages() -> None:
    driven, asked = Driven(), request(1, "a", 200)
    driven.stage("a", 200, loaded=192)
    driven.scheduler.match(asked, 0)
    driven.unstage("a")
    driven.step()
    assert driven.take() == [m.Unstaged("a", 0)]
    assert driven.scheduler.match(asked, 0) == 0


def test_other_requests_are_not_touched() -> None:
    driven = Driven()
    driven.stage("a", 100, loaded=64)
    for other in (request(1, None, 100), request(2, "b", 100), request(3, "a", 99)):
        assert driven.scheduler.match(other, 0) == 0
        driven.scheduler.promised(other.request_id, pages(100), 0)
        assert driven.step(StepData(other.request_id, pages(100), 100)) == Orders([], [], [])
        assert driven.scheduler.finished(other) is False
    assert driven.take() == []


def test_a_prompts_last_page_is_saved_although_it_is_partly_filled() -> None:
    driven, asked = Driven(), request(1, "a", 100)
    driven.stage("a", 100, saved=100)
    driven.scheduler.match(asked, 0)
    driven.scheduler.promised("llm-1", pages(100), 0)
    [first] = driven.step(StepData("llm-1", pages(100), 80)).saves
    assert (first.first_page, first.block_ids) == (0, pages(100)[:2])
    [rest] = driven.step(StepData("llm-1", (), 100), new=False).saves
    assert (rest.first_page, rest.block_ids) == (2, pages(100)[2:])
    assert driven.step(StepData("llm-1", (), 101), new=False).saves == []


def test_generated_tokens_are_saved_by_whole_pages() -> None:
    driven, asked = Driven(), request(1, "a", 100)
    driven.stage("a", 100, loaded=99)
    driven.scheduler.match(asked, 0)
    driven.scheduler.promised("llm-1", pages(100), 99)
    assert driven.step().saves == []
    assert driven.step(StepData("llm-1", pages(130), 100)).saves == []  # page 3 is half full
    assert driven.step(StepData("llm-1", (), 127), new=False).saves == []
    [move] = driven.step(StepData("llm-1", (), 128), new=False).saves
    assert (move.first_page, move.block_ids) == (3, [13])


def test_after_a_preemption_the_pages_of_the_resumed_request_are_saved() -> None:
    driven, asked = Driven(), request(1, "a", 128)
    driven.stage("a", 128, saved=128)
    driven.scheduler.match(asked, 0)
    driven.scheduler.promised("llm-1", pages(128), 0)
    [first] = driven.step(StepData("llm-1", pages(128), 64)).saves
    [rest] = driven.step(StepData("llm-1", pages(128, first=50), 128)).saves  # resumed
    assert (first.block_ids, rest.first_page, rest.block_ids) == ([10, 11], 2, [52, 53])


@pytest.mark.parametrize(("tokens", "expected"), [(65, 64), (66, 0), (130, 0)])
def test_where_prefill_cannot_go_on_only_loads_up_to_the_last_token_are_promised(
    tokens: int, expected: int
) -> None:
    driven = Driven(can_continue=False)
    driven.stage("a", tokens, loaded=64)
    assert driven.scheduler.match(request(1, "a", tokens), 0) == expected


# -- pinned pages


class CountedPages:
    def __init__(self) -> None:
        self.users: dict[int, int] = {}

    def pin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.users[block_id] = self.users.get(block_id, 0) + 1

    def unpin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.users[block_id] -= 1
            if not self.users[block_id]:
                del self.users[block_id]


def save(llm_id: str, *block_ids: int) -> Move:
    return Move(f"of {llm_id}", llm_id, 0, list(block_ids), [])


def test_pages_stay_pinned_until_the_slowest_rank_has_saved_them() -> None:
    counted = CountedPages()
    pinned = PinnedPages(counted, ranks=2)
    pinned.add(Orders([], [save("x", 1, 2), save("y", 3)], []))
    pinned.add(Orders([], [save("x", 4)], []))
    pinned.ended({0: {"x": 2, "y": 1}})
    assert set(counted.users) == {1, 2, 3, 4}
    pinned.ended({1: {"x": 1}})
    assert set(counted.users) == {3, 4}
    pinned.ended({1: {"x": 1, "y": 1}})
    assert not counted.users
    assert not pinned


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_reports_unpins_every_page_once(seed: int) -> None:
    chance, ranks = random.Random(seed), 3
    counted = CountedPages()
    pinned = PinnedPages(counted, ranks)
    left: list[dict[str, int]] = [{} for _ in range(ranks)]
    ordered = 0
    while ordered < 60 or any(any(each.values()) for each in left):
        if ordered < 60 and chance.random() < 0.5:
            llm_id = chance.choice("abc")
            pinned.add(Orders([], [save(llm_id, ordered)], []))
            ordered += 1
            for each in left:
                each[llm_id] = each.get(llm_id, 0) + 1
            continue
        report = {}
        for rank, each in enumerate(left):
            ended = {name: chance.randint(0, count) for name, count in each.items()}
            ended = {name: count for name, count in ended.items() if count}
            for name, count in ended.items():
                each[name] -= count
            if ended:
                report[rank] = ended
        pinned.ended(report)
        open_saves = {name for each in left for name, count in each.items() if count}
        assert bool(counted.users) == bool(open_saves)
    assert not pinned
