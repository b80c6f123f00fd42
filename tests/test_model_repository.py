"""The model repository says what the code says: tensors, types, parameters and their comments."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from backends import tensors
from backends.config_pbtxt import (
    OLD_NAMES,
    DecodeConfig,
    FrontendConfig,
    PrefillConfig,
    TokenizerConfig,
    read_configs,
)
from backends.errors import ConfigError
from conductor.config import ConductorConfig

REPOSITORY = Path(__file__).parents[1] / "model_repository"
CONFIGS = {
    "conductor": (FrontendConfig, ConductorConfig),
    "prefill_0": (PrefillConfig,),
    "prefill_1": (PrefillConfig,),
    "decode_0": (DecodeConfig,),
    "decode_1": (DecodeConfig,),
    "preprocessing": (TokenizerConfig,),
    "postprocessing": (TokenizerConfig,),
}
MODELS = [*CONFIGS, "ensemble"]


def parsed(model: str) -> ModelConfig:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), ModelConfig())


def declared(fields: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        field.name: (DataType.Name(field.data_type).removeprefix("TYPE_"), tuple(field.dims))
        for field in fields  # type: ignore[attr-defined]
    }


def table(rows: tuple[tensors.Tensor, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {row.name: (row.dtype, row.dims) for row in rows}


def test_the_repository_has_just_these_models() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")}
    assert folders == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_can_be_copied_and_has_a_version(model: str) -> None:
    config = parsed(model)
    assert config.name == "", "a name would keep a copied folder from loading"
    assert config.max_batch_size == 1, "clients of TensorRT-LLM send shape [1, n]"
    assert (REPOSITORY / model / "1" / ".gitkeep").exists(), "git drops empty folders"


def test_the_conductor_declares_the_tensors_of_the_table() -> None:
    config = parsed("conductor")
    inputs = tensors.SUPPORTED_INPUTS + tensors.UNSUPPORTED_INPUTS
    assert declared(config.input) == table(inputs)
    assert all(field.optional for field in config.input)
    assert declared(config.output) == table(tensors.OUTPUTS)


def test_the_ensemble_passes_everything_through() -> None:
    config = parsed("ensemble")
    inputs = table(tensors.SUPPORTED_INPUTS + tensors.UNSUPPORTED_INPUTS)
    for name in ("input_ids", "messages", "tools", "chat_template_kwargs", "add_special_tokens"):
        del inputs[name]  # preprocessing makes the ids, out of text
    del inputs["skip_special_tokens"]  # postprocessing makes the text, without special tokens
    del inputs["prompt_logprobs"]  # five outputs, which would be in each response
    assert declared(config.input) == inputs
    step = {step.model_name: step for step in config.ensemble_scheduling.step}
    mapped = set(step["conductor"].input_map)
    assert mapped == (set(inputs) - {"text_input"}) | {"input_ids"}
    outputs = {field.name for field in config.output}
    left_out = tensors.FOR_POSTPROCESSING | set(tensors.PROMPT_OUTPUTS)
    assert outputs == {row.name for row in tensors.OUTPUTS} - left_out


@pytest.mark.parametrize("model", CONFIGS)
def test_every_parameter_is_known_valid_and_explained(model: str) -> None:
    config = parsed(model)
    raw = {name: value.string_value for name, value in config.parameters.items()}
    read_configs(CONFIGS[model], model, raw)
    lines = (REPOSITORY / model / "config.pbtxt").read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if line.startswith("parameters"):
            assert above.startswith("# "), f"{model}: say what this does: {line}"


@pytest.mark.parametrize(
    ("model", "remedy"),
    [("conductor", "start another Triton with this model"), ("prefill_0", "copy its folder")],
)
def test_a_second_instance_is_refused_with_what_to_do_instead(model: str, remedy: str) -> None:
    raw = {name: value.string_value for name, value in parsed(model).parameters.items()}
    with pytest.raises(ConfigError, match=f"instance_group count is 2; use 1. .*{remedy}"):
        read_configs(CONFIGS[model], model, raw, 2)


def test_a_renamed_parameter_keeps_its_old_name_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (config,) = read_configs((ConductorConfig,), "conductor", {"overtaker_share": "0.25"})
    assert config.expected_arrivals_share == 0.25
    assert "overtaker_share is now called expected_arrivals_share" in caplog.text
    both = {"overtaker_share": "0.25", "expected_arrivals_share": "0.5"}
    (config,) = read_configs((ConductorConfig,), "conductor", both)
    assert config.expected_arrivals_share == 0.5, "of two, the new name counts"
    known = {
        field.name
        for classes in CONFIGS.values()
        for cls in classes
        for field in dataclasses.fields(cls)
    }
    assert set(OLD_NAMES.values()) <= known and not OLD_NAMES.keys() & known
