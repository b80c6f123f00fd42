"""KV cache manager V2: it takes less than was offered, takes pages away, and replaces pages."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import Orders
from backends.engine.connected.rank_copies import RankCopies
from backends.engine.trtllm.connector import only_region
from backends.engine.trtllm.releases import V1, V2
from backends.engine.trtllm.scheduler import TrtllmScheduler
from tests.backends.engine.connected.connected import Make, expected, filled, prompt_of, step_until
from tests.backends.engine.connected.gate import Gate
from tests.backends.engine.connected.gate import gate as gate  # a fixture
from tests.backends.engine.connected.listening import WAIT_S
from tests.backends.engine.trtllm.stand_in import StandIn, importable


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[StandIn] = []

    def make_one(**options: Any) -> StandIn:
        made.append(StandIn(tmp_path / str(len(made)), **options))
        return made[-1]

    with importable("1.4", monkeypatch):
        yield make_one
        for each in made:
            each.close()


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> dict[int, threading.Event]:
    """Set when a pass waits for the saves of this request."""
    waits = {number: threading.Event() for number in range(1, 4)}
    wait_saved = RankCopies._wait_saved

    def noted(copies: RankCopies, llm_id: int) -> None:
        waits[llm_id].set()
        wait_saved(copies, llm_id)

    monkeypatch.setattr(RankCopies, "_wait_saved", noted)
    return waits


def functions_of(thread: threading.Thread) -> list[str]:
    """The functions that it is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)] if frame else []


def run_behind(engine: Any, gate: Gate, fence: threading.Event) -> None:
    """The next passes, the first of which must wait until the gate is open."""
    going = threading.Thread(target=engine.executor.run_until_idle)
    going.start()
    assert fence.wait(WAIT_S), "no pass waits for these saves"
    give_up_s = time.monotonic() + WAIT_S
    while "wait_for" not in functions_of(going):  # of the condition that the saves notify
        assert going.is_alive() and time.monotonic() < give_up_s, "the pass does not wait"
    gate.is_open.set()
    going.join(WAIT_S)
    assert not going.is_alive()


def without_tail(store: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The last block of a prompt also gets what is generated."""
    return {key: block for key, block in store.items() if key != b"tail"}


def whole_blocks(
    engine: Any, prompt: list[int], request_id: str, pages: list[int]
) -> dict[bytes, bytes]:
    kept: dict[bytes, bytes] = {}
    engine.keep(prompt, pages, kept)
    engine.unstage(request_id, pages)
    return without_tail(kept)


@pytest.mark.parametrize("aside_bytes_min", [0, 1])
@pytest.mark.parametrize("taken", [0, 16, 40])
def test_of_an_offer_only_what_is_taken_is_loaded_and_the_rest_is_computed(
    make: Make, taken: int, aside_bytes_min: int
) -> None:
    prompt = prompt_of(60)
    store = filled(make(), prompt)
    engine = make(aside_bytes_min=aside_bytes_min, enable_chunked_prefill=True, max_num_tokens=24)
    engine.executor.loads_max_tokens = taken
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.generate(1, prompt, 9)
    assert request.matched_tokens == taken
    assert engine.output(request) == expected(engine, prompt, 9)
    engine.heard.wait_for("claimed", "a", 0, taken)
    engine.heard.wait_for("saved", "a", 60)
    assert whole_blocks(engine, prompt, "a", pages) == without_tail(store)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_request_that_begins_again_is_computed_and_saved_as_if_it_had_not(
    make: Make, steps: int
) -> None:
    prompt = prompt_of(60)
    store = filled(make(), prompt)
    engine = make(
        enable_chunked_prefill=True,
        max_num_tokens=16,
        disable_overlap_scheduler=True,
        cache={"enable_block_reuse": False},
    )
    pages = engine.stage("a", prompt, store, loaded_tokens=16)
    request = engine.submit(1, prompt, 6)
    for _ in range(steps):
        engine.executor.step()
    engine.executor.take_pages_of(request)
    engine.executor.run_until_idle()
    assert engine.output(request) == expected(engine, prompt, 6)
    engine.heard.wait_for("saved", "a", 60)
    assert whole_blocks(engine, prompt, "a", pages) == without_tail(store)
    assert engine.all_free


def test_pages_that_are_taken_while_they_are_saved_are_saved_before_they_are_written(
    make: Make, gate: Gate, fences: dict[int, threading.Event]
) -> None:
    prompt, other = prompt_of(40), prompt_of(48, 2)
    engine = make(
        disable_overlap_scheduler=True, cache={"max_tokens": 60, "enable_block_reuse": False}
    )
    pages = engine.stage("a", prompt)
    request = engine.submit(1, prompt, 4)
    step_until(engine, lambda: request.generated)
    assert gate.is_reached.wait(WAIT_S)
    engine.executor.take_pages_of(request)
    engine.executor._waiting.clear()
    second = engine.submit(2, other, 1)
    engine.executor._arrived.append(request)  # behind the other, which gets its pages
    run_behind(engine, gate, fences[1])
    assert engine.output(second) == expected(engine, other, 1)
    assert engine.output(request) == expected(engine, prompt, 4)
    engine.heard.wait_for("saved", "a", 40)
    assert whole_blocks(engine, prompt, "a", pages) == without_tail(filled(make(), prompt))


@pytest.mark.parametrize("tokens", [1, 6], ids=["ends", "goes on"])
def test_a_page_that_is_replaced_while_it_is_saved_is_saved_before_it_is_written(
    make: Make, gate: Gate, fences: dict[int, threading.Event], tokens: int
) -> None:
    """Two requests compute the same prompt at once; the second one's pages go to the third."""
    prompt, other = prompt_of(40), prompt_of(40, 2)
    engine = make(disable_overlap_scheduler=True)
    pages = engine.stage("b", prompt)
    first = engine.submit(1, prompt, 6)
    second = engine.submit(2, prompt, tokens)
    entry = engine.scheduler._table.entries["b"]
    engine.scheduler._table._leave(entry)  # not for the first one
    entry.llm_id, engine.scheduler._table.taken[2] = 2, entry
    engine.executor.step()
    assert gate.is_reached.wait(WAIT_S)
    assert first.block_ids[:10] == second.block_ids[:10], "pages were replaced"
    third = engine.submit(3, other, 2)
    run_behind(engine, gate, fences[2])
    for request, asked in ((first, prompt), (second, prompt), (third, other)):
        assert engine.output(request) == expected(engine, asked, request.max_tokens)
    engine.heard.wait_for("saved", "b", 40)
    assert whole_blocks(engine, prompt, "b", pages) == without_tail(filled(make(), prompt))


PROMPT = prompt_of(64)


def staged(loaded_tokens: int = 32) -> TrtllmScheduler:
    scheduler = TrtllmScheduler(16, 4, lambda message: None, manager=V2)
    stage = m.Stage.of("a", PROMPT, 16, b"0" * 16, "", [0, 1, 2, 3], loaded_tokens)
    scheduler.on_message(stage)
    return scheduler


def asked(taken: int | None = None) -> Any:
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: PROMPT)
    if taken is not None:
        request.py_num_connector_matched_tokens = taken
    return request


def described(pages: list[int], position: int, tokens: int) -> Any:
    return SimpleNamespace(
        request_id=1, new_block_ids=pages, computed_position=position, num_scheduled_tokens=tokens
    )


@pytest.mark.parametrize("taken", [None, 30])
def test_a_release_that_does_not_say_how_much_it_takes_is_an_error(taken: int | None) -> None:
    scheduler = staged()
    assert scheduler.match(asked(), 0) == 32
    with pytest.raises(RuntimeError, match="tokens of a promised load"):
        scheduler.allocated(asked(taken), list(range(8)))


@pytest.mark.parametrize("pages", [[], [5, 6, 7, 8]], ids=["gone", "kept"])
def test_only_pages_that_are_still_there_are_kept_back_and_only_once(pages: list[int]) -> None:
    scheduler = staged(0)
    scheduler.match(asked(), 0)
    scheduler.allocated(asked(0), [5, 6, 7, 8])
    assert scheduler.orders([described([5, 6, 7, 8], 0, 16)], []).saves
    assert scheduler.finished(asked(), pages) is bool(pages)
    assert scheduler.finished(asked(), pages) is False, "asked again by the overlap scheduler"
    assert scheduler.orders([], []).fences == ([] if pages else [1])


def test_without_our_description_every_pass_waits_for_the_saves_of_the_last_one() -> None:
    scheduler = staged(0)
    scheduler.match(asked(), 0)
    scheduler.allocated(asked(0), [5, 6, 7, 8])
    scheduler.orders([described([5, 6, 7, 8], 0, 16)], [])
    assert scheduler.orders([], [described([9], 16, 4)]).fences == [1]


def test_a_load_is_ordered_only_with_the_first_pass_of_its_request() -> None:
    """A request may be left out of the step in which it was asked, and lose its pages."""
    scheduler = staged()
    assert scheduler.match(asked(), 0) == 32
    scheduler.allocated(asked(32), list(range(8)))
    assert scheduler.orders([], []).loads == []
    (move,) = scheduler.orders([described(list(range(12)), 0, 16)], []).loads
    assert move.block_ids == list(range(8))


def test_a_load_of_a_request_that_was_asked_again_is_one_of_no_pages() -> None:
    scheduler = staged()
    assert scheduler.match(asked(), 0) == 32
    scheduler.allocated(asked(32), list(range(8)))
    assert scheduler.match(asked(), 0) == 0
    scheduler.allocated(asked(0), list(range(20, 36)))
    orders = scheduler.orders([described(list(range(20, 36)), 0, 64)], [])
    assert [move.block_ids for move in orders.loads] == [[]]
    assert [move.block_ids for move in orders.saves] == [list(range(28, 36))]


@pytest.mark.parametrize("manager", [V1, V2])
def test_a_request_whose_stage_went_while_it_was_saved_is_a_fence(manager: int) -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None, manager=manager)
    scheduler.on_message(m.Stage.of("a", PROMPT, 16, b"0" * 16, "", [0, 1, 2, 3], 0))
    scheduler.match(asked(), 0)
    scheduler.allocated(asked(0), list(range(16)))
    assert scheduler.orders([described(list(range(16)), 0, 64)], []).saves
    scheduler.on_message(m.Unstage("a"))
    assert scheduler.finished(asked(), list(range(16))) is False, "its pages go at once"
    assert scheduler.orders([], []).fences == [1]


def test_a_load_whose_pages_were_taken_before_the_first_pass_is_forgotten() -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None, None, 1, V2)
    scheduler.on_message(m.Stage.of("a", PROMPT, 16, b"0" * 16, "", [0, 1, 2, 3], 32))
    assert scheduler.match(asked(), 0) == 32 and scheduler.is_aside(1)
    scheduler.allocated(asked(32), list(range(9)))
    assert scheduler.orders([], []).loads
    (move,) = scheduler.orders([described(list(range(20, 32)), 0, 48)], []).saves
    assert (move.first_page, move.block_ids) == (8, [28, 29, 30, 31]), "others are on the host"


def test_orders_of_a_step_without_a_pass_are_carried_out_with_the_next_pass(make: Make) -> None:
    prompt = prompt_of(60)
    store = filled(make(), prompt)
    engine = make(disable_overlap_scheduler=True)
    (worker,) = engine.executor.connectors.workers
    bind = worker.bind_connector_meta

    def bound_twice(metadata: object) -> None:
        bind(metadata)
        bind(Orders([], [], []))

    worker.bind_connector_meta = bound_twice
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.generate(1, prompt, 3)
    assert request.matched_tokens == 48 and engine.output(request) == expected(engine, prompt, 3)
    engine.heard.wait_for("loaded", "a")
    engine.heard.wait_for("saved", "a", 60)
    engine.unstage("a", pages)


def layout(**changes: Any) -> Any:
    buffers = [
        SimpleNamespace(layer_id=layer, role=role, expansion=changes.get("expansion", 1))
        for layer in range(2)
        for role in changes.get("roles", ("key", "value"))
    ]
    region = SimpleNamespace(buffers=buffers)
    group = SimpleNamespace(
        layer_ids=(0, 1),
        window_size=changes.get("window"),
        regions=[region] * changes.get("regions", 1),
        replicated_regions=[region] * changes.get("replicated", 0),
    )
    groups = [group] * changes.get("groups", 1)
    return SimpleNamespace(tokens_per_block=changes.get("per_block", 32), groups=groups)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"groups": 2}, "2 groups of layers"),
        ({"window": 512}, r"windows of \[512\]"),
        ({"regions": 2}, "in 2 places"),
        ({"replicated": 1}, "in 2 places"),
        ({"per_block": 64}, "64 tokens, not 32"),
        ({"roles": ("value", "key")}, "in this order"),
        ({"roles": ("key",)}, "in this order"),
        ({"expansion": 2}, "in this order"),
    ],
)
def test_a_layout_that_is_not_one_place_per_page_is_refused_by_name(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        only_region(layout(**changes), 32, is_alike=False)


def test_a_layout_with_all_layers_in_one_place_is_taken() -> None:
    assert only_region(layout(), 32, is_alike=False).buffers
    assert only_region(layout(roles=("key",)), 32, is_alike=True).buffers
