"""The error of `mooncake model`: what happened, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class ModelError(Exception):
    """A model cannot be fetched or imported. One problem makes one line; `problems` has all."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        assert problems, "an error without a problem"
        self.problems = list(problems)
        if len(problems) == 1:
            super().__init__(f"{what}: {problems[0]}")
        else:
            super().__init__("\n  - ".join((f"{what}:", *problems)))
