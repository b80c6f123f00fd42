"""Paths of the model repository and the demo checkpoint in this package.

In a checkout, backends/model_repository is a link to the folder model_repository. A wheel contains
a copy of that folder instead.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_REPOSITORY = Path("model_repository")  # default of the commands


def shipped_repository() -> Path:
    return (Path(__file__).parent / "model_repository").resolve()


def shipped_checkpoint() -> Path:
    return Path(__file__).parent / "demo_checkpoint"


def named_or_shipped(repository: Path) -> Path:
    """`repository`, or the read-only shipped one if `repository` is the default and is missing."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        return shipped_repository()
    return repository
