"""Layer-wise prefill: ring buffers, the order of prompts, and overtaking between chunks."""

from __future__ import annotations

import random

import pytest

from backends.engine.batching.batching import (
    LAYERWISE_AHEAD_MAX,
    WHOLE_STEPS_MAX,
    Chunk,
    PrefillBatching,
)
from backends.engine.batching.layer_passes import LayerPass, RingLayout
from backends.engine.batching.pages import PagePool
from conductor.queue_order import short_step_tokens

BLOCK_TOKENS, CHUNK_TOKENS, LAYERS = 16, 64, 12


def batching(pages: int = 64, overhead_tokens: float = 8.0) -> tuple[PagePool, PrefillBatching]:
    pool = PagePool(pages)
    return pool, PrefillBatching(
        pool, BLOCK_TOKENS, CHUNK_TOKENS, 64, 64, overhead_tokens, RingLayout(LAYERS)
    )


def started(made: PrefillBatching, *names: str) -> None:
    for admitted in made.admit():
        assert admitted.request_id in names
        made.start(admitted.request_id, 0)


def worth_tokens(chunks: list[Chunk]) -> float:
    """How many tokens through all layers take as long."""
    return sum(chunk.tokens / (1 if chunk.layer < 0 else LAYERS) for chunk in chunks)


@pytest.mark.parametrize("layers", [*range(1, 20), 28, 32, 61, 80])
def test_rings_lie_inside_their_pages_and_apart(layers: int) -> None:
    rings = RingLayout(layers)
    size = rings.layers_at_once
    seen: set[int] = set()
    for page in range(3 * layers):
        of_page = rings.in_pages([page], rings.per_page)
        for ring in of_page:
            cells = set(range(ring * size, (ring + 1) * size))
            assert cells <= set(range(page * layers, (page + 1) * layers))
            assert not cells & seen
            seen |= cells
    assert size == layers or rings.per_page * size > layers - size - 2, "pages are half empty"


def test_a_place_is_free_again_when_its_layer_is_stored() -> None:
    passing = LayerPass(32, 40, CHUNK_TOKENS, LAYERS, layers_at_once=3, loaded=0)
    assert not passing.can_compute
    for loaded in (1, 2, 3):
        assert passing.can_load
        passing.loaded = loaded
    assert not passing.can_load, "three layers are there, none is stored"
    passing.computed(0, 32, 8)
    assert not passing.can_load
    passing.stored = 1
    assert passing.can_load


def test_two_thousand_steps_in_any_order_overwrite_nothing(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        tokens, at_once = chance.randint(1, 300), chance.choice((1, 3, LAYERS))
        start = chance.randrange(tokens)
        passing = LayerPass(start, tokens, CHUNK_TOKENS, LAYERS, at_once, loaded=0)
        places: dict[int, int] = {}  # place -> the layer that is in it
        seen: list[tuple[int, int, int]] = []
        while passing.stored < LAYERS:
            kind = chance.randrange(3)
            if kind == 0 and passing.can_load:
                assert places.get(passing.loaded % at_once, -1) < passing.stored
                places[passing.loaded % at_once] = passing.loaded
                passing.loaded += 1
            elif kind == 1:
                for part in list(passing.next_parts(chance.choice((1, 16, 64)))):
                    assert places[part[0] % at_once] == part[0], "it is not there"
                    passing.computed(*part)
                    seen.append(part)
            elif passing.stored < passing.layer:
                passing.stored += 1
            passing.check()
        of_layer = [(at, count) for layer, at, count in seen if layer == 0]
        assert seen == [(layer, *part) for layer in range(LAYERS) for part in of_layer]
        assert sum(count for _, count in of_layer) == tokens - start == passing.computed_tokens


def test_a_long_prompt_takes_a_fraction_of_the_pages_and_a_short_one_all_of_its_own() -> None:
    pool, made = batching()
    made.add("long", 16 * BLOCK_TOKENS)
    made.add("short", CHUNK_TOKENS)
    started(made, "long", "short")
    assert pool.used_pages == 16 // 4 + CHUNK_TOKENS // BLOCK_TOKENS
    made.check()


def test_a_prompt_that_is_cached_but_for_a_step_shares_one_with_others() -> None:
    pool, made = batching()
    for name in ("a", "b"):
        assert made.add(name, 3 * CHUNK_TOKENS + 4, local_tokens=3 * CHUNK_TOKENS)
    for admitted in made.admit():
        made.start(admitted.request_id, 3 * CHUNK_TOKENS)
    assert pool.used_pages == 2 * 13
    chunks = made.next_step()
    assert [(chunk.request_id, chunk.layer) for chunk in chunks] == [("a", -1), ("b", -1)]
    made.computed(chunks)
    made.check()


@pytest.mark.parametrize(
    ("tokens", "local_tokens", "pages"),
    [
        (3 * CHUNK_TOKENS, 2 * CHUNK_TOKENS - 1, 64),  # more than a step is new
        (WHOLE_STEPS_MAX * CHUNK_TOKENS + 1, WHOLE_STEPS_MAX * CHUNK_TOKENS, 64),  # it is long
        (3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS - 1, 11),  # there are fewer pages
    ],
)
def test_other_long_prompts_take_rings_though_some_of_them_is_cached(
    tokens: int, local_tokens: int, pages: int
) -> None:
    pool, made = batching(pages)
    assert made.add("long", tokens, local_tokens=local_tokens)
    assert made.is_layerwise("long")
    made.admit()
    assert pool.used_pages == -(-tokens // BLOCK_TOKENS // 4)
    made.check()


def test_no_step_takes_longer_than_a_chunk_through_all_layers() -> None:
    _, made = batching()
    made.add("a", 1000)
    started(made, "a")
    steps = 0
    while chunks := made.next_step():
        assert worth_tokens(chunks) <= CHUNK_TOKENS
        made.computed(chunks)
        for chunk in chunks:
            if chunk.is_last:
                made.layer_stored("a")
        steps += 1
    assert made.queue_tokens == 0
    assert steps >= 1000 / CHUNK_TOKENS


def test_a_short_prompt_overtakes_between_two_steps_of_a_long_one() -> None:
    _, made = batching()
    made.add("long", 1000, order_key_s=10.0)
    started(made, "long")
    first = made.next_step()
    made.computed(first)
    made.add("short", 20, order_key_s=1.0)
    started(made, "short")
    (chunk,) = made.next_step()
    assert (chunk.request_id, chunk.layer) == ("short", -1)
    made.computed([chunk])
    again = made.next_step()
    assert again[0].request_id == "long"
    assert (again[0].layer, again[0].start) != (first[0].layer, first[0].start), "it began anew"


def test_while_the_next_layer_is_loaded_others_are_computed_in_short_steps() -> None:
    _, made = batching()
    made.add("first", 200, order_key_s=1.0)
    made.add("behind", 300, order_key_s=2.0)
    for admitted in made.admit():
        made.start(admitted.request_id, 64, is_loaded=admitted.request_id == "behind")
    chunks = made.next_step()
    assert {chunk.request_id for chunk in chunks} == {"behind"}
    short = short_step_tokens(CHUNK_TOKENS, BLOCK_TOKENS, 8.0)
    assert worth_tokens(chunks) <= short < CHUNK_TOKENS
    assert made.layers_to_load() == [("first", 0)]
    made.layer_loaded("first")
    assert {chunk.request_id for chunk in made.next_step()} == {"first"}


def test_prompts_further_behind_get_no_pages_yet_but_one_that_goes_first_does() -> None:
    _, made = batching()
    for number in range(4):
        made.add(f"p{number}", 200, order_key_s=float(10 + number))
    assert len(made.admit()) == 1 + LAYERWISE_AHEAD_MAX
    made.add("hurry", 200, order_key_s=1.0)
    assert [admitted.request_id for admitted in made.admit()] == ["hurry"]
    made.add("short", 20, order_key_s=99.0)
    assert made.admit() == [], "it does not pass those that wait before it"


def test_what_begins_again_keeps_its_pages_and_counts_as_not_computed() -> None:
    pool, made = batching()
    made.add("a", 200)
    made.admit()
    made.start("a", 64, is_loaded=False)
    for _ in range(2):
        made.layer_loaded("a")
        made.computed(made.next_step())
    used, left = pool.used_pages, made.queue_tokens
    assert left < 136
    made.stop("a")
    assert pool.used_pages == used and made.queue_tokens == 200
    made.start("a", 32, is_loaded=False)
    made.check()
    assert made.next_step() == []


def test_two_thousand_random_operations_keep_every_count(seed: int) -> None:
    chance = random.Random(seed)
    pool, made = batching(pages=24)
    names: list[str] = []
    loading: set[str] = set()
    for number in range(2000):
        kind = chance.random()
        if kind < 0.2 and made.has_room:
            name, tokens = f"r{number}", chance.choice((10, 64, 65, 200, 500))
            local_tokens = chance.choice((0, tokens - 1))
            assert made.add(name, tokens, chance.random() * 100, local_tokens=local_tokens)
            names.append(name)
        elif kind < 0.3 and names:
            name = names.pop(chance.randrange(len(names)))
            loading.discard(name)
            pool.release(made.remove(name))
        elif kind < 0.5:
            for admitted in made.admit():
                loading.add(admitted.request_id)
        elif kind < 0.6 and loading:
            name = chance.choice(sorted(loading))
            loading.remove(name)
            made.start(name, 0, is_loaded=not made.is_layerwise(name) or chance.random() < 0.5)
        elif kind < 0.75:
            for name, _ in made.layers_to_load():
                made.layer_loaded(name)
        else:
            chunks = made.next_step()
            made.computed(chunks)
            for chunk in chunks:
                if chunk.layer >= 0 and chunk.is_last:
                    made.layer_stored(chunk.request_id)
        made.check()
        pool.check()
