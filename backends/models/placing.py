"""Writes the folder of a checkpoint completely, or leaves nothing.

The folder is written beside its place and then renamed. One call at a time writes beside a place;
another waits. A call that was killed leaves its partial folder, which the next call removes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backends.models.catalogue import SOURCE_NAME, ModelError, source_of
from backends.models.progress import Progress
from mooncake_store.process.edited_file import sole_writer

WAITS = "wait for another call that fetches or imports here"
WHOLE = "whole"  # subfolder of the partial folder


@contextmanager
def placed(
    folder: Path, source: Mapping[str, Any], work_bytes: int, progress: Progress
) -> Iterator[Path | None]:
    """A partial folder beside `folder`, whose subfolder WHOLE becomes `folder` after the block.

    Yields None, and changes nothing, if `folder` already comes from `source`. `work_bytes`: free
    space that the block needs. Raises ModelError if `folder` has other content, if space is
    missing, or for an OSError in the block.
    """
    folder = Path(os.path.abspath(folder))
    partial = folder.parent / f".{folder.name}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder.parent, lambda: progress(WAITS, 0.0)):
            if source_of(folder) == source:
                yield None
                return
            _check_room(folder, work_bytes)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                (partial / WHOLE).mkdir(parents=True)
                yield partial
                text = json.dumps(dict(source), indent=1) + "\n"
                (partial / WHOLE / SOURCE_NAME).write_text(text, encoding="utf-8")
                (partial / WHOLE).rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        remedy = "; free some space" if error.errno == errno.ENOSPC else ""
        where = error.filename or folder
        raise ModelError(f"{where}: {error.strerror or error}{remedy}") from None


def _check_room(folder: Path, work_bytes: int) -> None:
    is_empty_folder = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not is_empty_folder:
        raise ModelError(
            f"{folder} holds something else; remove it, or let `mooncake model` write to another "
            "folder with --to"
        )
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < work_bytes:
        raise ModelError(
            f"{folder.parent} has {free_bytes / 1e6:.0f} MB of free space, and "
            f"{work_bytes / 1e6:.0f} MB are needed; free some space, or name a folder on another "
            "disk with --to"
        )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
