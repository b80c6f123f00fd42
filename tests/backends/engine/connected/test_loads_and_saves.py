"""Loads, saves and computed tokens, byte by byte, with each engine."""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine.connected import messages as m
from backends.engine.connected.channel import ChannelError
from tests.backends.engine.connected.connected import Make, expected, filled, keys_of, prompt_of
from tests.backends.engine.connected.listening import Heard


def test_generated_blocks_are_saved_too(make: Make) -> None:
    for is_overlapping in (False, True):
        engine = make(disable_overlap_scheduler=not is_overlapping)
        prompt, store = prompt_of(21), {}
        pages = engine.stage("a", prompt, more_tokens=30)
        request = engine.generate(1, prompt, 30)
        engine.heard.wait_for("saved", "a", 48)  # 50 of 51 tokens have KV; 12 pages of 4 tokens
        tokens = list(request.tokens)
        engine.keep(tokens[:48], pages[:3], store)
        engine.unstage("a", pages)

        other = make()
        pages = other.stage("b", tokens[:49], store, loaded_tokens=48)
        request = other.generate(1, tokens[:49], 5)
        assert request.matched_tokens == 48
        assert other.output(request) == expected(other, tokens[:49], 5)
        other.unstage("b", pages)


def test_what_was_not_staged_is_computed_and_not_saved(make: Make) -> None:
    engine, prompt = make(), prompt_of(40)
    assert engine.output(engine.generate(1, prompt, 4)) == expected(engine, prompt, 4)
    assert engine.heard.all == []


def test_a_stage_that_comes_late_is_not_read(make: Make) -> None:
    engine, prompt = make(), prompt_of(40)
    request = engine.submit(1, prompt, 4)
    engine.executor.step()
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, prompt)}
    pages = engine.stage("late", prompt, wrong, loaded_tokens=32)
    engine.executor.run_until_idle()
    assert engine.output(request) == expected(engine, prompt, 4)
    engine.unstage("late", pages)
    assert engine.heard.all == []


def test_a_stage_that_was_taken_back_is_not_read(make: Make) -> None:
    engine, prompt = make(), prompt_of(40)
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, prompt)}
    engine.unstage("a", engine.stage("a", prompt, wrong, loaded_tokens=32))
    request = engine.generate(1, prompt, 4)
    assert (request.matched_tokens, engine.output(request)) == (0, expected(engine, prompt, 4))


def test_other_tokens_or_another_salt_get_nothing(make: Make) -> None:
    engine, prompt = make(cache={"enable_block_reuse": False}), prompt_of(40)
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, prompt, "theirs")}
    pages = engine.stage("a", prompt, wrong, loaded_tokens=32, salt="theirs")
    others = [
        prompt,
        [*prompt[:-1], 7],
        [7, *prompt[1:]],
        prompt[:-1],
        [*prompt[:9], 7, *prompt[10:]],
    ]
    for number, other in enumerate(others):
        salts = ["theirs", "ours", None] if other != prompt else ["ours", None]
        for each, salt in enumerate(salts):
            request = engine.generate(10 * number + each, other, 2, salt=salt)
            assert request.matched_tokens == 0
            assert engine.output(request) == expected(engine, other, 2)
    assert engine.heard.all == []
    assert engine.generate(99, prompt, 2, salt="theirs").matched_tokens == 32
    engine.unstage("a", pages)


def test_one_token_is_left_to_compute(make: Make) -> None:
    prompt = prompt_of(32)
    store = filled(make(), prompt)
    engine = make()
    pages = engine.stage("a", prompt, store, loaded_tokens=32)
    request = engine.generate(1, prompt, 3)
    assert request.matched_tokens == 28
    assert engine.output(request) == expected(engine, prompt, 3)
    engine.unstage("a", pages)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_partial_hit_computes_and_saves_the_rest(make: Make, is_chunked: bool) -> None:
    prompt = prompt_of(100)
    store = filled(make(), prompt[:50])
    engine = make(enable_chunked_prefill=is_chunked, max_num_tokens=16 if is_chunked else 8192)
    pages = engine.stage("a", prompt, store, loaded_tokens=48)
    request = engine.generate(1, prompt, 1)
    assert request.matched_tokens == 48
    assert engine.output(request) == expected(engine, prompt, 1)
    engine.heard.wait_for("saved", "a", 100)
    steps = [what[2] for what in engine.heard.all if what[0] == "saved"]
    assert steps == ([64, 80, 96, 100] if is_chunked else [100])
    whole: dict[bytes, bytes] = {}
    engine.keep(prompt, pages, whole)
    assert whole == filled(make(), prompt), "the same bytes as computed in one piece"
    engine.unstage("a", pages)


def test_equal_prompts_each_have_their_own_stage(make: Make) -> None:
    prompt = prompt_of(40)
    store = filled(make(), prompt)
    engine = make(cache={"enable_block_reuse": False})
    pages = {name: engine.stage(name, prompt, store, loaded_tokens=32) for name in "abc"}
    requests = [engine.submit(number, prompt, 2) for number in range(4)]
    engine.executor.run_until_idle()
    assert [request.matched_tokens for request in requests] == [32, 32, 32, 0]
    claimed = [what[1] for what in engine.heard.all if what[0] == "claimed"]
    engine.heard.wait_for("saved", "c", 40)
    assert claimed == ["a", "b", "c"]
    for request in requests:
        assert engine.output(request) == expected(engine, prompt, 2)
    for name, own in pages.items():
        engine.unstage(name, own)


def test_a_stage_whose_keys_are_not_those_of_its_tokens_is_refused(make: Make) -> None:
    engine, prompt = make(), prompt_of(40)
    good = m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2], 0)
    bad = m.Stage(**{**{f: getattr(good, f) for f in good.__struct_fields__}, "keys": [b"x" * 16]})
    with pytest.raises(ChannelError, match="keys"):
        engine.host.stage(bad, 10.0).result(10.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_tokens": 18}, "no multiple"),
        ({"block_bytes": 4096}, "do dtype, checkpoint and tp_size agree"),
        ({"pool_pages": 0}, "no whole pages"),
    ],
)
def test_sizes_that_differ_end_the_start(make: Make, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(**options)


def test_the_worker_hears_why_its_engine_did_not_start(make: Make) -> None:
    heard = Heard()
    with pytest.raises(ValueError, match="do dtype"):
        make(block_bytes=4096, heard=heard)
    ((what, reason),) = heard.all
    assert what == "broken" and "rank 0: a block of 16 tokens has" in reason
