"""What a person types, and where the directory is: keys, sizes, addresses.

Everybody may write to /tmp, so a folder of sockets that is found there proves nothing by its name:
it is used only if it belongs to this user and nobody else can write it.
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

VARIABLE = "MOONCAKE_DIRECTORY"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """'512M', '1GiB', '1073741824' -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, flags=re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 512M or 2G")
    return int(float(match.group(1)) * UNITS[match.group(2).upper()])


def shown_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_key(text: str) -> bytes:
    """32 hex digits are a key; anything else is a name, and its key is made of it."""
    if len(text) == 2 * KEY_BYTES and re.fullmatch("[0-9a-fA-F]+", text):
        return bytes.fromhex(text)
    return key_of(text)


def default_folder() -> Path:
    """Where `mooncake store serve` has its sockets, unless --folder names another."""
    return Path(tempfile.gettempdir()) / f"mooncake-store-{os.getuid()}"


def distrust(folder: Path) -> str:
    """Why this folder is not used without being named; "" when it is this user's alone."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write {folder} (chmod go-w {folder})"
    return ""


def own_folder() -> Path:
    """default_folder(), made if it is not there; BadParameter when it cannot be trusted."""
    folder = default_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if reason := distrust(folder):
        raise typer.BadParameter(
            f"{reason}: whoever can write it could pose as the directory; remove it, or name "
            "another with --folder"
        )
    return folder


def find_directory() -> str:
    """$MOONCAKE_DIRECTORY, or the directory of this host that answers; the youngest of several."""
    if named := os.environ.get(VARIABLE):
        return named
    folders = {default_folder(), *Path(tempfile.gettempdir()).glob("mooncake-*")}
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
    passed_over = f" (passed over: {'; '.join(refused)})" if refused else ""
    raise typer.BadParameter(
        f"no directory of this user's runs on this host as far as can be seen{passed_over}: give "
        f"--directory or {VARIABLE}, or start one (mooncake store serve)"
    )
