"""KV from the staging pool and from slots gives the tokens that the model computes."""

from __future__ import annotations

import pytest

from tests.backends.engine.connected.connected import prompt_of
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled

LENGTHS = [63, 64, 65, 127, 128, 129, 300]
TOKENS = 12


@pytest.mark.parametrize("in_slots", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_loaded_blocks_give_the_computed_tokens(
    engine: RealVllm, length: int, in_slots: bool
) -> None:
    prompt = prompt_of(length)
    store = filled(engine, prompt)
    blocks = length // engine.block_tokens * engine.block_tokens
    if in_slots:
        engine.start_node()
    pages = engine.stage("a", prompt, store, loaded_tokens=blocks, in_slots=in_slots)
    request = engine.ask("a", prompt, TOKENS)
    assert engine.output(request) == engine.expected(prompt, TOKENS)
    loaded = min(blocks, length - 1)
    assert engine.news("a")[0] == ("claimed", 0, loaded)
    engine.unstage("a", pages)
    engine.check_clean()
