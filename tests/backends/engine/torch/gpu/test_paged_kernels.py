"""Kernels that read pages in place: what they are asked is right, and without them it goes on.

The kernels themselves need a GPU (tests/gpu); here stand-ins with their signatures answer.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from backends.engine.interface import Work
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.decode_graph import Recorder
from backends.engine.torch.gpu.flashinfer_kernels import FlashInferKernels
from backends.engine.torch.gpu.paged_kernels import VarlenKernels
from backends.engine.torch.gpu.paged_plan import Attend, PagedKernels, PagedSequences, StaticAttend
from backends.engine.torch.gpu.staging import Staging
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers import causal_attention
from backends.engine.torch.torch_engine import TorchEngine
from backends.token_logprobs import PromptScores
from mooncake_store.layout import KvLayout, blocks_touched
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.engine.torch.gpu import paged_standins
from tests.backends.engine.torch.gpu.device_engines import device_engine

B, PAGES = 16, 120
CPU = torch.device("cpu")
KINDS = ["flashinfer", "torch", "torch with key starts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=3)


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", paged_standins.FLASHINFER)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", paged_standins.varlen_attn)


def kernels_of(kind: str, layout: KvLayout, heads: int) -> PagedKernels:
    if kind == "flashinfer":
        return FlashInferKernels(layout, heads, torch.float32, CPU)
    return VarlenKernels(has_key_starts=kind != "torch")


def engines(checkpoint: Path, kernels: PagedKernels | None) -> tuple[TorchEngine, TorchEngine]:
    """The one that gathers, and the one that reads in place and records its decode steps."""
    gathering = device_engine(checkpoint, PAGES, B)
    in_place = device_engine(checkpoint, PAGES, B, recorder=Recorder(), kernels=kernels)
    torch.manual_seed(1)
    gathering._memory.pool.normal_()
    in_place._memory.pool.copy_(gathering._memory.pool)
    return gathering, in_place


def layout_and_heads(checkpoint: Path) -> tuple[KvLayout, int]:
    engine = device_engine(checkpoint, 1, B)
    return engine.layout, engine.config.heads


def random_batch(chance: random.Random, longest: int) -> list[Work]:
    free = list(range(PAGES))
    chance.shuffle(free)
    batch = []
    for _ in range(chance.randrange(1, 8)):
        start, new = chance.choice([0, 1, B, 70]), chance.choice([1, 1, 2, B, 40][:longest])
        pages = [free.pop() for _ in range(blocks_touched(start + new, B))]
        batch.append(Work(chance.choices(range(320), k=new), start, pages))
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_have_the_logits_of_gathered_pages(
    kind: str, checkpoint: Path, seed: int
) -> None:
    chance = random.Random(seed)
    gathering, in_place = engines(checkpoint, kernels_of(kind, *layout_and_heads(checkpoint)))
    for longest in [5, 1, 5, 1, 5, 5, 1, 3]:  # 1: a decode step, which is recorded
        batch = random_batch(chance, longest)
        in_place._memory.pool.copy_(gathering._memory.pool)
        np.testing.assert_allclose(in_place.forward(batch), gathering.forward(batch), atol=2e-4)
    assert in_place._graphs is not None and not in_place._graphs._is_off
    assert in_place._transformer.attention.kernels is not None


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_have_the_prompt_logprobs_of_gathered_pages(
    kind: str, checkpoint: Path, seed: int
) -> None:
    chance = random.Random(seed)
    gathering, in_place = engines(checkpoint, kernels_of(kind, *layout_and_heads(checkpoint)))
    for longest in [5, 1, 5]:
        batch = random_batch(chance, longest)
        in_place._memory.pool.copy_(gathering._memory.pool)
        found = []
        for engine in (gathering, in_place):
            scored = [
                replace(each, scores=PromptScores(np.arange(3, 4 + each.end, dtype=np.int32), 2))
                for each in batch
            ]
            engine.forward(scored)
            found.append([each.scores.log_probs for each in scored if each.scores is not None])
        for expected, ours in zip(*found, strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_pass_layer_by_layer_in_turns_keep_their_plans(
    kind: str, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=8)
    gathering, in_place = engines(path, kernels_of(kind, *layout_and_heads(path)))
    assert gathering.rings is not None
    found = []
    for engine in (gathering, in_place):
        layers, logits = engine.layout.layers, []
        passes = [engine.begin_pass(list(range(5, 75)), 0, range(5 * n, 5 * n + 5)) for n in (0, 1)]
        for layer in range(layers):
            for start in (0, 32, 64):
                logits = [one.compute(layer, start, min(32, 70 - start)) for one in passes]
        found.append(logits)
    for expected, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-4)


class Wrong:
    """A kernel that answers, but not what was asked; or fails, from a certain call on."""

    name = "wrong"

    def __init__(self, works_before: int = 0, error: str | None = None) -> None:
        self.left, self.error, self.theirs = works_before, error, VarlenKernels(False)

    def planned(self, sequences: PagedSequences, staging: Staging) -> Attend:
        right = self.theirs.planned(sequences, staging)

        def attend(pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left >= 0:
                return right(pages, queries)
            if self.error is not None:
                raise RuntimeError(self.error)
            return torch.zeros_like(queries)

        return attend

    def static(self, sequences: int, width: int) -> StaticAttend:
        raise RuntimeError("no recorded steps")


def memory_of(dtype: str = "bfloat16") -> KvMemory:
    return KvMemory(KvLayout(2, 2, 32, dtype, B), 4, CPU)


def test_a_kernel_that_is_not_right_is_named_with_the_reason() -> None:
    def missing() -> PagedKernels:
        raise ModuleNotFoundError("No module named 'flashinfer'")

    memory = memory_of()
    known = [
        ("one", missing),
        ("two", Wrong),
        ("three", lambda: Wrong(error="no kernel image")),
        ("four", lambda: VarlenKernels(False)),
    ]
    found = list(paged_kernels.tried(known, memory, 8))
    assert [kernels is not None for kernels, _ in found] == [False, False, False, True]
    assert found[0][1] == "one: ModuleNotFoundError: No module named 'flashinfer'"
    assert found[1][1].startswith("two: it is off by ")
    assert found[2][1] == "three: RuntimeError: no kernel image"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_known_kernel_is_tried_as_a_gpu_would_try_it(dtype: str) -> None:
    memory = memory_of(dtype)
    for name, make in paged_kernels.known(memory, 8):
        assert paged_kernels.wrong(make(), memory, 8) is None, name


def test_a_kernel_that_fails_later_is_told_once_and_the_step_goes_on(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gathering, in_place = engines(checkpoint, Wrong(4, "an illegal shape"))
    batch = [Work([5, 6, 7], 20, [1, 2]), Work([9], 17, [3, 4]), Work([8] * 30, 0, [5, 6])]
    announced: list[int] = []
    with caplog.at_level(logging.WARNING):
        for on_layer in (announced.append, None, None):
            np.testing.assert_allclose(
                in_place.forward(batch, on_layer), gathering.forward(batch), atol=2e-4
            )
            in_place.forward(batch[1:2])
    told = [record.getMessage() for record in caplog.records]
    assert announced == [0, 1, 2]
    assert "wrong failed, pages are gathered now: an illegal shape" in told
    assert len(told) == 1


def test_the_stand_ins_have_the_parameters_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in real:
        pytest.skip("this torch has no block table")
    assert list(real) == list(inspect.signature(paged_standins.varlen_attn).parameters)


def test_torch_takes_our_shapes_as_far_as_it_looks_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    try:
        kernels = VarlenKernels(has_key_starts=True)
    except ImportError:
        pytest.skip("this torch has no variable-length attention")
    meta = torch.device("meta")
    static = kernels.static(3, 2)
    attend = static.over(
        torch.empty(3, 2, dtype=torch.int64, device=meta),
        torch.empty(3, dtype=torch.int64, device=meta),
    )
    pages = torch.empty(5, 2, 2, 256, 64, dtype=torch.bfloat16, device=meta)
    queries = torch.empty(3, 8, 64, dtype=torch.bfloat16, device=meta)
    assert attend(pages, queries).shape == queries.shape


@pytest.mark.parametrize(("tokens", "start"), [(1, 9), (40, 0), (40, 3), (64, 200), (33, 1)])
def test_attention_without_a_whole_mask_is_that_with_one(
    tokens: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_attention, "MASK_SCALARS_MAX", 1_000)
    torch.manual_seed(tokens)
    end = start + tokens
    queries = torch.randn(tokens, 2, 3, 16)
    keys, values = torch.randn(2, 2, end + 7, 16).unbind(0)  # behind the end: not seen
    keys[:, end:] = values[:, end:] = torch.nan
    mask = torch.ones(tokens, end, dtype=torch.bool).tril(start)
    shape = (2, 3, end, 16)
    expected = F.scaled_dot_product_attention(
        queries.permute(1, 2, 0, 3),
        keys[:, None, :end].expand(shape),
        values[:, None, :end].expand(shape),
        attn_mask=mask,
    ).permute(2, 0, 1, 3)
    ours = torch.full_like(queries, torch.nan)
    causal_attention.by_torch(queries, keys, values, start, ours)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    # And the way of a GPU, which torch carries out with a mask here.
    asked: list[Any] = []

    def has_kernel(*tensors: torch.Tensor) -> bool:
        asked.append(tensors)
        return True

    monkeypatch.setattr(causal_attention, "_knows_lower_right", has_kernel)
    ours.fill_(torch.nan)
    causal_attention.by_torch(queries, keys, values, start, ours)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert bool(asked) == (start > 0)
    assert causal_lower_right(tokens, end)._materialize().equal(mask)
