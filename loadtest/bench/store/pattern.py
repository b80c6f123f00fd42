"""Which blocks are moved where: random and cold, the same for everybody who is compared.

`BATCH` blocks at random places of a memory of `memory_bytes`, into (or from) as many random places
of another: more than the CPU's cache holds, so each round meets memory it has not just seen.

Not here: moving them (ways.py).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BATCH = 16
ByteArray = npt.NDArray[np.uint8]


def pages(size_bytes: int, chance: np.random.Generator) -> ByteArray:
    """Memory that is there: every page has been written."""
    return chance.integers(0, 256, size_bytes, dtype=np.uint8)


@dataclass(slots=True)
class Pattern:
    """`blocks` blocks of one size, their keys, and a local buffer of equally many places."""

    block_bytes: int
    blocks: int
    local: ByteArray
    chance: np.random.Generator
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [secrets.token_bytes(16) for _ in range(self.blocks)]

    def place(self, index: int) -> ByteArray:
        start = index * self.block_bytes
        return self.local[start : start + self.block_bytes]

    def some(self) -> list[int]:
        """BATCH different blocks."""
        found: list[int] = self.chance.choice(self.blocks, BATCH, replace=False).tolist()
        return found
