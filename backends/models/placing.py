"""Puts a checkpoint's folder in its place, complete or not at all.

The folder is written beside its place and then renamed. One call at a time writes beside a place;
another waits. A call that was killed leaves its partial folder, which the next call removes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backends.models.catalogue import SOURCE_NAME, source_of
from backends.models.problems import ModelError
from mooncake_store.process.edited_file import sole_writer

WAITS = "wait for another call that fetches or imports here"
WHOLE = "whole"  # in the partial folder: what is renamed


@contextmanager
def placed(
    folder: Path, source: Mapping[str, Any], work_bytes: int, on_wait: Callable[[], object]
) -> Iterator[Path | None]:
    """A partial folder beside `folder`, whose subfolder WHOLE becomes `folder` after the block.

    Yields None, and changes nothing, if `folder` already comes from `source`. `work_bytes`: free
    space that the block needs. `on_wait` is called before a wait for another call. Raises
    ModelError if `folder` has other content, if space is missing, or for an OSError in the block.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder.parent, on_wait):
            if not _is_wanted(folder, source):
                yield None
                return
            shutil.rmtree(partial, ignore_errors=True)
            _check_space(folder.parent, work_bytes)
            (partial / WHOLE).mkdir(parents=True)
            try:
                yield partial
                text = json.dumps(dict(source), indent=2) + "\n"
                (partial / WHOLE / SOURCE_NAME).write_text(text, encoding="utf-8")
                (partial / WHOLE).rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        remedy = "; free some space" if error.errno == errno.ENOSPC else ""
        where = error.filename or folder
        raise ModelError(str(where), [f"{error.strerror or error}{remedy}"]) from None


def _is_wanted(folder: Path, source: Mapping[str, Any]) -> bool:
    if source_of(folder) == source:
        return False
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and _is_empty(folder))):
        raise ModelError(
            str(folder), ["holds something else; name another folder with --to, or remove it"]
        )
    return True


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def _check_space(parent: Path, work_bytes: int) -> None:
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < work_bytes:
        raise ModelError(
            str(parent),
            [
                f"has {free_bytes / 1e6:.0f} MB of free space, and {work_bytes / 1e6:.0f} MB are "
                "needed; free some space, or name a folder on another disk with --to"
            ],
        )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
