"""What `mooncake config set` writes, and everything that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from backends.model_settings import running_system
from backends.model_settings.edit import EditRefused, SettingsEdit, plan_edit
from backends.model_settings.model_file import read_model_file
from backends.model_settings.running_system import (
    LOADED,
    PENDING,
    REFUSED,
    REPLACED,
    EditState,
    RunningSettings,
    outcomes,
    wait_for,
)
from tests.backends.model_settings.repositories import any_checkpoint, shipped_texts, with_value

RUNNING = RunningSettings(
    repository="anywhere", options={}, made={}, left_out=[], nodes=["s0", "s1"]
)


def planned(assignments: Sequence[str], running: RunningSettings | None = None) -> SettingsEdit:
    return plan_edit(shipped_texts(), assignments, any_checkpoint, running)


def problems(*assignments: str, running: RunningSettings | None = None) -> list[str]:
    with pytest.raises(EditRefused) as refused:
        planned(assignments, running)
    return refused.value.problems


def test_a_pattern_means_every_model_that_has_the_parameter() -> None:
    edit = planned(["*.checkpoint=llama", "prefill_*.chunk_tokens=128"])
    assert len([each for each in edit.changes if each.parameter == "checkpoint"]) == 7
    assert set(edit.texts) == shipped_texts().keys() - {"ensemble"}
    read = read_model_file("prefill_1", edit.texts["prefill_1"])
    assert (read.parameters["checkpoint"], read.parameters["chunk_tokens"]) == ("llama", "128")


def test_a_pattern_leaves_out_models_that_would_have_the_parameter_in_another_role() -> None:
    edit = planned(["*.chunk_tokens=256", "*.slots=8"])
    meant = {(each.model, each.parameter) for each in edit.changes}
    assert meant == {
        ("prefill_0", "chunk_tokens"),
        ("prefill_1", "chunk_tokens"),
        ("decode_0", "slots"),
        ("decode_1", "slots"),
    }


@pytest.mark.parametrize("is_role_last", [False, True])
def test_a_pattern_means_models_that_have_the_parameter_by_the_same_edit(
    is_role_last: bool,
) -> None:
    assignments = ["decode_*.roles=both", "*.chunk_tokens=256"]
    edit = planned(assignments[::-1] if is_role_last else assignments)
    chunked = [each.model for each in edit.changes if each.parameter == "chunk_tokens"]
    assert sorted(chunked) == ["decode_0", "decode_1", "prefill_0", "prefill_1"]
    [problem, *_] = problems("decode_*.chunk_tokens=256")
    assert "no model that matches 'decode_*' has a parameter 'chunk_tokens'" in problem


@pytest.mark.parametrize(
    ("engine", "parameter"), [("vllm", "vllm_options"), ("tensorrt_llm", "llm_options")]
)
def test_parameters_of_an_engine_are_set_together_with_it(engine: str, parameter: str) -> None:
    edit = planned([f"*.{parameter}=fast.json", "*.page_tokens=64", f"*.engine={engine}"])
    assert set(edit.texts) == {"prefill_0", "prefill_1", "decode_0", "decode_1"}
    for model, text in edit.texts.items():
        found = read_model_file(model, text).parameters
        assert (found["engine"], found["page_tokens"]) == (engine, "64")
        assert found[parameter] == "fast.json"
    assert any("has a parameter 'page_tokens'" in line for line in problems("*.page_tokens=64"))


def test_what_is_so_already_is_no_change() -> None:
    assert planned(["conductor.policy=adaptive"]) == SettingsEdit((), {})
    # A default that the file does not say is written all the same when somebody asks for it.
    edit = planned(["conductor.slow_start_s=30.0"])
    assert str(edit.changes[0]) == "conductor.slow_start_s: '30.0' (the default) -> '30.0'"


def test_every_mistake_of_every_assignment_is_named() -> None:
    found = problems(
        "conductor.polcy=x",
        "nobody.threads=1",
        "threads=1",
        "prefill_0.threads",
        "ensemble.a=1",
        "*.nothing=1",
        "prefill_0.threads=0",
        "prefill_0.slots=3",
        "prefill_0.kv_bytes=8",
        "prefill_0.kv_bytes=9",
    )
    for wanted in (
        "conductor has no parameter 'polcy'; did you mean policy",
        "there is no model 'nobody'",
        "'threads=1': write MODEL.PARAMETER=VALUE",
        "'prefill_0.threads': write",
        "ensemble has no known parameters",
        "no model that matches '*' has a parameter 'nothing'",
        "prefill_0: threads is 0",
        "prefill_0: unknown parameter 'slots'",
        "prefill_0.kv_bytes is set twice: '8' and '9'",
    ):
        assert any(wanted in line for line in found), (wanted, found)


def test_a_parameter_and_the_role_that_it_needs_are_set_together() -> None:
    edit = planned(["prefill_0.roles=both", "prefill_0.slots=8"])
    assert [each.parameter for each in edit.changes] == ["roles", "slots"]


@pytest.mark.parametrize("assignment", ["prefill_0.block_tokens=32", "conductor.checkpoint=x"])
def test_what_all_must_agree_on_is_refused_for_one_alone(assignment: str) -> None:
    assert any("need the same" in line for line in problems(assignment))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameter", ["checkpoint=x", "dtype=bfloat16", "kv_dtype=fp8", "block_tokens=128"]
)
def test_what_makes_kv_unreadable_is_refused_while_it_serves_and_not_before(parameter: str) -> None:
    assert planned([f"*.{parameter}"]).texts
    found = problems(f"*.{parameter}", running=RUNNING)
    assert len(found) >= 4 and all("cannot be changed while it serves" in line for line in found)


def test_what_an_option_says_is_refused_while_it_serves() -> None:
    running = replace(RUNNING, options={"device": "cpu"}, made={"prefill_2": "prefill_0"})
    found = problems("*.device=cuda", "prefill_2.threads=2", running=running)
    assert sum("--device of the running" in line for line in found) == 4
    assert sum("is made from prefill_0" in line for line in found) == 1


def test_a_node_that_the_running_system_does_not_have_is_refused() -> None:
    assert planned(["prefill_0.store_node=s9"]).texts, "nobody knows the nodes of the next start"
    [found] = problems("prefill_0.store_node=s9", running=RUNNING)
    assert "no storage node 's9' (--nodes: s0, s1)" in found


def test_mistakes_that_were_there_before_do_not_stop_others_from_being_mended() -> None:
    texts = shipped_texts()
    texts["prefill_0"] = with_value(texts["prefill_0"], "threads", "zero")
    texts["decode_0"] = with_value(texts["decode_0"], "slots", "none")
    edit = plan_edit(texts, ["prefill_0.threads=1"], any_checkpoint)
    assert list(edit.texts) == ["prefill_0"]
    with pytest.raises(EditRefused, match="threads is 'zero'"):
        plan_edit(texts, ["prefill_0.kv_bytes=64M"], any_checkpoint)


def test_only_the_state_of_the_file_that_was_written_counts() -> None:
    running = replace(
        RUNNING,
        models={
            "a": EditState("old", LOADED),
            "b": EditState("b", REFUSED, "why"),
            "c": EditState("c", PENDING),
            "d": EditState("d", LOADED),
        },
    )
    wanted = {"a": "new", "b": "b", "c": "c", "d": "d", "e": "e"}
    assert outcomes(wanted, running) == {
        "a": EditState("new", PENDING),
        "b": EditState("b", REFUSED, "why"),
        "c": EditState("c", PENDING),
        "d": EditState("d", LOADED),
        "e": EditState("e", PENDING),
    }
    assert {each.outcome for each in outcomes(wanted, None).values()} == {PENDING}


def test_waiting_ends_with_the_answer_with_the_time_or_with_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(running_system.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(running_system.time, "sleep", lambda s: now_s.__setitem__(0, now_s[0] + s))

    def state(outcome: str) -> dict[str, EditState]:
        return {"a": EditState("new", outcome)}

    def said(outcome: str) -> RunningSettings:
        return replace(RUNNING, models=state(outcome))

    answers = iter([None, said(PENDING), said(PENDING), said(LOADED)])
    assert wait_for({"a": "new"}, lambda: next(answers), 60.0) == state(LOADED)
    assert wait_for({"a": "new"}, lambda: said(PENDING), 60.0) == state(PENDING)
    assert 60.0 < now_s[0] < 62.0
    assert wait_for({"a": "new"}, lambda: None, 1e9) == state(PENDING)
    assert now_s[0] < 75.0, "a system that has ended is not waited for"
    found = wait_for({"a": "older"}, lambda: said(LOADED), 1e9, lambda model: False)
    assert found == {"a": EditState("older", REPLACED)} and now_s[0] < 75.0
