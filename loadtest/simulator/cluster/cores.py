"""Workers that share the cores of one machine: each is slower while the other role computes.

On a machine with a GPU for each worker both factors are 1 and nothing happens here. On a small one
a prefill step takes `prefill_factor` times as long when it begins while a decode batch runs, and
decode steps take `decode_factor` times as long while a prefill step is computed; `mooncake profile`
measures both. A change acts from the next decode step on, and a prefill step keeps the factor with
which it began.

Ignored: how many workers of the other role compute (two of them on one machine count as one).

Not here: how long a step takes alone (gpu/).
"""

from __future__ import annotations

from collections.abc import Callable


class Cores:
    """Who computes now. All workers of the cluster are on this one machine."""

    def __init__(self, prefill_factor: float = 1.0, decode_factor: float = 1.0) -> None:
        assert min(prefill_factor, decode_factor) >= 1.0, "nobody gets faster by sharing"
        self._factors = {"prefill": prefill_factor, "decode": decode_factor}
        self._computing = {"prefill": 0, "decode": 0}
        self.on_prefill: list[Callable[[], None]] = []  # told when the first begins, the last ends

    def prefill_factor(self) -> float:
        """Of a prefill step that begins now."""
        return self._factors["prefill"] if self._computing["decode"] else 1.0

    def decode_factor(self) -> float:
        """Of the decode steps from now on."""
        return self._factors["decode"] if self._computing["prefill"] else 1.0

    def compute(self, role: str, is_computing: bool) -> None:
        """A worker of this role begins (or ends) to compute; only told at a change."""
        before = self._computing[role]
        after = self._computing[role] = before + (1 if is_computing else -1)
        assert after >= 0, f"more {role} workers ended than began"
        if role == "prefill" and bool(before) != bool(after) and self._factors["decode"] != 1.0:
            for tell in self.on_prefill:
                tell()
