"""The mirror that Triton polls follows the operator's repository and can restart a model."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from backends.errors import ConfigError
from backends.launcher.repository import ModelLoad, RepositoryMirror, WorkerFolders
from backends.model_settings import repository_files
from backends.model_settings.running_system import LOADED, PENDING, REFUSED
from tests.backends.model_settings.repositories import copied

POLL_S = 0.3  # between two looks of the launcher at the repository


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def source(tmp_path: Path) -> Path:
    add_model(tmp_path / "source", "prefill_0")
    return tmp_path / "source"


def add_model(source: Path, name: str) -> Path:
    (source / name / "1").mkdir(parents=True)
    (source / name / "config.pbtxt").write_text('backend: "prefill"\n')
    return source / name


def mirrored(source: Path, tmp_path: Path) -> RepositoryMirror:
    mirror = RepositoryMirror(source, tmp_path / "mirror", lambda name: True, clock=Clock())
    mirror.sync(is_first=True)
    return mirror


def poll(mirror: RepositoryMirror, polls: int = 2) -> list[ModelLoad]:
    """The news of so many looks, the first of which sees an edit."""
    news = []
    for _ in range(polls):
        mirror._clock.now_s += POLL_S  # type: ignore[attr-defined]
        mirror.sync()
        news += mirror.take_refusals()
    return news


def config(mirror: RepositoryMirror, model: str) -> str:
    return (mirror.target / model / "config.pbtxt").read_text()


def test_models_appear_change_and_disappear_with_their_source(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    assert config(mirror, "prefill_0") == 'backend: "prefill"\n'
    assert (mirror.target / "prefill_0" / "1").is_dir()
    (source / "prefill_0" / "config.pbtxt").write_text('backend: "other"\n')
    add_model(source, "prefill_1")
    poll(mirror)
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
    for text in ("half", "half of a conf", 'backend: "prefill" max_batch_size: 1\n'):
        (source / "prefill_0" / "config.pbtxt").write_text(text)
        assert poll(mirror, 1) == []
        assert config(mirror, "prefill_0") == 'backend: "prefill"\n'
    assert poll(mirror, 1) == []
    assert config(mirror, "prefill_0") == text


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
    mirror = RepositoryMirror(
        source, tmp_path / "mirror", lambda name: name in wanted, clock=Clock()
    )
    mirror.sync(is_first=True)
    assert mirror.models() == {"conductor"}
    wanted.add("prefill_0")
    poll(mirror)
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
    config.write_text('backend: "conductor"\nhalf of a conf')
    assert folders.names() == {"prefill_0", "mine"}
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


FUTURE_S, PAST_S = 4_000_000_000.0, 1_000_000_000.0


@pytest.mark.parametrize("dated_s", [FUTURE_S, PAST_S, 0.0])
def test_an_edit_is_taken_whatever_its_date(source: Path, tmp_path: Path, dated_s: float) -> None:
    mirror = mirrored(source, tmp_path)
    path = source / "prefill_0" / "config.pbtxt"
    path.write_text('backend: "prefill" max_batch_size: 1\n')
    for each in (path, path.parent):
        os.utime(each, (dated_s, dated_s))
    assert poll(mirror) == []
    assert config(mirror, "prefill_0") == path.read_text()


GOOD = b'backend: "prefill"\nmax_batch_size: 1\n'


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b'backend: "prefill"\nparam', ("line 2, column 1", "correct that line")),
        (b'backend: "prefill"\ninput [ { name: "a', ("line 2", "correct that line")),
        (b"", ("is empty", "take one of the same kind")),
        (b"# only a comment\n\n", ("is empty", "take one of the same kind")),
        (b"\xef\xbb\xbf" + GOOD, ("line 1", "byte order mark", "without")),
        (GOOD.decode().encode("utf-16"), ("line 1", "UTF-16", "save it as UTF-8")),
        (b'# caf\xe9\nbackend: "pr\xe9fill"\n', ("line 2", "not UTF-8", "save the file as")),
        (b'backend: "prefill"\n\0\0\0', ("line 2, column 1", "correct that line")),
        (b"max_batch_size: 1\n", ('backend: "prefill"', "put it back")),
        (b"#" * (repository_files.CONFIG_BYTES_MAX + 1), ("bytes: at most",)),
    ],
)
def test_a_file_that_cannot_be_read_keeps_the_old_copy_and_is_reported_once(
    source: Path, tmp_path: Path, raw: bytes, parts: tuple[str, ...]
) -> None:
    mirror = mirrored(source, tmp_path)
    mirror.edits.loaded(ModelLoad("prefill_0"))
    path = source / "prefill_0" / "config.pbtxt"
    path.write_bytes(raw)
    (news,) = poll(mirror)
    assert news.model == "prefill_0" and not news.is_new
    for part in ("prefill_0/config.pbtxt", *parts):
        assert part in news.reason, (part, news.reason)
    assert poll(mirror) == []
    assert config(mirror, "prefill_0") == 'backend: "prefill"\n'
    state = mirror.edits.states()["prefill_0"]
    assert (state.outcome, state.reason) == (REFUSED, news.reason)
    if len(raw) <= repository_files.CONFIG_BYTES_MAX:
        assert state.digest == repository_files.digest(raw)
    path.write_text('backend: "prefill"\n')
    assert poll(mirror) == [ModelLoad("prefill_0")], "taken back: the copy never changed"
    assert mirror.edits.states()["prefill_0"].outcome == LOADED
    path.write_bytes(GOOD)
    assert poll(mirror) == []
    assert mirror.edits.states()["prefill_0"].outcome == PENDING


def test_a_file_that_is_gone_or_none_is_reported(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    path = source / "prefill_0" / "config.pbtxt"
    path.unlink()
    (news,) = poll(mirror)
    assert "is missing: restore it" in news.reason
    path.mkdir()
    (news,) = poll(mirror)
    assert "is a directory" in news.reason
    path.rmdir()
    os.mkfifo(path)
    (news,) = poll(mirror)
    assert "is a pipe or a device: replace it by a file" in news.reason
    path.unlink()
    path.symlink_to(path)
    (news,) = poll(mirror)
    assert "symbolic links" in news.reason
    path.unlink()
    path.write_bytes(GOOD)
    assert poll(mirror) == [] and config(mirror, "prefill_0") == GOOD.decode()
    source.rename(tmp_path / "elsewhere")
    (news,) = poll(mirror)
    assert f"{source}/prefill_0 cannot be read (No such file" in news.reason
    assert config(mirror, "prefill_0") == GOOD.decode()


def test_a_file_without_the_right_to_read_it_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirrored(source, tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (news,) = poll(mirror)
    assert "cannot be read: Permission denied; make it readable" in news.reason


def test_a_refused_edit_of_a_new_folder_is_no_old_model(source: Path, tmp_path: Path) -> None:
    mirror = mirrored(source, tmp_path)
    (source / "new").mkdir()
    assert poll(mirror) == [], "a folder that is being copied is no model yet"
    (source / "new" / "config.pbtxt").write_text("half of a conf")
    (news,) = poll(mirror)
    assert news.is_new and mirror.models() == {"prefill_0"}
    with pytest.raises(ConfigError, match="is a directory"):
        (source / "other" / "config.pbtxt").mkdir(parents=True)
        repository_files.read_texts(source)


def test_a_model_that_died_is_revived_while_its_newest_file_is_refused(
    source: Path, tmp_path: Path
) -> None:
    mirror = mirrored(source, tmp_path)
    mirror.edits.loaded(ModelLoad("prefill_0"))
    path = source / "prefill_0" / "config.pbtxt"
    path.write_text("half of a conf")
    poll(mirror)
    mirror.revive("prefill_0")
    poll(mirror)
    assert "_incarnation" in config(mirror, "prefill_0")
    mirror.edits.loaded(ModelLoad("prefill_0"))
    assert mirror.edits.states()["prefill_0"].outcome == REFUSED
    path.write_text('backend: "prefill"\n')
    assert poll(mirror) == [ModelLoad("prefill_0")]
    assert mirror.edits.states()["prefill_0"].outcome == LOADED


def broken_at_random(rng: random.Random, raw: bytes) -> bytes:
    edited = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(edited))
        match rng.randint(0, 4):
            case 0:
                del edited[at:]
            case 1:
                del edited[at : at + rng.randint(1, 60)]
            case 2:
                edited[at:at] = rng.randbytes(rng.randint(1, 4))
            case 3:
                edited[at:at] = rng.choice([b"\xef\xbb\xbf", b'"', b"}", b"#", b"\n", b"\0", b"x"])
            case _:
                edited[0:0] = rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b" ", b"{"])
    return bytes(edited)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["prefill_0", "conductor", "ensemble"])
def test_random_edits_are_taken_or_reported_before_the_second_next_poll(
    tmp_path: Path, model: str
) -> None:
    repository = copied(tmp_path)
    mirror = mirrored(repository, tmp_path)
    path = repository / model / "config.pbtxt"
    good, rng, outcomes = path.read_bytes(), random.Random(29), set()
    for number in range(150):
        before = path.read_bytes()
        raw = good if rng.random() < 0.2 else broken_at_random(rng, good)
        path.write_bytes(raw)
        dated_s = rng.choice([FUTURE_S, PAST_S, 0.0, float(number)])
        os.utime(path, (dated_s, dated_s))
        news = poll(mirror)
        is_taken = (mirror.target / model / "config.pbtxt").read_bytes() == raw
        is_reported = any(each.model == model and each.reason for each in news)
        assert is_taken or is_reported or raw == before, raw
        assert not (is_taken and is_reported), raw
        outcomes.add(is_taken)
    assert outcomes == {True, False}
