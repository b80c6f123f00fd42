"""Prompts that pass a prefill worker layer by layer: the tokens and blocks of those that do not.

The real workers and store; the model is random, with layers enough that rings are reused.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.workers.prefill_worker import PrefillWorker
from bench.harness.generate import generate
from bench.harness.random_checkpoint import LlamaShape, make_llama
from mooncake_store.block_keys import block_keys, chain_seed
from tests.backends.small_tokenizers import DEMO
from tests.backends.stepped_site import CONTEXT_TOKENS, VOCABULARY, Site, answer_of
from tests.backends.workers.pair import WAIT_S, Asked, Pair, pairs, prompt
from tests.mooncake_store.client import world

BLOCK, CHUNK, LAYERS, TOKENS = 64, 128, 8, 4
SEGMENT_BYTES = 24 * 2**20  # of each node: nothing is evicted
SHAPE = LlamaShape(LAYERS, hidden=64, heads=2, kv_heads=1, intermediate=128, positions=1024)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    make_llama(folder, SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(Path(DEMO) / name, folder)
    return folder


def pairs_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **parameters: str
) -> Iterator[Pair]:
    monkeypatch.setattr(world, "SEGMENT_BYTES", SEGMENT_BYTES)
    # With a short name: a Unix socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="mooncake-") as folder:
        yield from pairs(
            Path(folder),
            monkeypatch,
            checkpoint=str(checkpoint),
            chunk_tokens=str(CHUNK),
            **parameters,
        )


@pytest.fixture
def pair(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs_of(checkpoint, monkeypatch)


def wanted(checkpoint: Path, ids: list[int], tokens: int = TOKENS) -> list[int]:
    engine = TorchEngine.load(checkpoint, pages_max=32, block_tokens=BLOCK)
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


@pytest.mark.slow
@pytest.mark.parametrize("layerwise", ["true", "false"])
def test_prompts_get_the_tokens_of_the_model_with_layers_on_and_off(
    layerwise: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs_of(checkpoint, monkeypatch, layerwise=layerwise):
        assert (pair.prefill.batching._rings is not None) == (layerwise == "true")
        for length in (CHUNK, CHUNK + 1, 3 * BLOCK, 500, 900):
            ids = prompt(length, length)
            right = wanted(checkpoint, ids)
            for cached in (0, (length - 1) // BLOCK * BLOCK):
                asked = pair.ask(ids, max_tokens=TOKENS)
                assert asked.wait() == right, (length, cached)
                assert asked.prefill_reply is not None
                assert asked.prefill_reply.cached_tokens >= cached
            longer = ids + prompt(3, 100)
            asked = pair.ask(longer, max_tokens=TOKENS)
            assert asked.wait() == wanted(checkpoint, longer), length
        pair.wait_until_idle()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_prompt_that_is_near_but_for_its_end_passes_whole_whether_or_not_it_is_still_there(
    is_there: bool, pair: Pair, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(6, 3 * CHUNK + 20)
    if is_there:
        pair.ask(ids, max_tokens=TOKENS).wait()
    layer_steps = []
    monkeypatch.setattr(pair.prefill.driver, "_layer_step", lambda *of: layer_steps.append(of))
    asked = Asked(pair, "near", ids, max_tokens=TOKENS)
    asked.near_blocks = len(ids) // BLOCK
    pair.submit(asked)
    assert asked.wait() == wanted(checkpoint, ids)
    assert not layer_steps
    reply = asked.prefill_reply
    assert reply is not None and reply.cached_tokens == (3 * CHUNK if is_there else 0)
    pair.wait_until_idle()


@pytest.mark.slow
def test_prompts_that_need_four_times_the_pages_all_get_their_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (15, 8, 4, 15, 8, 4, 6)  # of 15 pages
    for pair in pairs_of(checkpoint, monkeypatch, kv_pages="15"):
        prompts = [prompt(i, count * BLOCK - TOKENS) for i, count in enumerate(blocks)]
        asked = [pair.ask(ids, max_tokens=TOKENS) for ids in prompts]
        for each in asked:
            assert each.wait() == wanted(checkpoint, each.prompt)
        pair.wait_until_idle()


class FarNode:
    """Another storage node, with a prefill worker that has put a prompt's KV there."""

    def __init__(self, pair: Pair) -> None:
        path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.pair = pair
        self.node = world.MappedNode(path, "s1")
        pair.directory.up(self.node.info)
        self.worker: PrefillWorker = pair.start_stage(0, "prefill_far", store_node="s1")

    def compute(self, ids: list[int]) -> None:
        near, self.pair.prefill = self.pair.prefill, self.worker
        try:
            self.pair.ask(ids, max_tokens=1).wait()
        finally:
            self.pair.prefill = near

    def copy_of(self, ids: list[int], block: int) -> Any:
        seed = chain_seed(self.worker.process.fingerprint, cache_salt="")
        keys = block_keys(np.array(ids, np.int32), BLOCK, seed)
        found = self.pair.directory.lookup(keys[: block + 1], "test", 1.0)
        return next(copy for copy in found[block] if copy.node_id == "s1")

    def corrupt(self, ids: list[int], block: int, layer: int) -> None:
        store = self.worker.process.store
        start = store._local.shape.slot_offset_bytes(self.copy_of(ids, block).slot)
        self.node.segment.view[start + store.layout.layer_offset_bytes(layer)] ^= 0xFF

    def close(self) -> None:
        self.worker.close(WAIT_S)
        self.node.close()


@pytest.fixture
def far(pair: Pair) -> Iterator[FarNode]:
    node = FarNode(pair)
    yield node
    node.close()


def ask_fetching(pair: Pair, ids: list[int], blocks: int) -> Asked:
    asked = Asked(pair, f"fetching-{secrets.token_hex(4)}", ids, max_tokens=TOKENS)
    asked.fetch_blocks = blocks
    pair.submit(asked)
    return asked


def test_a_prefix_of_another_node_comes_layer_by_layer_and_stays(
    pair: Pair, far: FarNode, checkpoint: Path
) -> None:
    ids = prompt(1, 600)
    far.compute(ids[:400])
    asked = ask_fetching(pair, ids, 6)
    assert asked.wait() == wanted(checkpoint, ids)
    reply = asked.prefill_reply
    assert reply is not None
    block_bytes = pair.prefill.process.store.layout.block_bytes
    assert (reply.cached_tokens, reply.fetched_blocks) == (384, 6)
    assert reply.fetched_from == {"s1": 6 * block_bytes}
    assert {ref.node_id for ref in reply.blocks} == {"s0"}, "a copy of each stays on the own node"
    again = pair.ask(ids, max_tokens=TOKENS)
    assert again.wait() == asked.output_ids
    assert again.prefill_reply is not None and again.prefill_reply.fetched_blocks == 0
    assert again.prefill_reply.cached_tokens == 576
    pair.wait_until_idle()


def test_a_worker_says_how_much_of_a_load_runs_beside_computing(pair: Pair) -> None:
    assert pair.prefill.process.info.load_beside_share == pytest.approx(1 - 1 / LAYERS)
    assert pair.decode.process.info.load_beside_share == 0.0


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_a_wrong_layer_is_a_miss_behind_which_the_prompt_is_computed(
    layer: int, pair: Pair, far: FarNode, checkpoint: Path
) -> None:
    ids = prompt(2, 600)
    far.compute(ids[:400])
    far.corrupt(ids, 2, layer)
    asked = ask_fetching(pair, ids, 6)
    assert asked.wait() == wanted(checkpoint, ids)
    reply = asked.prefill_reply
    assert reply is not None and reply.cached_tokens == 2 * BLOCK
    pair.wait_until_idle()


def test_a_node_that_dies_between_two_layers_costs_its_blocks_only(
    pair: Pair, far: FarNode, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(4, 600)
    far.compute(ids[:400])
    load_layer = pair.prefill._loader.load_layer

    def dying(copies: Any, digests: Any, rings: Any, layer: int, deadline_s: float) -> bool:
        if layer == 3:
            far.node.kill()
        return load_layer(copies, digests, rings, layer, deadline_s)

    monkeypatch.setattr(pair.prefill._loader, "load_layer", dying)
    asked = ask_fetching(pair, ids, 6)
    assert asked.wait() == wanted(checkpoint, ids)
    assert asked.prefill_reply is not None and asked.prefill_reply.cached_tokens == 0
    pair.wait_until_idle()


def test_of_a_node_that_has_died_nothing_is_said_to_have_come(
    pair: Pair, far: FarNode, checkpoint: Path
) -> None:
    ids = prompt(5, 600)
    far.compute(ids[:400])
    far.node.kill()
    asked = ask_fetching(pair, ids, 6)
    assert asked.wait() == wanted(checkpoint, ids)
    reply = asked.prefill_reply
    assert reply is not None
    assert (reply.cached_tokens, reply.fetched_blocks, reply.fetched_from) == (0, 0, {})
    pair.wait_until_idle()


def test_who_goes_first_does_not_wait_for_blocks_of_a_long_prompt(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that passes layer by layer stores all of its blocks at its end."""
    site = Site(seed, monkeypatch, is_layerwise=True)
    stem = list(range(8))
    long = site.ask(stem + list(range(20, 45)), 2)
    while not site.prefill.jobs[long.request_id].computed_tokens:
        site.turn(site.prefill)
        while site.prefill._loading.waiting:  # type: ignore[attr-defined]
            site.prefill._loading.step()  # type: ignore[attr-defined]
    assert site.prefill.jobs[long.request_id].layers is not None
    short = site.ask(stem, 1, place_s=-100.0)
    while not short.is_over:
        site.turn(site.prefill)
        if todo := site.things_to_do():
            site.rng.choice(todo)()
        assert not long.is_over, "the short prompt waited for the long one"
    assert short.answer == answer_of(stem, 1)
    site.settle()
    assert long.answer == answer_of(long.prompt, 2)
    site.check_empty()


@pytest.mark.slow
def test_two_thousand_requests_many_of_them_stopped_leave_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(seed, monkeypatch, is_layerwise=True)
    chance = site.rng
    stems = [[chance.randrange(VOCABULARY) for _ in range(20)] for _ in range(4)]
    while len(site.clients) < 2_000:
        kind = chance.random()
        if kind < 0.2 and sum(not client.is_over for client in site.clients[-40:]) < 8:
            stem = chance.choice(stems)
            ids = stem[: chance.randint(1, 20)] + [chance.randrange(VOCABULARY)] * 9
            tokens_max = chance.randint(1, min(12, CONTEXT_TOKENS - len(ids)))
            site.ask(ids, tokens_max, priority=chance.choice((0, 0, 1)))
        elif kind < 0.203 and site.clients:
            stopped = chance.choice(site.clients[-8:])
            for worker in site.workers:
                worker.stop(stopped.request_id)
        elif kind < 0.26:
            site.store.evict()
        elif kind < 0.5:
            site.turn(chance.choice(site.workers))
        elif todo := site.things_to_do():
            chance.choice(todo)()
    site.settle()
    assert site.store.wrong == []
    answered = [client for client in site.clients if client.error is None]
    assert 250 < len(answered) < 1_900, len(answered)
    for client in answered:
        right = answer_of(client.prompt, client.sampling.max_tokens)
        assert client.answer == right[: len(client.answer)]
    site.check_empty()
