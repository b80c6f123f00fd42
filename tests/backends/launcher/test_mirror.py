"""The mirror that Triton polls follows the operator's repository and can restart a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.launcher.repository import RepositoryMirror, WorkerFolders

OLD_S = 1_000_000_000.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    add_model(tmp_path / "source", "prefill_0")
    return tmp_path / "source"


def add_model(source: Path, name: str) -> Path:
    (source / name / "1").mkdir(parents=True)
    (source / name / "config.pbtxt").write_text('backend: "prefill"\n')
    return settle(source / name)


def settle(model: Path) -> Path:
    """As if the last change was long ago."""
    for path in (model / "config.pbtxt", model):
        os.utime(path, (OLD_S, OLD_S))
    return model


def mirrored(source: Path, tmp_path: Path) -> RepositoryMirror:
    mirror = RepositoryMirror(source, tmp_path / "mirror", lambda name: True)
    mirror.sync(is_first=True)
    return mirror


def config(mirror: RepositoryMirror, model: str) -> str:
    return (mirror.target / model / "config.pbtxt").read_text()


def test_models_appear_change_and_disappear_with_their_source(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    assert config(mirror, "prefill_0") == 'backend: "prefill"\n'
    assert (mirror.target / "prefill_0" / "1").is_dir()
    (source / "prefill_0" / "config.pbtxt").write_text('backend: "other"\n')
    settle(source / "prefill_0")
    add_model(source, "prefill_1")
    mirror.sync()
    assert config(mirror, "prefill_0") == 'backend: "other"\n'
    assert config(mirror, "prefill_1") == 'backend: "prefill"\n'
    for path in sorted((source / "prefill_1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (source / "prefill_1").rmdir()
    mirror.sync()
    assert [path.name for path in mirror.target.iterdir()] == ["prefill_0"]
    assert (source / "prefill_0" / "1").is_dir(), "the operator's files are only read"


def test_a_folder_that_is_still_being_written_waits(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    (source / "prefill_0" / "config.pbtxt").write_text("half of a conf")
    mirror.sync()
    assert config(mirror, "prefill_0") == 'backend: "prefill"\n'
    settle(source / "prefill_0")
    mirror.sync()
    assert config(mirror, "prefill_0") == "half of a conf"


def test_a_file_that_does_not_change_is_not_written_again(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    before = (mirror.target / "prefill_0" / "config.pbtxt").stat()
    mirror.sync()
    after = (mirror.target / "prefill_0" / "config.pbtxt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_reviving_a_model_changes_its_copy_each_time(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    texts = {config(mirror, "prefill_0")}
    for _ in range(2):
        mirror.revive("prefill_0")
        mirror.sync()
        texts.add(config(mirror, "prefill_0"))
    assert len(texts) == 3
    assert all(text.startswith('backend: "prefill"\n') for text in texts)


def test_a_repository_that_cannot_be_read_for_a_moment_is_harmless(
    source: Path, tmp_path: Path
) -> None:
    mirror = mirrored(source, tmp_path)
    (source / "empty").mkdir()
    mirror.sync()
    assert sorted(path.name for path in mirror.target.iterdir()) == ["prefill_0"]


def test_a_mirror_of_a_part_follows_what_belongs_to_it(source: Path, tmp_path: Path) -> None:
    add_model(source, "conductor")
    wanted = {"conductor"}
    mirror = RepositoryMirror(source, tmp_path / "mirror", lambda name: name in wanted)
    mirror.sync(is_first=True)
    assert mirror.models() == {"conductor"}
    wanted.add("prefill_0")
    mirror.sync()
    assert mirror.models() == {"conductor", "prefill_0"}
    wanted.clear()
    mirror.sync()
    assert mirror.models() == set()


def test_worker_folders_are_told_by_their_backend(source: Path) -> None:
    folders = WorkerFolders(source)
    config = add_model(source, "mine") / "config.pbtxt"
    config.write_text('# backend: "conductor"\nmax_batch_size: 1\n  backend : "decode" # yes\n')
    (add_model(source, "conductor") / "config.pbtxt").write_text('backend: "conductor"\n')
    (add_model(source, "ensemble") / "config.pbtxt").write_text('platform: "ensemble"\n')
    (source / "half_copied").mkdir()
    assert folders.names() == {"prefill_0", "mine"}
    config.write_text("half of a conf")
    assert folders.names() == {"prefill_0", "mine"}, "an unreadable edit makes it nothing else"
    config.write_text('backend: "conductor"\n')
    assert folders.names() == {"prefill_0"}


def test_a_comment_in_another_encoding_is_mirrored_byte_for_byte(
    source: Path, tmp_path: Path
) -> None:
    text = '# caf\xe9\nbackend: "prefill"\n'.encode("latin-1")
    (source / "prefill_0" / "config.pbtxt").write_bytes(text)
    mirror = mirrored(source, tmp_path)
    assert (mirror.target / "prefill_0" / "config.pbtxt").read_bytes() == text
    assert 'backend: "prefill"' in mirror.config("prefill_0")
