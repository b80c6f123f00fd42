"""Every mistake of a model repository is named at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from backends.model_settings.checkpoint_facts import facts_beside
from backends.model_settings.repository_check import CheckpointFacts, check_repository
from backends.model_settings.repository_files import read_texts, versionless
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.model_settings.repositories import (
    NODES,
    any_checkpoint,
    copied,
    shipped_texts,
    with_value,
)

WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")


def mistakes(texts: Mapping[str, str], nodes: tuple[str, ...] | None = NODES) -> list[str]:
    return check_repository(texts, any_checkpoint, nodes).mistakes


def with_values(**values: str) -> dict[str, str]:
    """The shipped files with `MODEL__PARAMETER=VALUE`."""
    texts = shipped_texts()
    for name, value in values.items():
        model, parameter = name.split("__")
        texts[model] = with_value(texts[model], parameter, value)
    return texts


def test_what_we_ship_is_right() -> None:
    found = check_repository(shipped_texts(), any_checkpoint, NODES)
    assert (found.mistakes, found.notes) == ([], [])


def test_mistakes_of_several_models_are_all_named() -> None:
    texts = with_values(
        prefill_0__threads="zero",
        prefill_1__store_node="s7",
        decode_0__dtype="bfloat16",
        decode_1__context_tokens_max="9000",
        conductor__policy="best",
        postprocessing__checkpoint="x",
    )
    texts["preprocessing"] += "max_batch: 1\n"
    texts["ensemble"] = texts["ensemble"].replace('model_name: "conductor"', 'model_name: "gone"')
    texts["decode_1"] = texts["decode_1"].replace("count: 1", "count: 2")
    texts["conductor"] = texts["conductor"].replace(
        '{ name: "cached_tokens", data_type: TYPE_INT32, dims: [ 1 ] },', ""
    )
    found = mistakes(texts)
    for wanted in (
        "prefill_0: threads is 'zero'; expected int",
        "prefill_1: there is no storage node 's7'",
        "all workers need the same dtype .*bfloat16 in decode_0",
        "decode_1: context_tokens_max is 9000, but the checkpoint allows 8192",
        "conductor: policy is 'best'",
        "all models need the same checkpoint .*x in postprocessing",
        "preprocessing/config.pbtxt is no model configuration: line",
        "ensemble: there is no model 'gone' for its step",
        "decode_1: instance_group count is 2; use 1",
        "conductor: output cached_tokens is missing",
    ):
        assert any(re.search(wanted, line) for line in found), (wanted, found)
    assert len(found) == 10, found


def test_both_roles_and_every_stage_are_missed_where_this_is_the_whole_host() -> None:
    texts = with_values()
    texts["prefill_1"] += (
        'parameters { key: "pipeline_group" value { string_value: "g" } }\n'
        'parameters { key: "pipeline_stages" value { string_value: "2" } }\n'
        'parameters { key: "pipeline_stage" value { string_value: "1" } }\n'
    )
    for model in ("decode_0", "decode_1"):
        del texts[model]
    found = mistakes(texts)
    assert found == [
        "no model has the backend 'decode': requests need a worker of both roles",
        "pipeline group g has no stage 0: it accepts no requests",
    ]
    assert mistakes(texts, nodes=None) == [], "of a host of a deployment others have the rest"


def test_stages_that_differ_or_are_one_stage_twice_are_named() -> None:
    texts = with_values(prefill_1__kv_bytes="128M")
    for model in ("prefill_0", "prefill_1"):
        texts[model] += (
            'parameters { key: "pipeline_group" value { string_value: "g" } }\n'
            'parameters { key: "pipeline_stages" value { string_value: "8" } }\n'
        )
    found = mistakes(texts, nodes=None)
    assert "prefill_1: is stage 0 of g, like prefill_0; renumber it" in found
    assert "the stages of g need the same kv_bytes: prefill_0 256M, prefill_1 128M" in found
    assert "prefill_0: pipeline_stages is 8; the checkpoint has 4 layers" in found


def test_a_digit_that_is_no_number_is_a_mistake_and_no_crash() -> None:
    found = mistakes(with_values(prefill_0__context_tokens_max="²"))
    assert "prefill_0: context_tokens_max is '²'; expected int" in "\n".join(found)


def test_an_old_name_is_a_note_and_a_name_that_is_not_the_folder_s_a_mistake() -> None:
    texts = shipped_texts()
    texts["conductor"] += 'parameters { key: "overtaker_share" value { string_value: "0.5" } }\n'
    texts["decode_0"] += 'name: "decode_9"\n'
    found = check_repository(texts, any_checkpoint, NODES)
    assert found.notes == [
        "conductor: overtaker_share is now called expected_arrivals_share; rename it"
    ]
    assert found.mistakes == [
        "decode_0: name is 'decode_9', but the folder is 'decode_0'; remove the name"
    ]


def test_models_of_the_operator_s_own_are_left_alone() -> None:
    texts = {**shipped_texts(), "adder": 'backend: "onnxruntime"\nmax_batch_size: 8\n'}
    assert mistakes(texts) == []


def test_a_checkpoint_is_read_as_far_as_no_engine_is_needed(tmp_path: Path) -> None:
    repository = copied(tmp_path)
    make_checkpoint("llama", tmp_path / "small")
    look_up = facts_beside(repository)
    assert look_up("demo").problems == () and look_up("demo").context_tokens_max == 8192
    small = look_up("small")  # it starts beside the repository
    assert small.context_tokens_max == 1024 and small.layers == 2
    assert len(small.problems) == 1 and "tokenizer.json is missing" in small.problems[0]
    assert "has no config.json" in look_up("nowhere").problems[0]
    (tmp_path / "small" / "config.json").write_text('{"model_type": "gpt2"}')
    found = facts_beside(repository)("small")
    assert found.torch_problems and "tokenizer.json" in found.problems[0]


def test_what_only_our_engine_cannot_read_is_no_mistake_of_another_one() -> None:
    def gpt2(checkpoint: str) -> CheckpointFacts:
        return CheckpointFacts(torch_problems=("model_type gpt2 is not supported",))

    texts = with_values()
    assert len(check_repository(texts, gpt2, NODES).mistakes) == 1
    for engine in ("tensorrt_llm", "vllm"):
        for model in WORKERS:
            texts[model] = with_value(texts[model], "engine", engine)
        assert check_repository(texts, gpt2, NODES).mistakes == []


def test_workers_on_one_engine_need_the_same_page_and_the_default_counts() -> None:
    texts = shipped_texts()
    for model in WORKERS:
        texts[model] = with_value(texts[model], "engine", "vllm")
    pages = 'parameters { key: "page_tokens" value { string_value: "%s" } }\n'
    texts["prefill_0"] += pages % 32
    assert mistakes(texts) == []
    texts["prefill_1"] += pages % 64
    (found,) = mistakes(texts)
    assert "all workers need the same page_tokens" in found and "64 in prefill_1" in found


def test_a_model_without_a_version_folder_is_named(tmp_path: Path) -> None:
    repository = copied(tmp_path)
    folder = repository / "decode_0" / "1"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    texts = read_texts(repository)
    assert versionless(repository, texts) == ["decode_0"]
    found = check_repository(texts, any_checkpoint, NODES, versionless(repository, texts))
    assert found.mistakes == ["decode_0: has no version folder; make one: mkdir decode_0/1"]


@pytest.mark.parametrize("nodes", [("s0", "s1", "s2"), None])
def test_more_storage_nodes_than_workers_is_no_mistake(nodes: tuple[str, ...] | None) -> None:
    assert mistakes(shipped_texts(), nodes) == []
