"""Nodes and models as data, what fits, and what a step of them takes."""

from __future__ import annotations

import pytest

from loadtest.planner.engine import NodeEngine, PlanRefused
from loadtest.simulator.cluster.gpu import Roofline, prompt_s
from loadtest.simulator.cluster.hardware import HARDWARE, MODELS, LlmModel

# The matrices of all layers, and two embeddings, as the parameters that the makers publish.
VOCABULARY = {"Llama-3-8B": 128_256, "Llama-3-70B": 128_256, "Qwen3-32B": 151_936}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_shape_of_a_model_has_its_published_parameters(model: LlmModel) -> None:
    counted = model.layers * model.layer_weights + 2 * VOCABULARY[model.name] * model.width
    assert counted == pytest.approx(model.parameters, rel=0.005)


def test_kv_of_a_token_is_what_the_papers_say() -> None:
    assert MODELS["Llama-3-70B"].token_bytes == 320 * 1024
    assert MODELS["Llama-3-8B"].token_bytes == 128 * 1024
    assert MODELS["Qwen3-32B"].token_bytes == 256 * 1024


def test_the_paper_s_node_and_model_are_what_experiments_run_on() -> None:
    default, named = Roofline(), Roofline(HARDWARE["A800"], MODELS["Llama-3-70B"])
    assert vars(default) == vars(named)


def test_better_hardware_and_smaller_models_are_faster() -> None:
    for model in MODELS.values():
        a800, h100, h200 = (Roofline(HARDWARE[name], model) for name in ("A800", "H100", "H200"))
        assert prompt_s(h200, 0, 32_768, 2_048) == prompt_s(h100, 0, 32_768, 2_048)
        assert prompt_s(h100, 0, 32_768, 2_048) < 0.5 * prompt_s(a800, 0, 32_768, 2_048)
        steps_s = [gpu.decode_s(32, 32 * 8_000.0) for gpu in (h200, h100, a800)]
        assert steps_s == sorted(steps_s) and steps_s[0] < steps_s[2]
        assert h200.pages_bytes > h100.pages_bytes == a800.pages_bytes
    small, middle, large = (
        Roofline(HARDWARE["H100"], MODELS[name])
        for name in ("Llama-3-8B", "Qwen3-32B", "Llama-3-70B")
    )
    assert small.prefill_s([(0, 8_192)]) < middle.prefill_s([(0, 8_192)])
    assert middle.prefill_s([(0, 8_192)]) < large.prefill_s([(0, 8_192)])
    assert small.decode_s(8, 9e4) < middle.decode_s(8, 9e4) < large.decode_s(8, 9e4)


def test_a_model_that_does_not_fit_is_refused_with_how_many_it_needs() -> None:
    with pytest.raises(PlanRefused, match=r"141 GB, and 1 x A800 have 72 GB .* --gpus 2"):
        NodeEngine.named("A800", "Llama-3-70B", gpus=1)
    assert NodeEngine.named("A800", "Llama-3-70B", gpus=2).gpu().pages_bytes > 0
    with pytest.raises(PlanRefused, match="--gpus 2"):
        NodeEngine.named("H200", "Llama-3-70B", gpus=1)
    assert NodeEngine.named("h200", "qwen3-32b", gpus=1).name == "Qwen3-32B on 1 x H200"


def test_a_name_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(PlanRefused, match="no hardware 'B200'; there are A800, H100, H200"):
        NodeEngine.named("B200", "Llama-3-8B")
    with pytest.raises(PlanRefused, match="no model 'GPT-2'; there are Llama-3-8B"):
        NodeEngine.named("H100", "GPT-2")
