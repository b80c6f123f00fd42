"""Parsing of keys, sizes and node names on the command line, and the search for a directory.

Every user can create folders in /tmp. Therefore a folder of sockets in /tmp is used only if it
belongs to this user and no other user can write to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

import typer

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.client.client import key_of
from mooncake_store.sizes import size_bytes
from mooncake_store.wire.unix_socket import PATH_BYTES_MAX

VARIABLE = "MOONCAKE_DIRECTORY"
BYTES_MAX = 2**50
NODE_NAME_BYTES_MAX = 40  # longest name of a storage node
# Longest path of a folder of sockets. The longest names in it are those of storage nodes.
FOLDER_BYTES_MAX = PATH_BYTES_MAX - 1 - NODE_NAME_BYTES_MAX
# Longest folder name of `mooncake serve`: "mooncake-", a process id of 7 digits, 2 random parts.
LAUNCH_BYTES_MAX = 34
SHORT_PLACE = Path("/tmp")  # parent of socket folders if holds_sockets() rejects $TMPDIR


def parse_bytes(text: str, option: str = "", bytes_min: int = 0) -> int:
    """'512M', '1GiB' or '1073741824' as bytes. BadParameter: not a size, or out of bounds."""
    try:
        size = size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not bytes_min <= size <= BYTES_MAX:
        raise typer.BadParameter(
            f"{option or 'the size'} is {text[:40]}: give at least {shown_bytes(bytes_min)} and at "
            f"most {shown_bytes(BYTES_MAX)}, for example 512M or 2G"
        )
    return int(size)


def parse_nodes(text: str) -> tuple[str, ...]:
    """The storage nodes of --nodes: ('s0', 's1') for 's0,s1'. BadParameter: an invalid name."""
    names = text.split(",")
    if not all(name.strip() for name in names):
        raise typer.BadParameter(
            f"--nodes {text!r} has an empty name: name each storage node, like s0,s1"
        )
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"--nodes {text!r} names {name!r} twice: name each node once")
        if not re.fullmatch(r"[\w.-]+", name) or set(name) == {"."}:
            raise typer.BadParameter(
                f"--nodes: {name!r} cannot be a name: use letters, digits, '_', '-' and '.'"
            )
        if len(os.fsencode(name)) > NODE_NAME_BYTES_MAX:
            raise typer.BadParameter(
                f"--nodes: {name!r} is too long for the path of a socket: shorten it to "
                f"{NODE_NAME_BYTES_MAX} bytes or fewer"
            )
    return tuple(names)


def holds_sockets(place: Path) -> bool:
    """Whether `mooncake serve` can make folders of sockets in `place`. The path must be short
    enough for sockets, and ASCII, because Triton's stub processes can read only ASCII paths."""
    return (
        len(os.fsencode(place)) <= FOLDER_BYTES_MAX - 1 - LAUNCH_BYTES_MAX and str(place).isascii()
    )


def shown_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_key(text: str) -> bytes:
    """The block key `text` (32 hex digits), or the key of a block that has this name."""
    if len(text) == 2 * KEY_BYTES and re.fullmatch("[0-9a-fA-F]+", text):
        return bytes.fromhex(text)
    return key_of(text)


def default_folder() -> Path:
    """The folder of `mooncake store serve` for its sockets, unless --folder names another."""
    return Path(tempfile.gettempdir()) / f"mooncake-store-{os.getuid()}"


def distrust(folder: Path) -> str:
    """The reason not to use this folder; "" if only this user can write to it. OSError: missing."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to {folder} (chmod go-w {folder})"
    return ""


def own_folder() -> Path:
    """default_folder(), created if missing. BadParameter: other users can write to it."""
    folder = default_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if reason := distrust(folder):
        raise typer.BadParameter(
            f"{reason}: another user's process could pose as the directory there; remove the "
            "folder, or name another one with --folder"
        )
    return folder


def find_directory(named: str = "") -> str:
    """`named`, else $MOONCAKE_DIRECTORY, else the newest directory of this user on this host that
    accepts a connection. Raises BadParameter if there is none."""
    if named := named or os.environ.get(VARIABLE, ""):
        return named
    folders = {default_folder(), *Path(tempfile.gettempdir()).glob("mooncake-*")}
    if not holds_sockets(Path(tempfile.gettempdir())):
        folders.update(SHORT_PLACE.glob("mooncake-*"))
    found, refused = [], []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            path = folder / "directory"
            made_s = path.lstat().st_mtime
            if reason := distrust(folder):
                refused.append(reason)
            else:
                found.append((made_s, path))
    for _, path in sorted(found, reverse=True):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            return f"ipc://{path}"
    passed_over = f" (ignored: {'; '.join(refused)})" if refused else ""
    raise typer.BadParameter(
        f"no directory of this user runs on this host{passed_over}: set --directory or "
        f"{VARIABLE}, or start one (mooncake store serve)"
    )
