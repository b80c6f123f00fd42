"""A model repository of a benchmark's own: a copy of the project's, with other parameters.

Not here: starting a server on it (server.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from loadtest.bench.server import PROJECT


def copy_repository(target: Path, without: tuple[str, ...] = ()) -> Path:
    """`target`, which must not exist, becomes a copy; `without` names models to leave out."""
    shutil.copytree(PROJECT / "model_repository", target, ignore=shutil.ignore_patterns(*without))
    return target


def set_parameters(repository: Path, model: str, values: Mapping[str, str | int | float]) -> None:
    """Write parameters into a model's config.pbtxt at once; a running server takes them up."""
    path = repository / model / "config.pbtxt"
    text = path.read_text()
    for name, value in values.items():
        line = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        pattern = rf'^parameters {{ key: "{name}" value {{ string_value: "[^"]*" }} }}$'
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        if not count:
            text = f"{text.rstrip()}\n{line}\n"
    partial = path.with_suffix(".new")  # a server never sees half a file
    partial.write_text(text)
    partial.replace(path)
