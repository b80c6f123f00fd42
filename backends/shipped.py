"""Paths of the model repository and the demo checkpoint in this package.

A checkout and an installed wheel have the same files: backends/model_repository is a link to the
checkout's folder, and a wheel contains a copy of that folder.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_REPOSITORY = Path("model_repository")  # default of the commands


def shipped_repository() -> Path:
    return (Path(__file__).parent / "model_repository").resolve()


def shipped_checkpoint() -> Path:
    return Path(__file__).parent / "demo_checkpoint"


def named_or_shipped(repository: Path) -> Path:
    """`repository`. If it is the default and does not exist, the shipped one, only for reading."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        return shipped_repository()
    return repository
