"""Reads and replaces the config.pbtxt files of a model repository on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from backends.cluster.model_rendering import BYTES, CONFIG
from backends.errors import ConfigError
from mooncake_store.process.edited_file import replace_file, sole_writer

CONFIG_BYTES_MAX = 2**20


def read_texts(repository: Path) -> dict[str, str]:
    """Model -> its config.pbtxt's text. Raises ConfigError if none exists or one is unreadable."""
    if not repository.is_dir():
        raise ConfigError(
            f"there is no model repository at {repository}: run from the project's root, name a "
            "repository with --model-repository, or make one with `mooncake init FOLDER`"
        )
    found = {}
    for path in sorted(
        repository.glob(f"*/{CONFIG}"), key=lambda path: by_number(path.parent.name)
    ):
        found[path.parent.name] = read_config(path.parent).decode("utf-8", BYTES)
    if not found:
        raise ConfigError(f"{repository} has no model: no folder in it has a {CONFIG}")
    return found


def read_config(model: Path) -> bytes:
    """The content of config.pbtxt in a model's folder. Raises ConfigError with a remedy if the file
    is unreadable. A named pipe is not read, because reading it could block."""
    path = model / CONFIG
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= CONFIG_BYTES_MAX:
            return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: restore it, or remove the folder to end the model"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it readable for this user"
        ) from None
    if stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} has {found.st_size} bytes: at most {CONFIG_BYTES_MAX} are read")
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
    raise ConfigError(f"{path} is {kind}: replace it by a file")


def by_number(model: str) -> tuple[str, int, str]:
    """A sort key that orders prefill_2 before prefill_10."""
    found = re.fullmatch(r"(.*?)(\d+)", model)
    return (found[1], int(found[2]), model) if found else (model, -1, model)


def sole_setter(repository: Path, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """Allow one `mooncake config set` at a time, so that each sees the outcome of its own edit."""
    if not os.access(repository, os.R_OK):
        return contextlib.nullcontext()  # the caller's next read raises the error
    return sole_writer(repository, lambda: report("waits for another `mooncake config set`"))


def write_texts(repository: Path, texts: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Write all texts. If a write fails, restore the files to `before` and raise ConfigError."""
    written: list[str] = []
    try:
        for model, text in texts.items():
            write_text(repository, model, text)
            written.append(model)
    except OSError as error:
        for other in written:
            write_text(repository, other, before[other])
        raise ConfigError(
            f"{repository / model / CONFIG} cannot be written ({error.strerror}): make it writable "
            "for this user"
        ) from None


def write_text(repository: Path, model: str, text: str) -> None:
    """Replace a file atomically and keep its permissions. If it is a link, replace the target."""
    path = (repository / model / CONFIG).resolve()
    # A running system copies the model's folder, so the temporary file is outside of this folder.
    replace_file(
        path,
        text.encode("utf-8", BYTES),
        lambda descriptor: os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode)),
        beside=path.parent.parent,
    )


def digest(raw: bytes) -> str:
    """The digest by which a running system identifies a file."""
    return hashlib.sha256(raw).hexdigest()


def unconfigured(repository: Path) -> list[str]:
    """Folders without config.pbtxt, such as a folder that is being copied."""
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not (path / CONFIG).exists()
    )


def versionless(repository: Path, models: Iterable[str]) -> list[str]:
    """Models without a version folder (a number from 1). Triton does not load these models."""
    return [
        model
        for model in sorted(models)
        if not any(
            path.is_dir() and path.name.isdecimal() and path.name != "0"
            for path in (repository / model).iterdir()
        )
    ]
