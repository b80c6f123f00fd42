"""The folder that Triton polls: a mirror of the operator's model repository.

Triton loads a model anew only when its config.pbtxt really changes, and it never restarts a worker
process that died. So the launcher lets it poll a mirror: everything is a link to the operator's
files except config.pbtxt, which is a copy; a worker that died gets a new *life*, one more
parameter at the end of its copy, and Triton starts it again. The operator's files are only read.

A folder is taken over when it has not changed for a moment: editors and copies work in steps, and
Triton gives up on a model whose version folder is not there yet.
Not here: noticing that a worker died (stub_watch.py).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

SETTLED_S = 0.15
LIFE_PARAMETER = "_life"  # names with a leading underscore are the launcher's, not the operator's


class RepositoryMirror:
    def __init__(self, source: Path, target: Path) -> None:
        self.source = source.resolve()
        self.target = target
        self._lives: dict[str, int] = {}
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)

    def revive(self, model: str) -> None:
        """Let Triton start this model once more, with the same settings."""
        self._lives[model] = self._lives.get(model, 0) + 1

    def config(self, model: str) -> str:
        """The config.pbtxt that Triton sees; "" when the model is gone."""
        path = self.target / model / "config.pbtxt"
        return path.read_text() if path.exists() else ""

    def sync(self, is_first: bool = False) -> None:
        """Bring the mirror up to date; cheap, for a call every few hundred milliseconds."""
        wanted = {path.name for path in self.source.iterdir() if path.is_dir()}
        for path in self.target.iterdir():
            if path.name not in wanted:
                shutil.rmtree(path)
        for name in sorted(wanted):
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                self._sync_model(name, is_first)

    def _sync_model(self, name: str, is_first: bool) -> None:
        source, target = self.source / name, self.target / name
        config = source / "config.pbtxt"
        text = config.read_text()
        newest_s = max(config.stat().st_mtime, source.stat().st_mtime)
        if not is_first and time.time() - newest_s < SETTLED_S:
            return
        if life := self._lives.get(name):
            text += (
                f'\nparameters {{ key: "{LIFE_PARAMETER}" value {{ string_value: "{life}" }} }}\n'
            )
        target.mkdir(exist_ok=True)
        entries = {path.name for path in source.iterdir() if path.name != "config.pbtxt"}
        for link in target.iterdir():
            if link.is_symlink() and link.name not in entries:
                link.unlink()
        for entry in entries:
            if not (target / entry).is_symlink():
                (target / entry).symlink_to(source / entry)
        copy = target / "config.pbtxt"
        if not copy.exists() or copy.read_text() != text:
            partial = self.target.parent / f".{name}.config"
            partial.write_text(text)
            partial.replace(copy)  # last: Triton loads a folder as soon as it has a config
