"""Our connector when a forward pass raises: TensorRT-LLM fails its requests and goes on.

`start_load_kv` was called for that pass, `wait_for_save` is not: what the pass was to compute is
not in its pages, must not be called saved, and must not be waited for.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from backends.engine.connected import messages as m
from backends.engine.connected import rank_copies
from backends.engine.connected.block_pages import BlockPages, Move, Orders
from backends.engine.connected.rank_copies import RankCopies
from tests.backends.engine.trtllm.connected import Connected
from tests.backends.engine.trtllm.listening import WAIT_S
from tests.backends.engine.trtllm.test_connector import Make, expected, filled, prompt_of
from tests.backends.engine.trtllm.test_connector import make as make  # a fixture

pytestmark = pytest.mark.usefixtures("trtllm")
PROMPT = prompt_of(100)


@pytest.fixture(autouse=True)
def short_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_copies, "FENCE_S_MAX", 1.0)


def is_untouched(engine: Connected, pages: list[int]) -> bool:
    return all((engine.page(page) == 0xEE).all() for page in pages)


def serves(make: Make, engine: Connected, number: int, request_id: str) -> None:
    """The same prompt again: right tokens, right bytes."""
    pages, store = engine.stage(request_id, PROMPT), {}
    again = engine.generate(number, PROMPT, 3)
    assert engine.output(again) == expected(engine, PROMPT, 3)
    engine.heard.wait_for("saved", request_id, 100)
    engine.keep(PROMPT, pages, store)
    engine.unstage(request_id, pages)
    assert store == filled(make(), PROMPT)


@pytest.fixture(params=[True, False], ids=["told", "untold"])
def engine(make: Make, request: pytest.FixtureRequest) -> Connected:
    engine = make(enable_chunked_prefill=True, max_num_tokens=32)
    engine.executor.aborts_are_told = request.param
    return engine


@pytest.mark.parametrize("good_passes", [0, 2])
def test_an_idle_engine_gives_pages_back(make: Make, engine: Connected, good_passes: int) -> None:
    pages = engine.stage("a", PROMPT)
    request = engine.submit(1, PROMPT, 3)
    for _ in range(good_passes):
        engine.executor.step()
    engine.executor.passes_to_fail = 1
    engine.executor.run_until_idle()
    assert request.finish_reason == "cancelled"
    saved = good_passes * 32
    if saved:
        engine.heard.wait_for("saved", "a", saved)
    engine.unstage("a", pages)
    assert is_untouched(engine, pages[saved // engine.block_tokens :])
    assert [what[2] for what in engine.heard.all if what[0] == "saved"][-1:] == [saved][:saved]
    assert engine.executor.blocks.free_blocks == engine.executor.blocks.blocks
    serves(make, engine, 2, "b")


def test_the_next_pass_saves_only_what_it_computed(make: Make, engine: Connected) -> None:
    pages = engine.stage("a", PROMPT)
    engine.submit(1, PROMPT, 3)
    engine.executor.passes_to_fail = 1
    engine.executor.step()
    serves(make, engine, 2, "b")
    assert not [what for what in engine.heard.all if what[:2] == ("saved", "a")]
    assert is_untouched(engine, pages)
    engine.unstage("a", pages)


class Copies:
    """One rank's, whose executor does not ask get_finished after a pass that raised."""

    def __init__(self) -> None:
        self.said: list[m.ToWorker] = []
        self.heard = threading.Condition()
        self.copied: list[Any] = []
        self.copies = RankCopies(BlockPages.of(0, 1, 32, 4, 4), 4, self, self.note)  # type: ignore[arg-type]

    def note(self, message: m.ToWorker) -> None:
        with self.heard:
            self.said.append(message)
            self.heard.notify_all()

    def wait_for(self, message: m.ToWorker) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: message in self.said, WAIT_S), self.said

    def record(self, stream: Any) -> None: ...

    def save(self, runs: Any, after: Any) -> None:
        self.copied += runs

    def close(self) -> None: ...


def test_moves_of_a_pass_that_never_was_end_before_the_fences() -> None:
    rank = Copies()
    rank.copies.start(Orders([], [Move("a", 1, 0, [0, 1], [0, 1])], []), None)
    rank.copies.on_message(m.Drain("a", 1))
    rank.copies.start(Orders([], [], [1]), None)
    rank.copies.after_forward(None)
    rank.wait_for(m.Drained("a", 0))
    rank.copies.close()
    assert rank.said == [m.Drained("a", 0)] and not rank.copied


def test_what_stands_behind_a_hole_is_not_saved() -> None:
    """Saved(tokens) speaks of all leading tokens."""
    rank = Copies()
    rank.copies.start(Orders([], [Move("a", 1, 0, [0], [0, 1])], []), None)
    second = Orders([], [Move("a", 1, 1, [1], [0, 32]), Move("b", 2, 0, [3], [96])], [])
    rank.copies.start(second, None)
    rank.copies.after_forward(None)
    rank.wait_for(m.Saved("b", 0, 4))
    assert rank.copies.finished([1]) == [1]
    rank.copies.on_message(m.Drain("a", 2))
    rank.wait_for(m.Drained("a", 0))
    rank.copies.close()
    assert not [each for each in rank.said if isinstance(each, m.Saved) and each.request_id == "a"]
    assert rank.copied == [(96, 96, 32)]
    assert not rank.copies._holed
