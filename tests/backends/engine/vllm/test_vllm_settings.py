"""Parameters and options of the engine vllm: what is passed on, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.engine.connected.settings import EngineSpec
from backends.engine.vllm.settings import (
    HARMLESS_OPTIONS,
    ONLY,
    SAID_ELSEWHERE,
    VllmConfig,
    environment,
    first_arguments,
    option_problems,
    options_that_reach_kv,
)

SPEC = EngineSpec(
    role="prefill",
    dtype="bfloat16",
    block_tokens=64,
    kv_pages=0,
    context_tokens_max=0,
    requests_max=512,
    chunk_tokens=512,
)


def test_every_mistake_is_reported_at_once() -> None:
    options = {"model": "x", "enable_prefix_caching": False, "pipeline_parallel_size": 2}
    said = "\n".join(option_problems(options))
    assert "vllm_options sets model; that is said by checkpoint" in said
    assert "enable_prefix_caching to False; only True" in said
    assert "pipeline_parallel_size to 2; only 1" in said


@pytest.mark.parametrize("name", SAID_ELSEWHERE)
def test_an_option_that_another_parameter_sets_is_refused(name: str) -> None:
    [said] = option_problems({name: 1})
    assert SAID_ELSEWHERE[name] in said


@pytest.mark.parametrize("name", ONLY)
def test_the_allowed_value_of_an_option_is_accepted(name: str) -> None:
    values, _ = ONLY[name]
    assert not list(option_problems({name: values[0]}))
    assert list(option_problems({name: "something else"}))


def test_the_fingerprint_has_unknown_options_and_not_harmless_ones() -> None:
    harmless: dict[str, Any] = dict.fromkeys(HARMLESS_OPTIONS, 1)
    assert options_that_reach_kv({**harmless, "hf_overrides": {"x": 1}}) == {
        "hf_overrides": {"x": 1}
    }


def test_options_are_passed_on_and_the_connector_recomputes_failed_loads() -> None:
    arguments = first_arguments(SPEC, VllmConfig(), Path("model"), {"quantization": "awq"})
    assert arguments["quantization"] == "awq"
    assert arguments["max_num_batched_tokens"] == 512
    assert arguments["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
    assert "max_model_len" not in arguments


def test_the_engine_has_as_many_threads_and_the_devices_that_its_worker_has() -> None:
    assert environment(3, "")["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(3, "")
    assert environment(3, "0,1")["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (VllmConfig(page_tokens=48), "page_tokens is 48"),
        (VllmConfig(tp_size=0), "tp_size is 0"),
        (VllmConfig(tp_size=2, gpus="0"), "gpus names 1 devices"),
        (VllmConfig(gpus="a"), "gpus is 'a'"),
    ],
)
def test_a_wrong_parameter_is_named(config: VllmConfig, said: str) -> None:
    [problem] = config.problems()
    assert said in problem
