"""Loads and saves of latent attention, and of layers with sliding windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.engine.vllm.scheduler import NULL_PAGE
from tests.backends.engine.connected.connected import keys_of, prompt_of
from tests.vllm.inside.conftest import Engines
from tests.vllm.inside.memory import kv_pages
from tests.vllm.inside.stored import filled, filled_to_end

LONG = prompt_of(300)
TOKENS = 12


def close_to(found: Any, wanted: bytes) -> bool:
    """The same KV. Passes of other lengths sum in another order."""
    return bool(np.abs(found.view(np.float32) - np.frombuffer(wanted, np.float32)).max() < 1e-3)


def test_a_local_prefix_of_gemma_is_saved_with_all_tokens(engines: Engines) -> None:
    engine = engines.get("gemma3")
    right = filled(engine, LONG)
    engine.generate(1, LONG[:-20], 1)  # in vLLM's prefix cache, and not in the store
    pages = engine.stage("a", LONG)
    request = engine.ask("a", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("a")[0] == ("claimed", 256, 0)
    engine.heard.wait_for("saved", "a", 288)
    for page, key in zip(pages, keys_of(engine, LONG), strict=False):
        assert close_to(engine.page(page), right[key])
    engine.unstage("a", pages)
    engine.check_clean()


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_blocks_of_windowed_layers_give_the_computed_tokens(engines: Engines, family: str) -> None:
    """Gemma 3 has both kinds of layers. All layers of the other model have a window, so vLLM keeps
    no pages for tokens before it."""
    engine = engines.get(family)
    store = filled(engine, LONG)
    for length in (65, 128, 300):
        prompt = LONG[:length]
        blocks = length // 64 * 64
        pages = engine.stage(str(length), prompt, store, loaded_tokens=blocks)
        request = engine.ask(str(length), prompt, TOKENS)
        assert engine.output(request) == engine.expected(prompt, TOKENS), length
        engine.unstage(str(length), pages)
        engine.forget()
    engine.check_clean()


def test_pages_that_vllm_has_dropped_before_a_window_are_not_saved(engines: Engines) -> None:
    """vLLM's prefix cache has only the last pages of the prefix. Without `Claimed` the worker hands
    over nothing, and decode computes the prompt."""
    engine = engines.get("mistral")
    engine.generate(1, LONG[:-20], 1)
    pages = engine.stage("a", LONG)
    request = engine.ask("a", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    engine.unstage("a", pages)
    assert engine.news("a") == []
    assert all((engine.page(page) == 0xEE).all() for page in pages)
    engine.check_clean()


def test_a_load_does_not_write_to_the_page_that_vllm_shows_for_dropped_ones(
    engines: Engines,
) -> None:
    engine = engines.get("mistral")
    store = filled(engine, LONG)
    (null_page,) = kv_pages(engine, [NULL_PAGE])
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    request = engine.ask("a", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("a")[0] == ("claimed", 0, 256)
    assert (kv_pages(engine, [NULL_PAGE])[0] == null_page).all()
    engine.unstage("a", pages)
    engine.check_clean()


def test_latent_attention_is_handed_over_to_the_last_token(engines: Engines) -> None:
    """The prefill worker sends the first token, and the decode worker computes on after it. (In
    vLLM for CPUs the first token of a decode step may differ from that of a prefill.)"""
    engine = engines.get("deepseek_v3")
    for length in (20, 64, 129, 300):
        prompt, name = LONG[:length], str(length)
        store = filled_to_end(engine, prompt)
        first, *others = engine.expected(prompt, TOKENS)
        pages = engine.stage_to_end(name, [*prompt, first], store, loaded_tokens=length)
        request = engine.ask(name, [*prompt, first], TOKENS - 1)
        assert engine.output(request) == others, length
        assert engine.news(name)[0] == ("claimed", 0, length)
        engine.unstage(name, pages)
    engine.check_clean()


def test_an_altered_block_of_latent_attention_changes_the_tokens(engines: Engines) -> None:
    engine = engines.get("deepseek_v3")
    prompt = LONG[:129]
    store = filled_to_end(engine, prompt)
    block, other = keys_of(engine, prompt)
    first, *others = engine.expected(prompt, TOKENS)
    wrong = {**store, block: store[other]}
    pages = engine.stage_to_end("a", [*prompt, first], wrong, loaded_tokens=129)
    request = engine.ask("a", [*prompt, first], TOKENS - 1)
    assert engine.output(request) != others
    engine.unstage("a", pages)
    engine.check_clean()


@pytest.mark.parametrize("length", [256, 257, len(LONG)])
def test_latent_attention_that_cannot_continue_after_a_prefix_computes_the_prompt(
    engines: Engines, length: int
) -> None:
    """Also if the prefix has all tokens but the last."""
    engine, prompt = engines.get("deepseek_v3"), LONG[:length]
    store = filled(engine, prompt)
    pages = engine.stage("a", prompt, store, loaded_tokens=256)
    request = engine.ask("a", prompt, TOKENS)
    assert engine.output(request) == engine.expected(prompt, TOKENS)
    loaded = min(256, length - 1) if engine.scheduler._can_continue else 0
    assert engine.news("a")[0] == ("claimed", 0, loaded)
    engine.unstage("a", pages)
    engine.check_clean()
