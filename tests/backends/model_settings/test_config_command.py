"""`mooncake config` as somebody calls it, without a running system."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.model_settings import command
from backends.model_settings.command import app
from backends.model_settings.edit import plan_edit
from backends.model_settings.model_file import read_model_file
from backends.model_settings.repository_files import digest, read_texts, sole_setter, write_texts
from backends.model_settings.running_system import (
    LOADED,
    PENDING,
    REFUSED,
    EditState,
    RunningSettings,
)
from tests.backends.model_settings.repositories import any_checkpoint, copied

NOBODY = ["--metrics-url", "http://127.0.0.1:9/metrics"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copied(tmp_path)


def run(repository: Path, verb: str, *arguments: str) -> tuple[int, str]:
    more = [] if verb == "check" else NOBODY
    result = CliRunner().invoke(
        app, [verb, *arguments, "--model-repository", str(repository), *more]
    )
    return result.exit_code, " ".join(result.output.split())


def test_a_set_is_written_keeps_the_file_s_rights_and_a_link_and_counts_from_the_next_start(
    repository: Path,
) -> None:
    link, path = repository / "prefill_0" / "config.pbtxt", repository / "kept"
    link.rename(path)
    link.symlink_to(path)
    path.chmod(0o640)
    before = path.read_text()
    status, said = run(repository, "set", "prefill_0.threads=2")
    assert status == 0 and "the next start uses them" in said
    line = 'parameters { key: "threads" value { string_value: "%s" } }'
    assert path.read_text() == before.replace(line % 1, line % 2) != before
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in repository.iterdir() if each.name.startswith(".")] == []


def test_a_check_ends_with_1_and_has_its_mistakes_as_json(repository: Path) -> None:
    assert run(repository, "check")[0] == 0
    path = repository / "decode_0" / "config.pbtxt"
    path.write_text(path.read_text().replace('"torch"', '"tensors"'))
    status, said = run(repository, "check", "--json")
    assert status == 1
    assert any("engine is 'tensors'" in line for line in json.loads(said)["mistakes"])
    assert run(repository, "check", "--nodes", "s0")[0] == 1


def test_a_diff_compares_with_defaults_and_with_what_we_ship(repository: Path) -> None:
    assert (
        run(
            repository,
            "set",
            "prefill_1.threads=4",
            "prefill_1.kv_bytes=64M",
            "conductor.slow_start_s=30.00",
        )[0]
        == 0
    )
    path = repository / "decode_0" / "config.pbtxt"
    path.write_text(path.read_text().replace('"kv_bytes"', '"kv_bytez"'))
    status, said = run(repository, "diff")
    assert status == 0
    for part in (
        "prefill_1.threads = '4' (default '1', shipped '1')",
        "prefill_1.store_node = 's1' (default 's0', as shipped)",
        "decode_0.kv_bytez = '256M' (no such parameter is known)",
        "prefill_1.kv_bytes = '64M' (default '268435456', shipped '256M')",
    ):
        assert part in said, (part, said)
    assert "slow_start_s" not in said, "30.00 is 30.0"


def test_a_file_that_cannot_be_written_leaves_the_others_as_they_were(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_texts(repository)
    replace = os.replace

    def refused(partial: str, path: Path) -> None:
        if path.parent.name == "prefill_1":
            raise PermissionError(1, "Operation not permitted")
        replace(partial, path)

    monkeypatch.setattr(os, "replace", refused)
    status, said = run(repository, "set", "prefill_*.threads=2", "decode_0.slots=8")
    assert status == 1 and "prefill_1/config.pbtxt cannot be written" in said
    assert said.endswith("nothing was changed") and read_texts(repository) == before


def test_one_set_waits_for_the_other_and_both_are_written(repository: Path) -> None:
    waits = threading.Event()
    with sole_setter(repository, lambda said: None):
        second = threading.Thread(target=write_second, args=(repository, waits))
        second.start()
        assert waits.wait(60.0), "it says that it waits"
        assert run_unlocked(repository, "prefill_0.threads=2")
    second.join(60.0)
    texts = read_texts(repository)
    assert read_model_file("prefill_0", texts["prefill_0"]).parameters["threads"] == "2"
    assert read_model_file("prefill_0", texts["prefill_0"]).parameters["kv_bytes"] == "64M"


def write_second(repository: Path, waits: threading.Event) -> None:
    with sole_setter(repository, lambda said: waits.set()):
        run_unlocked(repository, "prefill_0.kv_bytes=64M")


def run_unlocked(repository: Path, assignment: str) -> bool:
    before = read_texts(repository)
    edit = plan_edit(before, [assignment], any_checkpoint)
    write_texts(repository, edit.texts, before)
    return bool(edit.changes)


def system_that_says(
    repository: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, on_ask: str = ""
) -> None:
    """Of every file as it is on disk; `on_ask`: a text that somebody writes into prefill_0 as soon
    as the set has written its own."""
    path = repository / "prefill_0" / "config.pbtxt"
    before = path.read_bytes()

    def ask() -> RunningSettings:
        if on_ask and path.read_bytes() != before:
            path.write_text(on_ask)
        said = (
            {}
            if on_ask
            else {
                each.parent.name: EditState(
                    digest(each.read_bytes()), outcome, "why" if outcome == REFUSED else ""
                )
                for each in repository.glob("*/config.pbtxt")
            }
        )
        return RunningSettings(str(repository), {}, {}, ["decode_1"], ["s0", "s1"], models=said)

    monkeypatch.setattr(command, "ask_at", lambda url: ask)


def test_a_set_that_is_taken_over_is_said_for_each_model(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_that_says(repository, monkeypatch, LOADED)
    status, said = run(repository, "set", "prefill_0.threads=2", "decode_1.slots=8")
    assert status == 0 and "prefill_0 serves with it" in said
    assert "decode_1 is written, but not served" in said and "decode_1 serves" not in said


def test_who_names_no_repository_means_the_running_system_s(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_that_says(repository, monkeypatch, LOADED)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = CliRunner().invoke(app, ["set", "prefill_0.threads=2"])
    assert result.exit_code == 0 and "prefill_0 serves with it" in result.output
    assert "threads = '2'" in CliRunner().invoke(app, ["diff"]).output
    monkeypatch.setattr(command, "ask_at", lambda url: lambda: None)
    alone = CliRunner().invoke(app, ["diff"])
    assert alone.exit_code == 1 and "there is no model repository" in alone.output


def test_a_set_that_is_refused_is_taken_back(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_texts(repository)
    system_that_says(repository, monkeypatch, REFUSED)
    status, said = run(repository, "set", "prefill_0.threads=2")
    assert status == 1 and "prefill_0 refused it: why" in said
    assert read_texts(repository) == before


def test_an_edit_by_somebody_else_meanwhile_is_said_and_kept(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = 'backend: "prefill"\n'
    system_that_says(repository, monkeypatch, PENDING, on_ask=theirs)
    status, said = run(repository, "set", "prefill_0.threads=2")
    assert status == 1 and "prefill_0: replaced by another edit" in said
    assert read_texts(repository)["prefill_0"] == theirs


def test_an_emptied_file_is_a_mistake_and_a_half_copied_folder_a_note(repository: Path) -> None:
    (repository / "decode_0" / "config.pbtxt").write_text("")
    (repository / "decode_2").mkdir()
    status, said = run(repository, "check")
    assert status == 1 and "decode_0: its config.pbtxt is empty" in said
    assert "note: decode_2 has no config.pbtxt: it is not served" in said


def test_a_repository_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    for verb in (["check"], ["diff"], ["set", "a.b=c"]):
        status, said = run(tmp_path / "nowhere", *verb)
        assert status == 1 and "there is no model repository at" in said
