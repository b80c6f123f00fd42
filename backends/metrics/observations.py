"""What happened, on its way to the metrics page: from any thread to the one that publishes.

Publishing a value takes a round trip to Triton, which no request waits for. So whoever knows a
value leaves it here, which costs a microsecond and no lock, and the metrics thread fetches it.
Pure. Not here: what the names mean (metrics/table.py), publishing (metrics/page.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

VALUES_MAX = 100_000  # some minutes of the busiest front, should the metrics thread hang


class Observation(NamedTuple):
    """One value of a histogram, or an amount to add to a counter."""

    name: str
    value: float
    labels: dict[str, str]


class Observations:
    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._waiting: deque[Observation] = deque(maxlen=values_max)

    def observe(self, name: str, value: float = 1.0, **labels: str) -> None:
        """From any thread (deque.append is atomic); the oldest give way when too many wait."""
        self._waiting.append(Observation(name, value, labels))

    @property
    def is_full(self) -> bool:
        """Values may have been lost."""
        return len(self._waiting) == self._waiting.maxlen

    def drain(self) -> Iterator[Observation]:
        """Those that waited when it began; what comes meanwhile is for the next time."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()
