"""The config.pbtxt files of a model repository on disk: read all, replace one.

Not here: what they say (model_file.py).
"""

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
    """Of each model, by its folder's name; ConfigError when there is no repository."""
    if not repository.is_dir():
        raise ConfigError(
            f"there is no model repository at {repository}: run from the project's root, name one "
            "with --model-repository, or lay one down with `mooncake init FOLDER`"
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
    """The config.pbtxt of this model's folder; ConfigError, with a remedy, when it has none that
    can be read. A pipe there does not block the caller."""
    path = model / CONFIG
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= CONFIG_BYTES_MAX:
            return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is gone: put it back, or remove the folder to end the model"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it readable for this user"
        ) from None
    if stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} has {found.st_size} bytes: at most {CONFIG_BYTES_MAX} are read")
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
    raise ConfigError(f"{path} is {kind}: put a file there")


def by_number(model: str) -> tuple[str, int, str]:
    """prefill_2 comes before prefill_10."""
    found = re.fullmatch(r"(.*?)(\d+)", model)
    return (found[1], int(found[2]), model) if found else (model, -1, model)


def sole_setter(repository: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """One `mooncake config set` after the other, so that each hears what came of its own edit."""
    if not os.access(repository, os.R_OK):
        return contextlib.nullcontext()  # who reads it next says that it is not there
    return sole_writer(repository, lambda: say("waits for another `mooncake config set`"))


def write_texts(repository: Path, texts: Mapping[str, str], before: Mapping[str, str]) -> None:
    """All of them, or none: ConfigError when one cannot be written, and the others are as they
    were."""
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
    """At once, and with the file's own rights; what a link points to is replaced, not the link."""
    path = (repository / model / CONFIG).resolve()
    # Not in the model's folder, whose entries are taken over by the mirror of a running system.
    replace_file(
        path,
        text.encode("utf-8", BYTES),
        lambda descriptor: os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode)),
        beside=path.parent.parent,
    )


def digest(raw: bytes) -> str:
    """By which a running system says which file it has."""
    return hashlib.sha256(raw).hexdigest()


def unconfigured(repository: Path) -> list[str]:
    """Folders that are no models yet: half copied, or without a file of their own."""
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not (path / CONFIG).exists()
    )


def versionless(repository: Path, models: Iterable[str]) -> list[str]:
    """Those without a version folder: Triton does not load them."""
    return [
        model
        for model in sorted(models)
        if not any(
            path.is_dir() and path.name.isdigit() and path.name != "0"
            for path in (repository / model).iterdir()
        )
    ]
