"""Our connector in an executor: what is loaded, saved and recomputed, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engine.connected.channel import ChannelError
from tests.backends.engine.trtllm.connected import Connected
from tests.backends.engine.trtllm.listening import Heard

pytestmark = pytest.mark.usefixtures("trtllm")
Make = Callable[..., Connected]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Connected] = []

    def make_one(shape: dict[str, Any] | None = None, **options: Any) -> Connected:
        from tensorrt_llm._fake.kv_model import KvShape

        each = Connected(tmp_path / str(len(made)), KvShape(**(shape or {})), **options)
        made.append(each)
        return each

    yield make_one
    for each in made:
        each.close()


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2048) for _ in range(tokens)]


def expected(engine: Connected, prompt: list[int], tokens: int) -> list[int]:
    from tensorrt_llm._fake.kv_model import reference_tokens

    return reference_tokens(engine.shape, prompt, tokens)


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


def keys_of(engine: Connected, prompt: list[int], salt: str = "") -> list[bytes]:
    from mooncake_store.block_keys import block_keys, chain_seed

    return block_keys(prompt, engine.block_tokens, chain_seed("print", cache_salt=salt))


def filled(engine: Connected, prompt: list[int]) -> dict[bytes, bytes]:
    """What the store has after this prompt was computed there."""
    store: dict[bytes, bytes] = {}
    pages = engine.stage("fill", prompt)
    engine.generate(1000, prompt, 1)
    tokens = len(prompt) // engine.shape.tokens_per_block * engine.shape.tokens_per_block
    engine.heard.wait_for("saved", "fill", tokens)
    engine.keep(prompt, pages, store)
    engine.unstage("fill", pages)
    return store


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


def test_a_local_match_inside_a_page_is_left_alone(make: Make) -> None:
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
    from backends.engine.connected import messages as m

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


def test_the_worker_hears_why_its_engine_did_not_start(tmp_path: Path) -> None:
    from tensorrt_llm._fake.kv_model import KvShape

    heard = Heard()
    with pytest.raises(ValueError, match="do dtype"):
        Connected(tmp_path, KvShape(), block_bytes=4096, heard=heard)
    ((what, reason),) = heard.all
    assert what == "broken" and "rank 0: a block of 16 tokens has" in reason
