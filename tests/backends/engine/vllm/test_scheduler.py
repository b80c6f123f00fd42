"""Which tokens vLLM need not compute, and which pages are loaded and saved, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from backends.engine.connected import messages as m
from backends.engine.vllm.scheduler import NULL_PAGE, StepData, VllmScheduler
from mooncake_store.layout import blocks_touched

PAGE, BLOCK = 4, 16  # tokens
IDS = list(range(101, 120))  # vLLM's pages


class Scheduled:
    """A scheduler, and what it has sent."""

    def __init__(self, can_continue: bool = True) -> None:
        self.sent: list[m.ToWorker] = []
        self.scheduler = VllmScheduler(BLOCK, PAGE, self.sent.append, can_continue)

    def stage(
        self,
        name: str,
        tokens: int,
        loaded: int = 0,
        last: int = 0,
        more: int = 0,
        is_decode: bool = False,
    ) -> None:
        count = blocks_touched(tokens + more, BLOCK)
        places = [block * 1000 for block in range(count)]
        prompt = list(range(tokens))
        stage = m.Stage.of(name, prompt, BLOCK, b"0" * 16, "", places, loaded)
        more_of_it = {"saved_tokens_max": last, "is_decode": is_decode}
        self.scheduler.on_message(msgspec.structs.replace(stage, **more_of_it))
        assert self.sent[-1] == m.Staged(name)

    def unstage(self, name: str) -> None:
        self.scheduler.on_message(m.Unstage(name))

    def match(self, name: str | None, tokens: int, local: int = 0) -> int:
        return self.scheduler.match(request_of(name, tokens), local, name)

    def promise(self, name: str, tokens: int, local: int = 0, ids: list[int] = IDS) -> int:
        """As vLLM does if it has pages."""
        loaded = self.match(name, tokens, local)
        self.scheduler.promised(f"{name}-x", ids[: -(-(local + loaded) // PAGE) or 1], loaded)
        return loaded

    def pass_of(self, name: str, ids: list[int], position: int, is_new: bool = True) -> Any:
        data = [StepData(f"{name}-x", ids, position)]
        return self.scheduler.orders(data if is_new else [], [] if is_new else data)

    def claims(self) -> list[m.ToWorker]:
        return [message for message in self.sent if isinstance(message, m.Claimed)]


def request_of(name: str | None, tokens: int) -> Any:
    return SimpleNamespace(request_id=f"{name}-x", num_prompt_tokens=tokens)


def pages_of(moves: list[Any]) -> list[tuple[int, list[int]]]:
    return [(move.first_page, move.block_ids) for move in moves]


@pytest.mark.parametrize(
    ("tokens", "loaded", "local", "matched"),
    [
        (40, 32, 0, 32),
        (33, 32, 0, 32),
        (32, 32, 0, 31),  # the last token is computed
        (40, 40, 0, 39),
        (40, 32, 12, 20),
        (40, 32, 32, 0),
        (40, 32, 36, 0),
        (1, 1, 0, 0),
        (40, 0, 0, 0),
    ],
)
def test_all_tokens_that_are_on_the_host_match_but_the_last(
    tokens: int, loaded: int, local: int, matched: int
) -> None:
    at = Scheduled()
    at.stage("a", tokens, loaded)
    assert at.match("a", tokens, local) == matched
    assert at.match("a", tokens, local) == matched, "vLLM may ask again"


@pytest.mark.parametrize(("loaded", "matched"), [(40, 39), (39, 39), (38, 0), (32, 0)])
def test_without_prefixes_only_all_tokens_but_a_generated_one_match(
    loaded: int, matched: int
) -> None:
    at = Scheduled(can_continue=False)
    at.stage("a", 40, loaded, is_decode=True)
    assert at.match("a", 40) == matched
    at.stage("b", 40, loaded)
    assert at.match("b", 40) == 0, "the last token of a prompt is one of prefill"


def test_a_request_matches_its_stage_by_name_and_length() -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    assert at.match(None, 40) == 0
    assert at.match("b", 40) == 0
    assert at.match("a", 41) == 0
    assert at.match("a", 40) == 32
    at.scheduler._table.taken.clear()  # another request of vLLM with this name
    assert at.match("a", 40) == 0


def test_a_promised_load_is_ordered_once_with_the_pages_after_the_local_ones() -> None:
    at = Scheduled()
    at.stage("a", 40, 38)
    assert at.promise("a", 40, local=12) == 26
    assert at.claims() == [m.Claimed("a", 12, 26)]
    orders = at.scheduler.orders([], [])
    assert pages_of(orders.loads) == [(3, IDS[3:10])] and orders.loads[0].is_aside
    at.scheduler.promised("a-x", IDS[:10], 0)  # vLLM's second call
    assert at.match("a", 40, 12) == 0
    assert at.scheduler.orders([], []).loads == []
    assert len(at.claims()) == 1


def test_a_second_plan_counts_if_vllm_had_no_pages_for_the_first() -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    assert at.match("a", 40, 0) == 32
    assert at.scheduler.orders([], []).loads == [] and at.claims() == []
    assert at.promise("a", 40, local=8) == 24
    assert pages_of(at.scheduler.orders([], []).loads) == [(2, IDS[2:8])]


def test_a_load_needs_its_pages() -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    assert at.match("a", 40) == 32
    with pytest.raises(AssertionError, match="pages are missing"):
        at.scheduler.promised("a-x", IDS[:7], 32)


def test_full_pages_are_saved_with_the_pass_that_fills_them() -> None:
    at = Scheduled()
    at.stage("a", 40, 16, more=10)
    at.promise("a", 40)
    at.scheduler.orders([], [])
    assert pages_of(at.pass_of("a", IDS[:8], 30).saves) == [(4, IDS[4:7])]
    assert pages_of(at.pass_of("a", IDS[8:10], 40, is_new=False).saves) == [(7, IDS[7:10])]
    assert at.pass_of("a", [IDS[10]], 43, is_new=False).saves == []
    assert pages_of(at.pass_of("a", [], 44, is_new=False).saves) == [(10, [IDS[10]])]


def test_the_last_page_of_a_prompt_is_saved_when_all_its_tokens_have_kv() -> None:
    at = Scheduled()
    at.stage("a", 39, last=38, more=10)
    at.promise("a", 39)
    assert pages_of(at.pass_of("a", IDS[:10], 37).saves) == [(0, IDS[:9])]
    assert pages_of(at.pass_of("a", [], 39, is_new=False).saves) == [(9, [IDS[9]])]
    assert at.pass_of("a", [IDS[10]], 44, is_new=False).saves == [], "its slot is complete"


def test_a_resumed_request_saves_the_pages_that_it_has_not_saved() -> None:
    at = Scheduled()
    at.stage("a", 40)
    at.promise("a", 40)
    assert pages_of(at.pass_of("a", IDS[:6], 24).saves) == [(0, IDS[:6])]
    again = list(range(201, 211))  # after a preemption
    assert at.pass_of("a", again[:3], 12).saves == []
    assert pages_of(at.pass_of("a", again[3:], 40, is_new=False).saves) == [(6, again[6:])]


def test_pages_dropped_before_a_window_leave_a_request_unclaimed() -> None:
    at = Scheduled()
    at.stage("a", 40)
    assert at.match("a", 40, local=24) == 0
    at.scheduler.promised("a-x", [NULL_PAGE] * 4 + IDS[4:10], 0)
    assert at.claims() == []
    assert at.pass_of("a", [NULL_PAGE] * 4 + IDS[4:10], 40).saves == []
    at.unstage("a")
    assert at.sent[-1] == m.Unstaged("a", 0)
    at.scheduler.check()


def test_pages_dropped_before_a_window_are_not_loaded() -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    ids = [NULL_PAGE] * 5 + IDS[5:10]
    assert at.promise("a", 40, ids=ids) == 32
    assert at.claims() == [m.Claimed("a", 0, 32)]
    assert pages_of(at.scheduler.orders([], []).loads) == [(5, IDS[5:8])]
    assert pages_of(at.pass_of("a", ids, 40).saves) == [(8, IDS[8:10])]


def test_saves_stop_before_a_page_that_was_dropped() -> None:
    at = Scheduled()
    at.stage("a", 40)
    at.promise("a", 40)
    assert pages_of(at.pass_of("a", IDS[:4], 16).saves) == [(0, IDS[:4])]
    resumed = [NULL_PAGE] * 6 + IDS[6:10]  # its own prefix cache has later pages only
    assert at.pass_of("a", resumed, 40).saves == []


def test_unstaging_replies_at_once_if_no_load_is_promised() -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    at.unstage("a")
    assert at.sent[-1] == m.Unstaged("a", 0)
    assert at.match("a", 40) == 0
    at.stage("b", 40, 32)
    at.promise("b", 40)
    at.scheduler.orders([], [])
    at.unstage("b")
    assert at.sent[-1] == m.Unstaged("b", 1)
    assert at.pass_of("b", IDS[:10], 40).saves == []
    at.scheduler.check()


@pytest.mark.parametrize("has_pages", [False, True])
def test_unstaging_after_a_match_replies_with_the_orders_of_the_step(has_pages: bool) -> None:
    at = Scheduled()
    at.stage("a", 40, 32)
    assert at.match("a", 40) == 32
    at.unstage("a")
    assert m.Unstaged not in map(type, at.sent)
    if has_pages:
        at.scheduler.promised("a-x", IDS[:8], 32)
    orders = at.scheduler.orders([], [])
    assert len(orders.loads) == has_pages
    assert at.sent[-1] == m.Unstaged("a", int(has_pages))
    assert not at.scheduler._table.entries and not at.scheduler._table.taken
    assert at.match("a", 40) == 0


def test_an_aborted_request_leaves_its_stage_to_the_worker() -> None:
    for is_promised in (False, True):
        at = Scheduled()
        at.stage("a", 40, 32)
        at.promise("a", 40) if is_promised else at.match("a", 40)
        assert at.scheduler.finished(request_of("a", 40)) is False, "vLLM frees the pages"
        orders = at.scheduler.orders([], [])
        assert len(orders.loads) == is_promised, "vLLM waits for a promised load"
        at.unstage("a")
        assert at.sent[-1] == m.Unstaged("a", int(is_promised))
        at.scheduler.check()


def test_only_staged_requests_are_described() -> None:
    at = Scheduled()
    at.stage("a", 40)
    at.promise("a", 40)
    assert at.scheduler.knows(["a-x", "b-x"]) == ["a-x"]
    at.scheduler.finished(request_of("a", 40))
    assert at.scheduler.knows(["a-x", "b-x"]) == []
