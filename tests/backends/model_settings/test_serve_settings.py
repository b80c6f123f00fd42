"""What options of `mooncake serve` make of a model repository, and which workers there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.errors import ConfigError
from backends.launcher.repository import EditStates, ModelLoad, RepositoryMirror, WorkerFolders
from backends.model_settings.model_file import read_model_file
from backends.model_settings.repository_check import check_repository
from backends.model_settings.repository_files import read_texts
from backends.model_settings.running_system import LOADED, PENDING, REFUSED
from backends.model_settings.serve_settings import ServeSettings, made_problems, served_workers
from tests.backends.launcher.test_mirror import Clock, poll
from tests.backends.model_settings.repositories import NODES, any_checkpoint, copied

FOLDERS = {
    "prefill_0": "prefill",
    "prefill_2": "prefill",
    "prefill_10": "prefill",
    "decode_0": "decode",
}


def folders(repository: Path, settings: ServeSettings) -> WorkerFolders:
    return WorkerFolders(repository, settings, NODES)


def mirrored(repository: Path, target: Path, settings: ServeSettings) -> RepositoryMirror:
    mirror = RepositoryMirror(
        repository, target, lambda name: True, folders(repository, settings), Clock()
    )
    mirror.sync(is_first=True)
    return mirror


def parameters(mirror: RepositoryMirror, model: str) -> dict[str, str]:
    return dict(read_model_file(model, mirror.config(model)).parameters)


def test_fewer_workers_are_the_first_ones_by_number_and_more_get_free_names() -> None:
    served = served_workers(ServeSettings(workers={"prefill": 2}), FOLDERS)
    assert served.left_out == {"prefill_10"} and served.made == {}
    served = served_workers(ServeSettings(workers={"prefill": 5, "decode": 2}), FOLDERS)
    assert served.left_out == frozenset()
    assert served.made == {
        "prefill_1": ("prefill", 3),
        "prefill_3": ("prefill", 4),
        "decode_1": ("decode", 1),
    }
    assert served.source_of("prefill_3", FOLDERS) == "prefill_0"


def test_a_role_without_any_worker_has_none_to_make_others_from() -> None:
    with pytest.raises(ConfigError, match="no decode worker; add a folder"):
        served_workers(ServeSettings(workers={"decode": 1}), {"prefill_0": "prefill"})


def test_options_stand_above_every_file_and_the_rest_is_as_the_files_say(tmp_path: Path) -> None:
    repository = copied(tmp_path)
    before = read_texts(repository)
    settings = ServeSettings("/a/llama", "bfloat16", "", {"prefill": 4, "decode": 1})
    mirror = mirrored(repository, tmp_path / "mirror", settings)
    workers = {"decode_0", *(f"prefill_{number}" for number in range(4))}
    public = {"conductor", "ensemble", "preprocessing", "postprocessing"}
    assert mirror.models() == workers | public
    for model in workers:
        found = parameters(mirror, model)
        assert (found["checkpoint"], found["dtype"], found["device"]) == (
            "/a/llama",
            "bfloat16",
            "cpu",
        )
        assert (mirror.target / model / "1").is_dir()
    for model in public - {"ensemble"}:
        assert parameters(mirror, model)["checkpoint"] == "/a/llama"
    nodes = [parameters(mirror, f"prefill_{number}")["store_node"] for number in range(4)]
    assert nodes == ["s0", "s1", "s0", "s1"]
    rendered = {model: mirror.config(model) for model in mirror.models()}
    assert check_repository(rendered, any_checkpoint, NODES).mistakes == []
    assert read_texts(repository) == before, "the repository is only read"


def test_the_engine_of_the_options_is_that_of_every_worker_and_of_no_other_model(
    tmp_path: Path,
) -> None:
    settings = ServeSettings(dtype="float16", workers={"prefill": 3}, engine="vllm")
    mirror = mirrored(copied(tmp_path), tmp_path / "mirror", settings)
    for model in mirror.models():
        is_worker = model.startswith(("prefill", "decode"))
        assert (parameters(mirror, model).get("engine") == "vllm") == is_worker, model
    rendered = {model: mirror.config(model) for model in mirror.models()}
    assert check_repository(rendered, any_checkpoint, NODES).mistakes == []


def test_an_edit_reaches_made_workers_and_a_folder_of_their_own_stands_above(
    tmp_path: Path,
) -> None:
    repository = copied(tmp_path)
    settings = ServeSettings(dtype="bfloat16", workers={"prefill": 3})
    mirror = mirrored(repository, tmp_path / "mirror", settings)
    path = repository / "prefill_0" / "config.pbtxt"
    threads = 'key: "threads" value { string_value: "%s" }'
    path.write_text(path.read_text().replace(threads % 1, threads % 2))
    poll(mirror)
    assert parameters(mirror, "prefill_2")["threads"] == "2"
    own = repository / "prefill_2"
    (own / "1").mkdir(parents=True)
    (own / "config.pbtxt").write_text(path.read_text().replace(threads % 2, threads % 3))
    assert mirror._workers is not None
    assert "prefill_2" in mirror._workers.names() and mirror._workers.made == {}
    poll(mirror)
    found = parameters(mirror, "prefill_2")
    assert (found["threads"], found["dtype"]) == ("3", "bfloat16")


def test_made_workers_follow_the_first_folder_that_is_left_and_go_with_the_last(
    tmp_path: Path,
) -> None:
    repository = copied(tmp_path)
    found = folders(repository, ServeSettings(workers={"prefill": 3}))
    assert found.made == {"prefill_2": "prefill_0"}
    (repository / "prefill_0").rename(tmp_path / "away")
    assert found.names() == {"prefill_1", "prefill_2", "decode_0", "decode_1"}
    assert found.made == {"prefill_2": "prefill_1"}
    (repository / "prefill_1").rename(tmp_path / "away_too")
    assert found.names() == {"decode_0", "decode_1"}


def test_stages_and_workers_with_gpus_of_their_own_are_not_made_of_others() -> None:
    text = 'backend: "prefill"\nparameters { key: "%s" value { string_value: "%s" } }\n'
    vllm = text % ("engine", "vllm")
    texts = {
        "c": text % ("pipeline_group", "g"),
        "d": text % ("engine", "tensorrt_llm"),
        "e": vllm + 'parameters { key: "device" value { string_value: "cuda" } }\n',
        "f": vllm,
    }
    found = made_problems(texts, dict.fromkeys(texts, "a"))
    assert [line.partition(":")[0] for line in found] == ["c", "d", "e"]
    assert "a stage of a pipeline group" in found[0]
    assert all("GPUs of its own" in line for line in found[1:])


def test_an_edit_is_pending_until_triton_says_what_became_of_it() -> None:
    edits = EditStates()
    edits.mirrored("m", "1", "a: 1 # one")
    assert edits.states()["m"].outcome == PENDING
    edits.loaded(ModelLoad("m"))
    edits.loaded(ModelLoad("another"))
    assert edits.states()["m"].outcome == LOADED
    edits.mirrored("m", "2", "a: 1  # a comment is no change for Triton\n")
    assert (edits.states()["m"].digest, edits.states()["m"].outcome) == ("2", LOADED)
    edits.mirrored("m", "3", 'a: "2 # no comment"')
    assert edits.states()["m"].outcome == PENDING
    edits.loaded(ModelLoad("m", "why"))
    assert (edits.states()["m"].outcome, edits.states()["m"].reason) == (REFUSED, "why")
    edits.mirrored("m", "4", 'a: "2 # another"')
    assert edits.states()["m"].outcome == PENDING
    edits.mirrored("m", "5", "a: 1")
    assert edits.states()["m"].outcome == LOADED, "Triton loads nothing when it is taken back"
    edits.removed("m")
    assert edits.states() == {} and edits.digest_of("m") == ""
