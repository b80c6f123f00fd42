"""KV from the staging pool and from slots gives the tokens that the model computes."""

from __future__ import annotations

import pytest

from tests.backends.engine.connected.connected import keys_of, prompt_of
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled, filled_to_end

LENGTHS = [63, 64, 65, 127, 128, 129, 300]
TOKENS = 12
LONG = prompt_of(300)


@pytest.mark.parametrize("in_slots", [False, True], ids=["pool", "slots"])
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
    if in_slots:
        assert len(engine.in_slots("a")) == length // engine.block_tokens
        for page in pages:
            engine.page(page)[:] = 0xEE  # it must not be read
    request = engine.ask("a", prompt, TOKENS)
    assert engine.output(request) == engine.expected(prompt, TOKENS)
    assert engine.news("a")[0] == ("claimed", 0, min(blocks, length - 1))
    engine.unstage("a", pages)
    engine.check_clean()


def test_an_altered_block_changes_the_tokens(engine: RealVllm) -> None:
    """Else a test that compares tokens proves nothing."""
    store = filled(engine, LONG)
    blocks = keys_of(engine, LONG)
    for altered, other in ((0, 1), (3, 2)):
        wrong = {**store, blocks[altered]: store[blocks[other]]}
        pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
        request = engine.ask("a", LONG, TOKENS)
        assert engine.output(request) != engine.expected(LONG, TOKENS), altered
        engine.unstage("a", pages)
        engine.forget()
    engine.check_clean()


def test_a_load_goes_on_after_the_own_prefix_cache(engine: RealVllm) -> None:
    store = filled(engine, LONG)
    engine.generate(1, LONG[:100], 1)  # three whole pages are in vLLM's cache
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    request = engine.ask("a", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("a")[0] == ("claimed", 96, 160)
    engine.unstage("a", pages)
    engine.check_clean()


def test_nothing_is_loaded_if_the_own_prefix_cache_has_as_much(engine: RealVllm) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}
    engine.generate(1, LONG, 1)
    pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
    request = engine.ask("a", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("a")[0] == ("claimed", 288, 0)
    engine.unstage("a", pages)
    engine.check_clean()


@pytest.mark.parametrize("length", [20, 64, 65, 100, 300])
def test_a_handover_to_the_last_token_computes_one_token(engine: RealVllm, length: int) -> None:
    prompt = prompt_of(length)
    store = filled_to_end(engine, prompt)
    pages = engine.stage_to_end("b", prompt, store, loaded_tokens=length)
    request = engine.ask("b", prompt, TOKENS)
    assert engine.output(request) == engine.expected(prompt, TOKENS)
    assert engine.news("b")[0] == ("claimed", 0, length - 1)
    engine.unstage("b", pages)
    engine.check_clean()


def test_blocks_of_generated_tokens_are_saved_and_loaded(engine: RealVllm) -> None:
    prompt, store = prompt_of(50), {}
    pages = engine.stage("a", prompt, more_tokens=100)
    request = engine.ask("a", prompt, 100)
    engine.heard.wait_for("saved", "a", 128)  # 149 of 150 tokens have KV
    tokens = list(request.tokens)
    engine.keep(tokens[:128], pages[:2], store)
    engine.unstage("a", pages)
    engine.forget()
    pages = engine.stage("b", tokens, store, loaded_tokens=128)
    request = engine.ask("b", tokens, TOKENS)
    assert engine.output(request) == engine.expected(tokens, TOKENS)
    assert engine.news("b")[0] == ("claimed", 0, 128)
    engine.unstage("b", pages)
    engine.check_clean()


def test_computed_pages_are_saved_into_slots_and_loaded_from_them(engine: RealVllm) -> None:
    engine.start_node()
    pages = engine.stage("a", LONG, in_slots=True)
    engine.ask("a", LONG, 1)
    engine.heard.wait_for("saved", "a", 288)
    saved = [engine.block("a", pages, block).tobytes() for block in range(4)]
    store = dict(zip(keys_of(engine, LONG), saved, strict=True))
    engine.unstage("a", pages)
    engine.forget()
    pages = engine.stage("b", LONG, store, loaded_tokens=256)
    request = engine.ask("b", LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("b")[0] == ("claimed", 0, 256)
    engine.unstage("b", pages)
    engine.check_clean()


def test_a_request_without_parameters_is_computed_and_its_stage_is_not_read(
    engine: RealVllm,
) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}
    pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
    request = engine.generate(1, LONG, TOKENS)
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.heard.all == []
    engine.unstage("a", pages)
    engine.check_clean()


@pytest.mark.parametrize("name", ["unknown", "a"])
def test_an_unknown_stage_and_one_of_another_length_are_not_read(
    engine: RealVllm, name: str
) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}
    pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
    request = engine.ask(name, LONG[:-1], TOKENS)
    assert engine.output(request) == engine.expected(LONG[:-1], TOKENS)
    assert engine.heard.all == []
    engine.unstage("a", pages)
    engine.check_clean()


def test_a_stage_that_comes_after_the_first_step_is_not_read(engine: RealVllm) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}
    request = engine.submit(1, LONG, TOKENS, name="late")
    engine.executor.step()
    pages = engine.stage("late", LONG, wrong, loaded_tokens=256)
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.heard.all == []
    engine.unstage("late", pages)
    engine.check_clean()


def test_a_loaded_prefix_is_found_again_under_its_cache_salt_only(engine: RealVllm) -> None:
    store = filled(engine, LONG, salt="ours")
    pages = engine.stage("a", LONG, store, loaded_tokens=256, salt="ours")
    request = engine.ask("a", LONG, TOKENS, salt="ours")
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    assert engine.news("a")[0] == ("claimed", 0, 256)
    for name, salt, local in (("b", "theirs", 0), ("c", "", 0), ("d", "ours", 288)):
        own = engine.stage(name, LONG, salt=salt)
        request = engine.ask(name, LONG, TOKENS, salt=salt or None)
        assert engine.output(request) == engine.expected(LONG, TOKENS)
        assert engine.news(name)[0] == ("claimed", local, 0)
        engine.unstage(name, own)
    engine.unstage("a", pages)
    engine.check_clean()
