"""Our connector when a forward pass raises: TensorRT-LLM fails its requests and goes on.

`start_load_kv` was called for that pass, `wait_for_save` is not: what the pass was to compute is
not in its pages, must not be called saved, and must not be waited for.
"""

from __future__ import annotations

import pytest

from backends.engine.connected import rank_copies
from tests.backends.engine.connected.connected import Connected, Make, expected, filled, prompt_of

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
