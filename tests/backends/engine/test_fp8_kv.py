"""KV kept as fp8: greedy tokens are those of transformers with a cache that rounds K and V alike.

A sum in another order may put a number on the other side of the middle between two fp8. That is
rare, and moves logits by a hundredth or so: near-ties are wider here than in float32.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.engine.interface import Work
from backends.engine.model_config import CheckpointError, read_model_config
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch import native_layers
from backends.engine.torch.gpu.decode_graph import Recorder
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate
from tests.backends.engine.checkpoints import edit_config, load_reference, make_checkpoint
from tests.backends.engine.reference import Comparison, greedy
from tests.backends.engine.torch.gpu.device_engines import device_engine

TIE_LOGITS = 0.03
OUTPUT_TOKENS, BLOCK_TOKENS, PAGES = 16, 16, 160
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 50, 83, 120)
# Of a layer: some of K and V are too large for the first, and cut off at 448.
SCALES = ((0.004, 0.3), (1.7, 0.011))
NAMES = ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


class RoundedCache(transformers.DynamicCache):
    """Each K and V, after RoPE, divided by its layer's scale, rounded to fp8, and multiplied."""

    def __init__(self, scales: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._scales = scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
        rounded = [
            (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for states, scale in zip(
                (key_states, value_states), self._scales[layer_idx], strict=True
            )
        ]
        return super().update(*rounded, layer_idx, *rest, **more)


def with_scales(path: Path, tensors: dict[str, Any]) -> Path:
    weights = load_file(path / "model.safetensors")
    weights |= {name: torch.tensor(value) for name, value in tensors.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def scale_tensors() -> dict[str, Any]:
    return {
        f"model.layers.{layer}.self_attn.{name}": scale
        for layer, (names, scales) in enumerate(zip(NAMES, SCALES, strict=True))
        for name, scale in zip(names, scales, strict=True)
    }


def scales_read() -> list[list[float]]:
    """As float32 has them."""
    return [[float(torch.tensor(scale)) for scale in scales] for scales in SCALES]


class Case:
    def __init__(self, path: Path) -> None:
        self.path = path
        chance = random.Random(7)
        self.model = load_reference(path)
        self.prompts = [chance.choices(range(320), k=n) for n in LENGTHS]
        self.references = [
            greedy(self.model, prompt, OUTPUT_TOKENS, self.cache(), TIE_LOGITS)
            for prompt in self.prompts
        ]

    def cache(self) -> RoundedCache:
        return RoundedCache(scales_read(), config=self.model.config)

    def engine(self, **arguments: Any) -> TorchEngine:
        return TorchEngine.load(self.path, PAGES, BLOCK_TOKENS, kv_dtype="fp8", **arguments)

    def check(self, engine: TorchEngine, chunk_tokens: int, slots_max: int) -> None:
        params = SamplingParams(max_tokens=OUTPUT_TOKENS)
        outputs = generate(engine, self.prompts, params, chunk_tokens, slots_max)
        comparison = Comparison()
        for prompt, output, reference in zip(self.prompts, outputs, self.references, strict=True):
            comparison.add(f"prompt of {len(prompt)} tokens", output, reference)
        comparison.check(excluded_share_max=0.5)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, overrides = FAMILIES[request.param]
    path = make_checkpoint(family, tmp_path_factory.mktemp(request.param), **overrides)
    return Case(with_scales(path, scale_tensors()))


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(("chunk_tokens", "slots_max"), [(128, 1), (16, 5)])
def test_tokens_are_those_of_transformers_with_a_rounding_cache(
    case: Case, chunk_tokens: int, slots_max: int, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(native_layers, "serves", lambda tensor: False)
    engine = case.engine()
    assert engine._transformer.attention.reads_seen == (
        is_native and native_layers.serves(torch.ones(1))
    )
    assert engine.layout.dtype == "fp8"
    case.check(engine, chunk_tokens, slots_max)


def test_a_token_sees_the_rounded_kv_of_its_own_chunk(case: Case) -> None:
    """So it makes no difference how a prompt is cut, and pages hold what transformers' cache does.

    But for a number in ten thousand of the first layer, and what that changes behind it.
    """
    engine, prompt, cache = case.engine(), case.prompts[-1], case.cache()
    with torch.inference_mode():
        logits = case.model(torch.tensor([prompt]), past_key_values=cache).logits[0]
    expected, pages = logits[-1].numpy(), list(range(8))
    for chunk in (len(prompt), 7, 1):
        for start in range(0, len(prompt), chunk):
            found = engine.forward([Work(prompt[start : start + chunk], start, pages)])[0]
        ours, theirs = held(engine, pages, len(prompt)), held_by(cache)
        assert ours.shape == theirs.shape
        shares = (ours != theirs).float().flatten(1).mean(dim=1).tolist()
        assert shares[0] < 1e-3, "the first layer sees the same numbers in all ways"
        assert max(shares) < 0.05, shares
        np.testing.assert_allclose(found, expected, atol=TIE_LOGITS if any(shares) else 1e-4)


def held(engine: TorchEngine, pages: list[int], tokens: int) -> torch.Tensor:
    """[layers, 2, kv_heads, tokens, head_dim] as pages hold them."""
    pool = engine._memory.pool.view(torch.uint8)[pages].view(torch.float8_e4m3fn).float()
    return pool.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :tokens]


def held_by(cache: RoundedCache) -> torch.Tensor:
    """The same of transformers' cache; what it has multiplied is divided again."""
    made = [
        torch.stack([layer.keys[0] / scales[0], layer.values[0] / scales[1]])
        for layer, scales in zip(cache.layers, scales_read(), strict=True)
    ]
    return torch.stack(made).to(torch.float8_e4m3fn).float()


def test_bfloat16_computes_over_the_same_fp8(case: Case) -> None:
    """Its logits differ from those of float32 as those of transformers in bfloat16 do."""
    prompt, pages = case.prompts[-1], list(range(8))
    engine = case.engine(dtype="bfloat16")
    rounded = load_reference(case.path, torch.bfloat16)
    expected = case.engine().forward([Work(prompt, 0, pages)])[0]
    with torch.inference_mode():
        theirs = rounded(torch.tensor([prompt])).logits[0, -1].float().numpy()
        exact = case.model(torch.tensor([prompt])).logits[0, -1].numpy()
    ours = engine.forward([Work(prompt, 0, pages)])[0]
    assert np.abs(ours - expected).mean() < 3 * np.abs(theirs - exact).mean()


def test_pages_that_are_mirrored_and_steps_that_are_recorded_have_the_same_bytes(
    case: Case,
) -> None:
    """What runs on a GPU, without one."""
    plain = case.engine()
    mirrored = device_engine(case.path, PAGES, BLOCK_TOKENS, recorder=Recorder(), kv_dtype="fp8")
    prompt, pages = case.prompts[-1], list(range(8))
    steps = [Work(prompt[:100], 0, pages), *(Work(prompt[i : i + 1], i, pages) for i in (100, 101))]
    for work in steps:
        np.testing.assert_allclose(mirrored.forward([work]), plain.forward([work]), atol=TIE_LOGITS)
    mirrored.export_pages(pages)
    layers = len(plain.layers)
    ours, theirs = (
        engine.kv_pool.reshape(PAGES, layers, -1)[:6, 0] for engine in (plain, mirrored)
    )
    assert (ours != theirs).mean() < 1e-3, "the first layer sees the same numbers in both"


def test_the_checkpoint_can_ask_for_it(tmp_path: Path) -> None:
    path = with_scales(make_checkpoint("llama", tmp_path), scale_tensors())
    plain = TorchEngine.load(path, 8, 16)
    assert plain.layout.dtype == "float32", "scales alone ask for nothing"
    edit_config(path, quantization_config=KV_ONLY)
    asked = TorchEngine.load(path, 8, 16)
    assert asked.layout.dtype == "fp8" and asked.weights_id == plain.weights_id
    edit_config(path, quantization_config=None)
    beside = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_model_config(path).is_kv_fp8


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"num_bits": 8, "type": "int"}, "quantised as int8"),
        (
            {"num_bits": 8, "type": "float", "strategy": "attn_head"},
            "quantised as fp8 per attn_head",
        ),
        ({"num_bits": 8, "type": "float", "dynamic": True}, "quantised as fp8 dynamic"),
        ({"num_bits": 8, "type": "float", "symmetric": False}, "quantised as fp8 asymmetric"),
    ],
)
def test_kv_that_is_quantised_otherwise_is_refused_by_name(
    scheme: dict[str, Any], said: str, tmp_path: Path
) -> None:
    edit_config(
        make_checkpoint("llama", tmp_path),
        quantization_config={**KV_ONLY, "kv_cache_scheme": scheme},
    )
    with pytest.raises(CheckpointError, match=said):
        read_model_config(tmp_path)


def test_quantised_weights_beside_it_are_refused(tmp_path: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8}}}
    edit_config(
        make_checkpoint("llama", tmp_path), quantization_config={**KV_ONLY, "config_groups": groups}
    )
    with pytest.raises(CheckpointError, match="quantized weights are not supported"):
        read_model_config(tmp_path)


def test_a_scale_that_is_no_scale_is_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    prefix = "model.layers.{}.self_attn.{}"
    wrong = {prefix.format(0, "k_scale"): 0.0, prefix.format(1, "v_scale"): [1.0, 2.0]}
    with_scales(path, wrong)
    with pytest.raises(CheckpointError) as caught:
        TorchEngine.load(path, 8, 16, kv_dtype="fp8")
    for name in wrong:
        assert any(
            f"tensor {name} must be one positive number" in line for line in caught.value.problems
        )


def test_one_scale_may_be_of_both(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    work = [Work(list(range(30)), 0, [0, 1])]
    names = "model.layers.0.self_attn.{}"
    found = []
    for tensors in (
        {names.format("kv_scale"): 0.03},
        {names.format("k_scale"): 0.03, names.format("v_scale"): 0.03},
    ):
        with_scales(path, tensors)
        found.append(TorchEngine.load(path, 8, 16, kv_dtype="fp8").forward(work))
    np.testing.assert_array_equal(*found)


def test_scales_and_what_is_computed_in_are_in_the_fingerprint(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    engines = [
        TorchEngine.load(path, 8, 16, dtype, kv_dtype="fp8") for dtype in ("float32", "bfloat16")
    ]
    assert len({engine.tp_shape for engine in engines}) == 2
    with_scales(path, scale_tensors())
    assert TorchEngine.load(path, 8, 16, kv_dtype="fp8").weights_id != engines[0].weights_id


def test_a_block_is_a_quarter_of_one_of_float32_and_a_page_is_that_block(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    plain, small = (TorchEngine.load(path, 8, 16, kv_dtype=kind) for kind in ("auto", "fp8"))
    assert plain.layout.block_bytes == 4 * small.layout.block_bytes
    assert len(small.kv_pool) == 8 * small.layout.block_bytes
    assert small.hidden_bytes == plain.hidden_bytes, "hidden states are no KV"
