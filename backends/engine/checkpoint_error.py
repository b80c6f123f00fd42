"""The one error of a checkpoint that cannot be served: all its problems, each on a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SHOWN_MAX = 20  # a wrong number of layers makes hundreds of problems


class CheckpointError(Exception):
    """`problems` has all of them, the message the first ones."""

    def __init__(self, folder: str | Path, problems: Sequence[str]) -> None:
        assert problems, "an error without a problem"
        self.problems = list(problems)
        lines = self.problems[:SHOWN_MAX]
        if len(self.problems) > SHOWN_MAX:
            lines.append(f"and {len(self.problems) - SHOWN_MAX} more")
        super().__init__(f"checkpoint {folder}:\n  - " + "\n  - ".join(lines))
