"""`mooncake init --from-llmapi`: each field of a model.yaml becomes a parameter or an option, or is
left out with a reason. A wrong file is refused with all of its mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from backends import cli
from backends.cluster.model_rendering import parameters_of, templates_in
from backends.engine.trtllm.settings import ONLY, SAID_ELSEWHERE, option_problems
from backends.model_settings.checkpoint_facts import facts_beside
from backends.model_settings.repository_check import check_repository
from backends.shipped import shipped_checkpoint
from backends.starter.llmapi import LlmapiRefused, checkpoint_of, convert, read_fields
from backends.starter.llmapi_fields import LEFT_OUT, is_known

UPSTREAM_LIKE = """\
model: some-lab/some-model
backend: "pytorch"
tensor_parallel_size: 2
pipeline_parallel_size: 1
triton_config:
  max_batch_size: 0
  decoupled: False
  cancellation_check_period_ms: 250
"""
Convert = Callable[..., dict[str, dict[str, str]]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped_checkpoint(), tmp_path / "checkpoint"))


@pytest.fixture
def init(tmp_path: Path, checkpoint: Path) -> Callable[..., Result]:
    def run(text: str, *more: str) -> Result:
        (tmp_path / "model.yaml").write_text(text)
        words = ["init", str(tmp_path / "models"), "--from-llmapi", str(tmp_path / "model.yaml")]
        return CliRunner().invoke(cli.app, [*words, *(more or ("--checkpoint", str(checkpoint)))])

    return run


@pytest.fixture
def made(tmp_path: Path, init: Callable[..., Result]) -> Convert:
    """Model -> its parameters, of a repository that `mooncake config check` accepts."""

    def run(text: str) -> dict[str, dict[str, str]]:
        done = init(text)
        assert done.exit_code == 0, done.output
        texts = templates_in(tmp_path / "models")
        found = check_repository(texts, facts_beside(tmp_path / "models"), ("s0", "s1"))
        assert found.mistakes == []
        parameters = {model: parameters_of(each) for model, each in texts.items()}
        for worker in ("prefill_0", "decode_0"):
            options = json.loads(parameters[worker].get("llm_options") or "{}")
            assert list(option_problems(options, True)) == []
        return parameters

    return run


def rows_of(tmp_path: Path, checkpoint: Path, text: str) -> dict[str, str]:
    (tmp_path / "rows.yaml").write_text(text)
    return dict(
        convert(tmp_path / "rows.yaml", read_fields(tmp_path / "rows.yaml"), checkpoint).rows
    )


def refusal(tmp_path: Path, checkpoint: Path, text: str) -> str:
    with pytest.raises(LlmapiRefused) as caught:
        rows_of(tmp_path, checkpoint, text)
    return str(caught.value)


def test_a_file_like_upstreams_gives_a_worker_of_each_role_with_gpus_of_its_own(
    made: Convert, checkpoint: Path
) -> None:
    found = made(UPSTREAM_LIKE)
    assert sorted(found) == [
        "conductor", "decode_0", "ensemble", "postprocessing", "prefill_0", "preprocessing",
    ]  # fmt: skip
    for worker, gpus in (("prefill_0", "0,1"), ("decode_0", "2,3")):
        assert found[worker]["engine"] == "tensorrt_llm"
        assert (found[worker]["tp_size"], found[worker]["gpus"]) == ("2", gpus)
    assert found["conductor"]["cancel_poll_s"] == "0.25"
    named = {each["checkpoint"] for each in found.values() if "checkpoint" in each}
    assert named == {str(checkpoint)}


def test_limits_of_a_step_go_to_the_role_that_has_them(made: Convert) -> None:
    found = made("max_batch_size: 96\nmax_num_tokens: 1160\nmax_seq_len: 4096\n")
    assert found["decode_0"]["slots"] == "96" and "slots" not in found["prefill_0"]
    assert found["prefill_0"]["chunk_tokens"] == "1024"  # whole blocks of 256 tokens
    assert found["decode_0"]["context_tokens_max"] == "4096"


def test_keys_of_kv_cache_config_become_parameters_or_stay_in_their_object(made: Convert) -> None:
    found = made(
        "kv_cache_config:\n  dtype: fp8\n  tokens_per_block: 64\n  free_gpu_memory_fraction: 0.5\n"
        "  event_buffer_max_size: 9\n  host_cache_size: 1000\n"
    )["prefill_0"]
    assert (found["kv_dtype"], found["page_tokens"]) == ("fp8", "64")
    assert found["gpu_memory_fraction"] == "0.5"
    assert json.loads(found["llm_options"]) == {"kv_cache_config": {"event_buffer_max_size": 9}}


def test_a_limit_in_tokens_becomes_kv_bytes_by_the_checkpoints_shape(made: Convert) -> None:
    found = made("kv_cache_config: {max_tokens: 1000}\ndtype: bfloat16\n")
    shape = json.loads((shipped_checkpoint() / "config.json").read_text())
    token_bytes = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    assert int(found["decode_0"]["kv_bytes"]) == 1024 * token_bytes  # in whole blocks


def test_options_of_decode_steps_do_not_reach_prefill(made: Convert) -> None:
    found = made("cuda_graph_config: null\nmoe_config: {backend: TRTLLM}\n")
    moe = {"moe_config": {"backend": "TRTLLM"}}
    assert json.loads(found["prefill_0"]["llm_options"]) == moe
    assert json.loads(found["decode_0"]["llm_options"]) == {**moe, "cuda_graph_config": None}


def test_what_cannot_work_with_the_store_is_left_out_with_the_reason(
    tmp_path: Path, checkpoint: Path
) -> None:
    rows = rows_of(
        tmp_path,
        checkpoint,
        "pipeline_parallel_size: 2\nspeculative_config: {decoding_type: MTP}\n"
        "kv_cache_config: {enable_block_reuse: false, dtype: nvfp4}\nenable_lora: true\n"
        "triton_config: {multimodal: true}\n",
    )
    assert rows["pipeline_parallel_size: 2"].startswith("left out, here 1: the connector")
    assert "draft tokens" in rows['speculative_config: {"decoding_type": "MTP"}']
    assert rows["kv_cache_config.enable_block_reuse: false"].startswith("left out, here true")
    assert "NVFP4" in rows["kv_cache_config.dtype: nvfp4"]
    assert rows["enable_lora: true"] == "left out: LoRA is not supported"
    assert "images" in rows["triton_config.multimodal: true"]


def test_every_field_that_workers_refuse_in_llm_options_is_handled(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Any value of such a field becomes a parameter or is left out; none reaches `llm_options`."""
    for name in (*SAID_ELSEWHERE, *ONLY):
        owner, _, key = name.partition(".")
        path = tmp_path / "one.yaml"
        path.write_text(f"{owner}: {{{key}: 2}}\n" if key else f"{owner}: 2\n")
        try:
            found = convert(path, read_fields(path), checkpoint)
        except LlmapiRefused as refused:
            assert "line 1" in str(refused)  # 2 is no dtype
        else:
            assert "llm_options" not in found.of_role["decode"], name


def test_fields_that_are_left_out_exist_upstream() -> None:
    assert [name for name in (*LEFT_OUT, *SAID_ELSEWHERE, *ONLY) if not is_known(name)] == []


def test_unknown_fields_are_reported_all_at_once_with_their_lines(
    tmp_path: Path, checkpoint: Path
) -> None:
    said = refusal(
        tmp_path, checkpoint, "tensor_paralel_size: 2\nkv_cache_config:\n  dtipe: fp8\nqqq: 1\n"
    )
    assert "line 1: tensor_paralel_size is no known field" in said
    assert "did you mean tensor_parallel_size?" in said
    assert "line 3: kv_cache_config.dtipe is no known field" in said
    assert "line 4: qqq is no known field of TensorRT-LLM; remove it" in said


def test_values_of_a_wrong_type_are_reported_all_at_once(tmp_path: Path, checkpoint: Path) -> None:
    said = refusal(
        tmp_path,
        checkpoint,
        "tensor_parallel_size: two\nmax_batch_size: 0\ndtype: int8\nkv_cache_config: 7\n",
    )
    assert 'line 1: tensor_parallel_size is "two"; expected a whole number, 1 or more' in said
    assert "line 2: max_batch_size is 0" in said
    assert 'line 3: dtype is "int8"; expected auto, float32' in said
    assert "line 4: kv_cache_config is 7; expected an object with keys" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [a\nb: 1\n", "line 2: this is no YAML"),
        ("- model\n", "line 1: expected fields"),
        ("", "line 1: expected fields"),
        ("model: a\nmodel: b\n", "line 2: model is defined twice"),
        ("model: !!python/name:os.system\n", "line 1: the tag"),
        ("a: &a [*a]\n", "alias"),
        ("max_seq_len: 2026-99-99\n", "cannot be read"),
    ],
)
def test_yaml_that_cannot_be_read_is_refused(
    tmp_path: Path, checkpoint: Path, text: str, said: str
) -> None:
    assert said in refusal(tmp_path, checkpoint, text)


def test_a_value_that_a_model_would_refuse_leaves_no_folder(
    tmp_path: Path, init: Callable[..., Result]
) -> None:
    done = init("kv_cache_config: {free_gpu_memory_fraction: 1.5, tokens_per_block: 48}\n")
    assert done.exit_code == 1
    assert "gpu_memory_fraction is 1.5" in done.output and "page_tokens is 48" in done.output
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_no_folder_needs_the_checkpoint(
    tmp_path: Path, checkpoint: Path, init: Callable[..., Result]
) -> None:
    done = init(UPSTREAM_LIKE, "--engine", "tensorrt_llm")
    assert done.exit_code == 1 and "add --checkpoint DIR" in done.output
    done = init("max_seq_len: 100\n", "--engine", "tensorrt_llm")
    assert done.exit_code == 1 and "names no model" in done.output
    (tmp_path / "local.yaml").write_text(f"model: {checkpoint}\n")
    named = read_fields(tmp_path / "local.yaml")
    assert checkpoint_of(tmp_path / "local.yaml", named, None) == checkpoint.resolve()


def test_options_that_do_not_fit_together_are_refused(
    tmp_path: Path, init: Callable[..., Result]
) -> None:
    assert init(UPSTREAM_LIKE, "--engine", "vllm").exit_code == 2
    missing = ["init", str(tmp_path / "b"), "--from-llmapi", str(tmp_path / "none.yaml")]
    done = CliRunner().invoke(cli.app, missing)
    assert done.exit_code == 1 and "No such file" in done.output
    alone = CliRunner().invoke(cli.app, ["init", str(tmp_path / "c"), "--checkpoint", "x"])
    assert alone.exit_code == 2 and not (tmp_path / "c").exists()


def test_the_table_has_a_line_for_each_field(init: Callable[..., Result]) -> None:
    done = init(UPSTREAM_LIKE)
    lines = done.output.splitlines()
    assert lines[0].split() == ["model.yaml", "here"]
    fields = [line.partition(":")[0] for line in lines[1:] if line and not line.startswith("-")]
    assert fields[:7] == [
        "model", "backend", "tensor_parallel_size", "pipeline_parallel_size",
        "triton_config.max_batch_size", "triton_config.decoupled",
        "triton_config.cancellation_check_period_ms",
    ]  # fmt: skip
