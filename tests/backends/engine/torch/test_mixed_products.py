"""Products of float32 rows with bfloat16 weights: both forms, and the model that they make."""

from __future__ import annotations

import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.engine.interface import Work
from backends.engine.torch import mixed_products, native_layers
from backends.engine.torch.linear import Linear
from backends.engine.torch.torch_engine import TorchEngine
from mooncake_store.layout import fingerprint
from tests.backends.engine.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not native_layers.serves(torch.zeros(1)), reason="no compiler or no AVX-512: torch computes"
)
ROWS = (1, 2, 7, 8, 16, 121, 250)
SHAPES = ((64, 64), (40, 24), (200, 576), (128, 2_600))  # outputs, inputs


@pytest.fixture(params=["exact", "rounded"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of products with many rows, whichever this CPU prefers."""
    found = mixed_products._found_brgemm() if request.param == "rounded" else None
    if request.param == "rounded" and found is None:
        pytest.skip("this torch has no brgemm")
    monkeypatch.setattr(mixed_products, "_brgemm", lambda: found)
    return str(request.param)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_is_that_of_float32(form: str, rows: int, threads: int) -> None:
    torch.manual_seed(rows)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, width in SHAPES:
            weight, bias = torch.randn(outputs, width).bfloat16(), torch.randn(outputs)
            inputs = torch.randn(rows, width + 8)[:, 4:-4]
            residual = torch.randn(rows, outputs)
            is_rounded = form == "rounded" and rows >= mixed_products.ROUNDED_ROWS_MIN
            whole = outputs // mixed_products.COLUMNS * mixed_products.COLUMNS
            expected = inputs @ weight.float().t()
            if is_rounded:  # the columns of a last block that is not full are exact
                expected[:, :whole] = inputs.bfloat16().float() @ weight[:whole].float().t()
            linear = Linear(weight, bias)
            close(linear(inputs), expected + bias)
            close(linear.add_to(residual.clone(), inputs), residual + expected + bias)
            close(Linear(weight)(inputs), expected)
    finally:
        torch.set_num_threads(before)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


def test_a_rows_exact_product_does_not_depend_on_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixed_products, "_brgemm", lambda: None)
    torch.manual_seed(1)
    linear, inputs = Linear(torch.randn(200, 2_600).bfloat16()), torch.randn(133, 2_600)
    together = linear(inputs)
    for row in (0, 5, 119, 120, 132):
        assert torch.equal(linear(inputs[row : row + 1])[0], together[row])


def test_a_bfloat16_weight_is_kept_once() -> None:
    weight = torch.randn(128, 64).bfloat16()
    kept = weakref.ref(weight)
    linear = Linear(weight)
    del weight
    assert kept() is None
    assert linear.dtype == torch.bfloat16


def test_an_odd_number_of_inputs_is_not_packed() -> None:
    assert mixed_products.serves(torch.zeros(8, 6).bfloat16())
    assert not mixed_products.serves(torch.zeros(8, 7).bfloat16())
    assert not mixed_products.serves(torch.zeros(8, 6))


def test_a_weight_with_an_odd_number_of_inputs_is_multiplied_in_float32() -> None:
    torch.manual_seed(3)
    weight, inputs = torch.randn(8, 7).bfloat16(), torch.randn(5, 7)
    found = Linear(weight)(inputs)
    assert found.dtype == torch.float32
    assert torch.allclose(found, inputs @ weight.float().t(), atol=1e-5)


@pytest.mark.parametrize(
    ("cpu", "is_faster"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : avx512f", False),
        ("", False),
    ],
)
def test_rows_are_rounded_only_where_bfloat16_is_faster(cpu: str, is_faster: bool) -> None:
    assert mixed_products._is_bfloat16_faster(cpu) == is_faster


def test_a_wrong_brgemm_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mixed_products._found_brgemm()
    if found is None:
        pytest.skip("this torch has no brgemm")
    assert mixed_products._is_right(found)
    monkeypatch.setattr(mixed_products, "TOLERANCE", 0.0)
    assert not mixed_products._is_right(found)


FAMILIES = ("llama", "qwen2", "qwen3", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_model_has_the_logits_of_float32_with_its_weights(
    family: str, form: str, tmp_path: Path
) -> None:
    """The checkpoint is bfloat16, so only KV differs, and rows in the rounded form."""
    make_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    chance = random.Random(3)
    works = [
        Work(chance.choices(range(320), k=tokens), 0, list(range(first, first + 40)))
        for tokens, first in ((600, 0), (40, 40), (1, 80))
    ]
    steps = [Work([7], len(work.token_ids), work.pages) for work in works]
    mixed = TorchEngine.load(tmp_path, 120, 16, "bfloat16")
    whole = TorchEngine.load(tmp_path, 120, 16, "float32")
    for batch in (works, steps):
        ours, expected = mixed.forward(batch), whole.forward(batch)
        spread = expected.std()
        assert np.abs(ours - expected).mean() < (0.01 if form == "exact" else 0.02) * spread


def test_kv_of_a_bfloat16_model_has_its_own_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path)
    engines = [TorchEngine.load(tmp_path, 4, 16, dtype) for dtype in ("float32", "bfloat16")]
    monkeypatch.setattr(native_layers, "serves", lambda tensor: False)
    engines.append(TorchEngine.load(tmp_path, 4, 16, "bfloat16"))
    assert [engine.tp_shape for engine in engines] == ["tp1", "tp1 in bfloat16+float32", "tp1"]
    _, mixed, plain = (
        fingerprint(engine.model_id, engine.weights_id, engine.layout, engine.tp_shape)
        for engine in engines
    )
    assert mixed != plain, "torch rounds K and V after each operation"
