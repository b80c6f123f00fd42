"""`mooncake init` lays down what serves, and never half of it or over something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner

from backends import cli
from backends.cluster.model_rendering import CONFIG, backend_named, parameters_of, templates_in
from backends.config_pbtxt import checkpoint_folder
from backends.model_settings.checkpoint_facts import facts_beside
from backends.model_settings.repository_check import check_repository
from backends.shipped import (
    DEFAULT_REPOSITORY,
    named_or_shipped,
    shipped_checkpoint,
    shipped_repository,
)
from backends.starter import command
from backends.starter.command import FolderInUse, lay_down


def test_every_shipped_model_is_there_with_a_version_and_the_checkpoint_beside_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "not there" / "my models"
    assert lay_down(folder) == sorted(templates_in(shipped_repository()))
    for model, text in templates_in(folder).items():
        assert (folder / model / "1").is_dir()
        shipped = (shipped_repository() / model / CONFIG).read_text()
        changed = parameters_of(text)
        assert backend_named(text) == backend_named(shipped)
        if "checkpoint" in changed:
            named = checkpoint_folder(changed.pop("checkpoint"), str(folder))
            assert named == (folder / "demo_checkpoint").resolve()
        assert changed == {
            name: value for name, value in parameters_of(shipped).items() if name != "checkpoint"
        }


def test_the_copy_of_the_checkpoint_has_all_that_is_read_and_no_code(tmp_path: Path) -> None:
    lay_down(tmp_path / "models")
    names = {path.name for path in (tmp_path / "models" / "demo_checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not {name for name in names if name.endswith((".py", ".csv", ".png"))}
    for name in names:
        copy = tmp_path / "models" / "demo_checkpoint" / name
        assert copy.read_bytes() == (shipped_checkpoint() / name).read_bytes()


def test_what_is_there_already_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("used", "file"):
        with pytest.raises(FolderInUse, match=r"name another folder"):
            lay_down(tmp_path / name)
    assert (tmp_path / "used" / "note").read_text() == (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "note", "used"]


def test_an_empty_folder_is_filled_and_one_that_is_named_from_inside_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    lay_down(tmp_path / "empty")
    assert (tmp_path / "empty" / "conductor" / CONFIG).exists()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    lay_down(Path("."))
    text = Path("prefill_0", CONFIG).read_text()
    assert parameters_of(text)["checkpoint"] == "models/demo_checkpoint"


def test_a_link_leads_to_where_the_checkpoint_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "real")
    lay_down(tmp_path / "link")
    text = (tmp_path / "link" / "decode_0" / CONFIG).read_text()
    named = checkpoint_folder(parameters_of(text)["checkpoint"], str(tmp_path / "link"))
    assert named.samefile(tmp_path / "link" / "demo_checkpoint")


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash", "ümläut", "a b", "line\nend"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    lay_down(tmp_path / name)
    text = (tmp_path / name / "conductor" / CONFIG).read_text()
    parsed = text_format.Parse(text, ModelConfig())
    named = checkpoint_folder(parsed.parameters["checkpoint"].string_value, str(tmp_path / name))
    assert named == tmp_path / name / "demo_checkpoint"


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.shutil, "copyfile", full)
    with pytest.raises(SystemExit, match=r"models: No space left on device$"):
        command.init(tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


def test_who_only_reads_a_repository_gets_the_shipped_one_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_or_shipped(DEFAULT_REPOSITORY) == shipped_repository()
    assert named_or_shipped(Path("other")) == Path("other")
    DEFAULT_REPOSITORY.mkdir()
    assert named_or_shipped(DEFAULT_REPOSITORY) == DEFAULT_REPOSITORY


def test_with_the_engine_vllm_workers_have_its_parameters_and_the_repository_has_no_mistake(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models"
    lay_down(folder, "vllm")
    texts = templates_in(folder)
    for model, text in texts.items():
        if backend_named(text) in ("prefill", "decode"):
            found = parameters_of(text)
            assert found["engine"] == "vllm", model
            assert {"engine_python", "gpus", "tp_size", "page_tokens"} <= found.keys()
    found = check_repository(texts, facts_beside(folder), ("s0", "s1"))
    assert found.mistakes == []


def test_init_takes_the_engines_that_need_no_gpu(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli.app, ["init", str(tmp_path / "a"), "--engine", "vllm"])
    assert made.exit_code == 0, made.output
    assert parameters_of((tmp_path / "a" / "decode_0" / CONFIG).read_text())["engine"] == "vllm"
    refused = CliRunner().invoke(cli.app, ["init", str(tmp_path / "b"), "--engine", "tensorrt_llm"])
    assert refused.exit_code == 2 and not (tmp_path / "b").exists()
