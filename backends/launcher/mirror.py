"""The folder that Triton polls: a mirror of the operator's model repository.

Each Triton of the launcher serves a part of the repository (triton_process.py), so each has a
mirror of that part: everything is a link to the operator's files except config.pbtxt, which is a
copy. Triton loads a model anew only when its config.pbtxt really changes, and it never restarts a
model's process that died; such a model gets a new *incarnation*, one more parameter at the end of
its copy, and Triton starts it again. The operator's files are only read.

A folder is taken over when it has not changed for a moment: editors and copies work in steps, and
Triton gives up on a model whose version folder is not there yet.
Not here: noticing that a worker died (triton_process.py).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

SETTLED_S = 0.15
BYTES = "surrogateescape"  # a comment may be in any encoding
# Names with a leading underscore are the launcher's, not the operator's.
INCARNATION_PARAMETER = "_incarnation"
WORKER_BACKENDS = ("prefill", "decode")
BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"([^"]*)"', re.MULTILINE)


def backend_of(model: Path) -> str | None:
    """As a model folder's config.pbtxt names it; None when there is none (yet)."""
    try:
        found = BACKEND.search((model / "config.pbtxt").read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


class WorkerFolders:
    """Which folders of the operator's repository are prefill or decode workers."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._names: set[str] = set()

    def names(self) -> set[str]:
        """A folder whose config.pbtxt says nothing at the moment is what it was."""
        found = {path.name: backend_of(path)
                 for path in self._repository.iterdir() if path.is_dir()}  # fmt: skip
        self._names = {
            name for name, backend in found.items()
            if backend in WORKER_BACKENDS or (backend is None and name in self._names)
        }  # fmt: skip
        return self._names


class RepositoryMirror:
    def __init__(self, source: Path, target: Path, wants: Callable[[str], bool]) -> None:
        """`wants`: is this model part of the mirror?"""
        self.source = source.resolve()
        self.target = target
        self._wants = wants
        self._incarnations: dict[str, int] = {}
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)

    def revive(self, model: str) -> None:
        """Let Triton start this model once more, with the same settings."""
        self._incarnations[model] = self._incarnations.get(model, 0) + 1

    def models(self) -> set[str]:
        """Those that Triton is to serve."""
        return {path.parent.name for path in self.target.glob("*/config.pbtxt")}

    def config(self, model: str) -> str:
        """The config.pbtxt that Triton sees; "" when the model is gone."""
        path = self.target / model / "config.pbtxt"
        return path.read_text(errors=BYTES) if path.exists() else ""

    def sync(self, is_first: bool = False) -> None:
        """Bring the mirror up to date; cheap, for a call every few hundred milliseconds."""
        folders = (path.name for path in self.source.iterdir() if path.is_dir())
        wanted = {name for name in folders if self._wants(name)}
        for path in self.target.iterdir():
            if path.name not in wanted:
                shutil.rmtree(path)
        for name in sorted(wanted):
            with contextlib.suppress(OSError):  # removed while we look, or not ours to read
                self._sync_model(name, is_first)

    def _sync_model(self, name: str, is_first: bool) -> None:
        source, target = self.source / name, self.target / name
        config = source / "config.pbtxt"
        text = config.read_text(errors=BYTES)
        newest_s = max(config.stat().st_mtime, source.stat().st_mtime)
        if not is_first and time.time() - newest_s < SETTLED_S:
            return
        if incarnation := self._incarnations.get(name):
            value = f'value {{ string_value: "{incarnation}" }}'
            text += f'\nparameters {{ key: "{INCARNATION_PARAMETER}" {value} }}\n'
        target.mkdir(exist_ok=True)
        entries = {path.name for path in source.iterdir() if path.name != "config.pbtxt"}
        for link in target.iterdir():
            if link.is_symlink() and link.name not in entries:
                link.unlink()
        for entry in entries:
            if not (target / entry).is_symlink():
                (target / entry).symlink_to(source / entry)
        copy = target / "config.pbtxt"
        if not copy.exists() or copy.read_text(errors=BYTES) != text:
            partial = self.target.parent / f".{name}.config"
            partial.write_text(text, errors=BYTES)
            partial.replace(copy)  # last: Triton loads a folder as soon as it has a config
