"""What an operator may set for engine tensorrt_llm: all mistakes at once, each with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.config_pbtxt import DTYPES
from backends.engine.connected.settings import read_options
from backends.engine.trtllm.settings import (
    OBJECTS,
    ONLY,
    SAID_ELSEWHERE,
    TrtllmConfig,
    option_problems,
)
from backends.errors import ConfigError
from backends.triton.worker_kinds import read_worker_configs

USABLE = {"engine": "tensorrt_llm", "dtype": "bfloat16", "block_tokens": "256"}


def refusal(role: str = "prefill", **raw: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_worker_configs(role, "prefill_0", USABLE | raw, 1)
    return str(caught.value)


def test_the_defaults_are_usable() -> None:
    worker, trtllm = read_worker_configs("decode", "decode_0", USABLE, 1)
    assert trtllm == TrtllmConfig() and trtllm.page_tokens == 32
    assert worker.engine == "tensorrt_llm"


def test_all_mistakes_are_said_at_once() -> None:
    said = refusal(
        page_tokens="48",
        handoff="pigeon",
        gpus="0,1",
        tp_size="4",
        dtype="int4",
        gpu_memory_fraction="90",
        transceiver="tcp",
        chunk_tokens="100",
    )
    for word in (
        "page_tokens is 48",
        "handoff is 'pigeon'",
        "gpus names 2",
        "dtype is 'int4'",
        "gpu_memory_fraction",
        "transceiver is 'tcp'",
        "chunk_tokens",
        "block_tokens (256) must be a multiple of page_tokens",
    ):
        assert word in said, said


@pytest.mark.parametrize("gpus", ["\N{SUPERSCRIPT TWO}", "0,", "a"])
def test_gpus_that_are_no_numbers_are_rejected(gpus: str) -> None:
    assert f"gpus is {gpus!r}; use CUDA device numbers" in refusal(gpus=gpus)


def test_kv_dtype_is_said_in_one_place() -> None:
    assert "kv_dtype is 'int8'; use auto or fp8" in refusal(kv_dtype="int8")
    found = option_problems({"kv_cache_config": {"dtype": "fp8"}}, True)
    assert list(found) == ["llm_options sets kv_cache_config.dtype; that is said by kv_dtype"]


def test_a_block_is_moved_in_whole_pages() -> None:
    assert "multiple of page_tokens (128)" in refusal(block_tokens="64", page_tokens="128")


def test_parameters_of_this_engine_are_unknown_to_the_torch_engine() -> None:
    with pytest.raises(ConfigError, match="unknown parameter 'page_tokens'"):
        read_worker_configs("prefill", "prefill_0", {"engine": "torch", "page_tokens": "32"}, 1)


def test_the_torch_engine_still_refuses_half_precision_that_only_tensorrt_llm_has() -> None:
    assert "float16" not in DTYPES
    with pytest.raises(ConfigError, match="dtype is 'float16'"):
        read_worker_configs("prefill", "prefill_0", {"dtype": "float16"}, 1)
    assert read_worker_configs("prefill", "prefill_0", USABLE | {"dtype": "float16"}, 1)


def wrong_value(name: str) -> object:
    of_words = {
        "backend": "tensorrt",
        "scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION",
        "kv_cache_config.enable_block_reuse": False,
        "orchestrator_type": "ray",
        "speculative_config": {"decoding_type": "MTP"},
        "sparse_attention_config": {"algorithm": "rocket"},
    }
    return of_words.get(name, 7)


def nested(name: str, value: object) -> dict[str, object]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


@pytest.mark.parametrize("name", ONLY)
def test_what_a_connector_cannot_work_with_is_refused_with_the_reason(name: str) -> None:
    [said] = option_problems(nested(name, wrong_value(name)), is_connected=True)
    assert name in said and ONLY[name][1] in said
    allowed = ONLY[name][0][0]
    assert not list(option_problems(nested(name, allowed), is_connected=True))


@pytest.mark.parametrize("name", SAID_ELSEWHERE)
def test_what_another_parameter_says_is_not_said_twice(name: str) -> None:
    for value in (1, {"a": 1}):
        [said] = option_problems(nested(name, value), is_connected=False)
        assert SAID_ELSEWHERE[name] in said


def test_an_engine_without_a_connector_may_do_more() -> None:
    drafts = {"speculative_config": {"a": 1}}
    assert not list(option_problems(drafts, is_connected=False))
    assert list(option_problems(drafts, is_connected=True))
    assert list(option_problems({"backend": "tensorrt"}, is_connected=False))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("value", [None, "fp8", [1]])
def test_what_must_be_an_object_is_said(name: str, value: object) -> None:
    [said] = option_problems({name: value}, is_connected=False)
    assert name in said and "must be a JSON object" in said


def test_options_come_from_the_text_or_from_a_file_beside_the_repository(tmp_path: Path) -> None:
    options = {"moe_config": {"backend": "CUTLASS"}}
    (tmp_path / "llm.json").write_text(json.dumps(options))
    repository = str(tmp_path / "model_repository")
    found: list[str] = []
    assert read_options("llm_options", "llm.json", repository, found) == options
    assert read_options("llm_options", json.dumps(options), repository, found) == options
    assert read_options("llm_options", "", repository, found) == {}
    assert not found
    assert read_options("llm_options", "missing.json", repository, found) == {}
    assert read_options("llm_options", "{", repository, found) == {}
    assert [line.split(":")[0] for line in found] == [
        "llm_options cannot be read",
        "llm_options is no JSON",
    ]
