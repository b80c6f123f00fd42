"""The fast paths on CPU give what torch's public functions give, and can be done without."""

from __future__ import annotations

import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backends.engine.interface import Work
from backends.engine.torch import mixed_products, onednn
from backends.engine.torch.layers import causal_attention
from backends.engine.torch.layers.feed_forward import DenseFeedForward
from backends.engine.torch.linear import Linear
from backends.engine.torch.torch_engine import TorchEngine
from tests.backends.engine.checkpoints import make_checkpoint


@pytest.fixture(params=["fast", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    # As without native code; products with float32 are in test_mixed_products.py.
    monkeypatch.setattr(mixed_products, "activations_dtype", lambda dtype, device: dtype)
    if request.param == "public":
        monkeypatch.setattr(onednn, "serves", lambda tensor: False)
    elif not onednn.serves(torch.zeros(1)):
        pytest.skip("this torch has no oneDNN products: the public functions are tested")
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_is_the_product_with_its_weight(
    way: str, rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype) if has_bias else None
    inputs, residual = torch.randn(rows, 24).to(dtype), torch.randn(rows, 40).to(dtype)
    expected = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
    linear = Linear(weight, bias)
    # bfloat16 has 8 bits: rounded once here, up to three times between the steps of silu.
    tolerance, more = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 2**-5)
    with torch.inference_mode():
        close(linear(inputs), expected, tolerance)
        close(linear.add_to(residual.clone(), inputs), residual.float() + expected, more)
        gate, up = expected.chunk(2, dim=-1)
        close(DenseFeedForward(linear, linear).inner(inputs), F.silu(gate) * up, more)


def close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.float(), expected, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_matrix_is_kept_once(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(1100, 1024).to(dtype), torch.randn(1, 1024).to(dtype)
    kept = weakref.ref(weight)
    expected = inputs.float() @ weight.float().t()
    with torch.inference_mode():
        linear = Linear(weight)
        del weight
        assert (kept() is None) == (way == "fast")
        close(linear(inputs), expected, 2e-4 if dtype == torch.float32 else 2**-7)


def test_tiled_attention_is_causal_attention(seed: int) -> None:
    if not onednn.serves(torch.zeros(1)):
        pytest.skip("this torch has no oneDNN products")
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        kv_heads, shared = chance.choice([1, 2, 3]), chance.choice([1, 3, 4, 8])
        head_dim = chance.choice([16, 24, 64])
        tokens, start = chance.randint(32, 200), chance.choice([0, 1, 63, 64, 129, 500])
        end = start + tokens
        context = (end + 63) // 64 * 64
        queries = torch.randn(tokens, kv_heads, shared, head_dim)
        keys, values = torch.randn(2, kv_heads, context, head_dim).unbind(0)
        ours = torch.empty_like(queries)
        with torch.inference_mode():
            causal_attention.in_tiles(queries, keys, values, start, ours)
            is_seen = torch.arange(end)[None, :] <= start + torch.arange(tokens)[:, None]
            expected = F.scaled_dot_product_attention(
                queries.permute(1, 2, 0, 3),
                keys[:, None, :end].expand(-1, shared, -1, -1),
                values[:, None, :end].expand(-1, shared, -1, -1),
                attn_mask=is_seen,
            ).permute(2, 0, 1, 3)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_only_large_work_is_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(causal_attention, "in_tiles", lambda *_: used.append("tiles"))
    monkeypatch.setattr(causal_attention, "by_torch", lambda *_: used.append("torch"))
    for tokens, start in ((16, 4080), (64, 0), (64, 960), (512, 0)):
        queries = torch.zeros(tokens, 2, 4, 32)
        causal_attention.attend(queries, queries, queries, start, queries)
    fast = "tiles" if onednn.serves(torch.zeros(1)) else "torch"
    assert used == ["torch", "torch", fast, fast]


def test_the_engine_does_without_onednn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path, attention_bias=True)
    chance = random.Random(3)
    works = [
        Work(chance.choices(range(320), k=tokens), 0, list(range(first, first + 40)))
        for tokens, first in ((600, 0), (40, 40), (1, 80))
    ]
    fast = TorchEngine.load(tmp_path, 120, 16).forward(works)
    monkeypatch.setattr(onednn, "serves", lambda tensor: False)
    plain = TorchEngine.load(tmp_path, 120, 16).forward(works)
    np.testing.assert_allclose(fast, plain, atol=1e-4)
