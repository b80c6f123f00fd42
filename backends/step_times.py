"""How long the steps of an engine take: in all, and recently. Pure."""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest step in the recent mean


class StepTimes:
    """Told by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.recent_s = 0.0

    def took(self, step_s: float) -> None:
        self.recent_s += SMOOTHING * (step_s - self.recent_s)
        self.total_s += step_s
        self.steps += 1
