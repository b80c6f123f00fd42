"""The shipped model repository, and copies of it that a test may spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

from backends.model_settings.repository_check import CheckpointFacts
from backends.model_settings.repository_files import read_texts

SHIPPED = Path(__file__).resolve().parents[3] / "model_repository"
NODES = ("s0", "s1")


def copied(folder: Path) -> Path:
    repository = folder / "model_repository"
    shutil.copytree(SHIPPED, repository)
    return repository


def shipped_texts() -> dict[str, str]:
    return read_texts(SHIPPED)


def any_checkpoint(checkpoint: str) -> CheckpointFacts:
    """As large as the demo."""
    return CheckpointFacts(context_tokens_max=8192, layers=4)


def with_value(text: str, name: str, value: str) -> str:
    """By the letters of the shipped files, without the code that is tested."""
    before = text[: text.index(f'key: "{name}"')]
    rest = text[len(before) :]
    _, mark, tail = rest.partition('string_value: "')
    return before + rest[: rest.index(mark)] + mark + value + '"' + tail.partition('"')[2]
