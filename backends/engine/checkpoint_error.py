"""The one error of a checkpoint that cannot be served: all its problems, each on a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(Exception):
    def __init__(self, folder: str | Path, problems: Sequence[str]) -> None:
        assert problems, "an error without a problem"
        self.problems = list(problems)
        super().__init__(f"checkpoint {folder}:\n  - " + "\n  - ".join(problems))
