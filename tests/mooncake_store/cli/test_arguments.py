"""Where `mooncake store` looks for a directory: only in folders that nobody else can write."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mooncake_store.cli.arguments import (
    VARIABLE,
    default_folder,
    find_directory,
    own_folder,
    parse_bytes,
    parse_nodes,
    shown_bytes,
)

SOMEBODY = 54321
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A /tmp of the test's own, with a short path: sockets lie in it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with tempfile.TemporaryDirectory(prefix="arguments-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def listen() -> Iterator[object]:
    """Makes a folder in which something listens as a directory would."""
    sockets = []

    def make(folder: Path, mode: int = 0o700) -> Path:
        folder.mkdir()
        folder.chmod(mode)
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(folder / "directory"))
        sockets[-1].listen()
        return folder

    yield make
    for each in sockets:
        each.close()


def test_the_directory_in_a_folder_of_this_user_is_found(tmp: Path, listen) -> None:
    folder = listen(tmp / "mooncake-1-abc", 0o755)
    assert find_directory() == f"ipc://{folder}/directory"


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o722])
def test_a_folder_that_others_may_write_is_passed_over_with_the_remedy(
    tmp: Path, listen, mode: int
) -> None:
    planted = listen(tmp / "mooncake-1-abc", mode)
    with pytest.raises(typer.BadParameter, match=f"chmod go-w {planted}.*--directory"):
        find_directory()
    own = listen(tmp / "mooncake-2-def")
    os.utime(own / "directory", (0, 0))  # older than the planted one
    assert find_directory() == f"ipc://{own}/directory"


@as_root
def test_a_folder_of_somebody_else_is_passed_over(tmp: Path, listen) -> None:
    planted = listen(default_folder())
    os.chown(planted, SOMEBODY, SOMEBODY)
    with pytest.raises(typer.BadParameter, match=f"belongs to user {SOMEBODY}"):
        find_directory()
    with pytest.raises(typer.BadParameter, match="could pose as the directory"):
        own_folder()


def test_a_link_to_a_folder_is_not_followed(tmp: Path, listen) -> None:
    elsewhere = listen(tmp / "elsewhere")
    default_folder().symlink_to(elsewhere)
    with pytest.raises(typer.BadParameter, match="is not a folder"):
        find_directory()
    with pytest.raises(typer.BadParameter, match="is not a folder"):
        own_folder()


def test_the_folder_that_is_made_for_serving_is_this_users_alone(tmp: Path) -> None:
    before = os.umask(0)
    try:
        assert own_folder() == own_folder() == default_folder()
    finally:
        os.umask(before)
    assert default_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s0,,s0", "an empty name"),
        ("", "an empty name"),
        ("s0,", "an empty name"),
        ("s0,s1,s0", "names 's0' twice"),
        ("a/b", "cannot be a name"),
        ("..", "cannot be a name"),
        ("x" * 41, "shorten it to 40 bytes"),
    ],
)
def test_a_wrong_list_of_nodes_is_named_as_such(text: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        parse_nodes(text)
    assert parse_nodes("s0,node-1.rack_2") == ("s0", "node-1.rack_2")


@pytest.mark.parametrize("text", ["0", "0G", "9999999T", "1"])
def test_a_size_below_or_above_its_limits_is_named_with_its_option(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"--store-bytes is {text}: give at least 16"):
        parse_bytes(text, "--store-bytes", 16 * 1024)
    assert parse_bytes("16K", "--store-bytes", 16 * 1024) == 16 * 1024


def test_bytes_are_shown_in_the_largest_binary_unit_that_fits() -> None:
    shown = {0: "0 B", 1023: "1023 B", 2048: "2.0 KiB", 3.5 * 2**20: "3.5 MiB", 2**30: "1.0 GiB"}
    assert {size: shown_bytes(size) for size in shown} == shown
