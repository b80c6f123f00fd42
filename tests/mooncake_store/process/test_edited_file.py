"""One edit after the other, and each whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from mooncake_store.process.edited_file import replace_file, sole_writer


def keep(descriptor: int) -> None:
    """The rights that a fresh file has."""


def test_edits_of_two_wait_for_each_other_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    waits = threading.Event()

    def add_one() -> None:
        with sole_writer(tmp_path, waits.set):
            replace_file(path, str(int(path.read_text()) + 1).encode(), keep)

    with sole_writer(tmp_path):
        others = [threading.Thread(target=add_one) for _ in range(8)]
        for each in others:
            each.start()
        assert waits.wait(60.0), "who waits is asked to say so"
        assert path.read_text() == "0", "nobody writes while another is at it"
    for each in others:
        each.join(60.0)
    assert path.read_text() == "8"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), sole_writer(tmp_path / "none"):
        pass


def test_rights_are_given_before_anything_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    seen = []

    def give(descriptor: int) -> None:
        state = os.fstat(descriptor)
        seen.append((stat.S_IMODE(state.st_mode), state.st_size))
        os.fchmod(descriptor, 0o640)

    replace_file(path, b"key", give)
    assert seen == [(0o600, 0)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and path.read_bytes() == b"key"


@pytest.mark.parametrize("where", ["rights", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.mkdir()
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse if where == "replace" else os.replace)
    with pytest.raises(PermissionError):
        replace_file(path, b"new", refuse if where == "rights" else keep, beside=other)
    assert path.read_text() == "old" and not list(other.iterdir())
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["file", "other"]
