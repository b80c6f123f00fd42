"""Our connector in an executor: what is loaded, saved and recomputed, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.engine.connected.connected import Make, expected, filled, prompt_of

pytestmark = pytest.mark.usefixtures("trtllm")


@pytest.mark.parametrize(
    ("page_order", "dtype"), [("HND", "bfloat16"), ("NHD", "bfloat16"), ("HND", "fp8")]
)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("block_tokens", [8, 32])
def test_a_hand_over_through_the_pool_gives_the_bytes_and_tokens_of_one_engine(
    make: Make, page_order: str, dtype: str, tp_size: int, block_tokens: int
) -> None:
    shape = {"page_order": page_order, "dtype": dtype, "head_dim": 8}
    options: dict[str, Any] = {"tensor_parallel_size": tp_size, "block_tokens": block_tokens}
    prefill, decode = make(shape, **options), make(shape, **options)
    prompt = prompt_of(75)
    store: dict[bytes, bytes] = {}
    pages = prefill.stage("p", prompt)
    computed = prefill.generate(1, prompt, 1)
    first = prefill.output(computed)
    prefill.heard.wait_for("saved", "p", 72)
    prefill.keep(prompt, pages, store)
    prefill.unstage("p", pages)

    pages = decode.stage("d", prompt + first, store, loaded_tokens=72, more_tokens=10)
    request = decode.generate(1, prompt + first, 10)
    assert first + decode.output(request) == expected(decode, prompt, 11)
    assert request.matched_tokens == 72 and request.local_tokens == 0
    for theirs, ours in zip(prefill.executor.ranks, decode.executor.ranks, strict=True):
        there = theirs.kv[computed.block_ids[:18]].view(torch.uint8)
        assert there.any() and torch.equal(there, ours.kv[request.block_ids[:18]].view(torch.uint8))
    decode.heard.wait_for("claimed", "d", 0, 72)
    assert {b"tail"} <= store.keys()
    last = -(-75 // block_tokens) - 1  # the pages that came by the store, as they were sent
    tokens = 72 - last * block_tokens
    part = decode.block_bytes // tp_size
    for rank in range(tp_size):
        sent = store[b"tail"][rank * part : rank * part + part * tokens // block_tokens]
        here = decode.page(pages[last])[rank * part :][: len(sent)].tobytes()
        assert here == sent
    decode.unstage("d", pages)


def test_local_pages_come_first_and_only_the_rest_is_loaded(make: Make) -> None:
    prompt = prompt_of(60)
    store = filled(make(), prompt)
    engine = make()
    engine.generate(1, prompt[:20], 1)  # five pages stay in the engine
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.generate(2, prompt, 3)
    assert (request.local_tokens, request.matched_tokens) == (20, 28)
    assert engine.output(request) == expected(engine, prompt, 3)
    engine.heard.wait_for("claimed", "a", 20, 28)
    engine.unstage("a", pages)


def test_a_local_match_inside_a_page_is_left_alone(make: Make, trtllm: str) -> None:
    if trtllm == "1.4":
        pytest.skip("the stand-in's manager V2 finds whole pages only")
    prompt = prompt_of(60)
    store = filled(make(), prompt)
    engine = make(cache={"enable_partial_reuse": True})
    engine.generate(1, [*prompt[:22], *prompt_of(10, 2)], 1)
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.generate(2, prompt, 3)
    assert (request.local_tokens, request.matched_tokens) == (22, 0)
    assert engine.output(request) == expected(engine, prompt, 3)
    engine.heard.wait_for("saved", "a", 60)
    engine.unstage("a", pages)
