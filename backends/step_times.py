"""How long the steps of an engine take: in all, and recently. Pure.

The recent mean is of the batch that there is. When a decode worker's batch is empty, nothing is
known of the next one: the step of thirty requests, remembered for the first one that comes after
them, would make the worker look ten times as slow as it is (conductor/speed.py).
"""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest step in the recent mean, once there are five


class StepTimes:
    """Told by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.recent_s = 0.0  # 0: no step since the batch was empty
        self._recent_steps = 0

    def took(self, step_s: float) -> None:
        self._recent_steps = recent_steps = self._recent_steps + 1
        weight = max(SMOOTHING, 1 / recent_steps)
        self.recent_s += weight * (step_s - self.recent_s)
        self.total_s += step_s
        self.steps += 1

    def batch_is_empty(self) -> None:
        """The recent mean begins anew with the next step."""
        self.recent_s, self._recent_steps = 0.0, 0
