"""How long the steps of an engine take: in all, recently, and beside what was estimated. Pure.

Two windows, because two things are asked. `recent_s` follows the last few steps. `speed` is
measured / estimated over about as many steps as a short answer has: a limit on the time between
tokens is one on the mean step of an answer, and a request comes just when its own prefill has had
the machine busy, so the last few steps are the slowest that it will meet.

An empty batch ends what was: `recent_s`, the step of thirty requests, would make the worker look
ten times as slow as it is to the first one that comes after them, so it begins anew. So does
`speed`, with what it was for a beginning: it does not depend on the batch, and corrects what was
measured of the engine when it started.
"""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest step in the recent mean, once there are five
SPEED_STEPS = 100.0  # that the speed looks back on
PRIOR_STEPS = 20.0  # what was known before the first step of a batch counts as so many
OUTLIER_MAX = 4.0  # one step, held up by whatever, counts as at most so many times its estimate


class StepTimes:
    """Told by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.recent_s = 0.0  # 0: no step since the batch was empty
        self.speed = 1.0  # measured / estimated; 2: steps take twice as long
        self._recent_steps = 0
        self._speed_steps = PRIOR_STEPS

    def took(self, step_s: float, estimated_s: float = 0.0) -> None:
        """`estimated_s`: of the same batch; 0: nobody knows."""
        self._recent_steps = recent_steps = self._recent_steps + 1
        weight = max(SMOOTHING, 1 / recent_steps)
        self.recent_s += weight * (step_s - self.recent_s)
        self.total_s += step_s
        self.steps += 1
        if estimated_s > 0:
            self._speed_steps = min(SPEED_STEPS, self._speed_steps + 1)
            ratio = min(step_s / estimated_s, OUTLIER_MAX)
            self.speed += (ratio - self.speed) / self._speed_steps

    def batch_is_empty(self) -> None:
        """What is said of recent steps begins anew with the next one."""
        self.recent_s, self._recent_steps = 0.0, 0
        self._speed_steps = PRIOR_STEPS
