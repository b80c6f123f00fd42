"""Where this package has its model repository and its demo checkpoint.

They are the same files in a checkout and in an installed wheel: backends/model_repository links to
the checkout's own folder, and a wheel holds what the link leads to.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_REPOSITORY = Path("model_repository")  # where commands look when none is named


def shipped_repository() -> Path:
    return (Path(__file__).parent / "model_repository").resolve()


def shipped_checkpoint() -> Path:
    return Path(__file__).parent / "demo_checkpoint"


def named_or_shipped(repository: Path) -> Path:
    """For who only reads one: outside of a checkout the default is the shipped one."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        return shipped_repository()
    return repository
