"""How much longer or shorter a step takes than the model says: the same for the same seed.

The factor belongs to the number of the step, so it does not matter how many are taken at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DRAWN_AT_ONCE = 4_096


class Jitter:
    def __init__(self, share: float, seed: int, node: int) -> None:
        self._share = share
        self._random = np.random.default_rng([seed, node])
        self._factors = np.ones(0)

    def factors(self, first: int, steps: int) -> npt.NDArray[np.float64]:
        """Of the steps `first`, `first` + 1, ...; evenly spread over 1 +/- share."""
        while first + steps > len(self._factors):
            drawn = self._random.uniform(1 - self._share, 1 + self._share, DRAWN_AT_ONCE)
            self._factors = np.concatenate([self._factors, drawn])
        return self._factors[first : first + steps]
