"""Durations of an engine's steps, and detection of a hung step. Pure.

`recent_s` is an exponential mean of the last few steps. `speed` corrects the estimates of the
machine profile (machine_profile.py): the mean ratio of measured to estimated time, over about as
many steps as a short output has. A limit on the time between tokens is checked with `speed`. The
few steps before a request arrives may be slower, because its prefill used the same machine.

An empty batch resets `recent_s`, because the steps of a large batch do not predict the steps of a
small one. `speed` does not depend on the batch, so an empty batch only reduces its weight.

A step is hung if it takes more than HUNG_RATIO times its predicted time, and more than HUNG_S_MIN.
If the watching thread does not run for a while, this time does not count.

Not here: the exit of a process with a hung step (worker_process.py).
"""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.2  # weight of the newest step in `recent_s`, from the fifth step on
SPEED_STEPS = 100.0  # the newest step has at least the weight 1 / SPEED_STEPS in `speed`
PRIOR_STEPS = 20.0  # when a batch begins, the value of `speed` counts as a mean of so many steps
OUTLIER_MAX = 4.0  # upper bound of a step's measured / estimated time in `speed`
HUNG_S_MIN = 30.0  # shorter steps are never hung, because a busy machine makes steps slow
HUNG_RATIO = 20.0  # a step with this ratio of measured to predicted time is hung
GAP_S_MAX = 5.0  # after a longer gap between two checks, the watch begins anew


class StepTimes:
    """Means of step durations. One thread calls the methods; any thread may read the numbers."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.recent_s = 0.0  # 0: no step since the batch was empty
        self.speed = 1.0  # measured / estimated; 2: steps take twice as long
        self._recent_steps = 0
        self._speed_steps = PRIOR_STEPS

    def took(self, step_s: float, estimated_s: float = 0.0) -> None:
        """Record a step. `estimated_s`: estimated time of the same step; 0: unknown."""
        self._recent_steps = recent_steps = self._recent_steps + 1
        weight = max(SMOOTHING, 1 / recent_steps)
        self.recent_s += weight * (step_s - self.recent_s)
        self.total_s += step_s
        self.steps += 1
        if estimated_s > 0:
            self._speed_steps = min(SPEED_STEPS, self._speed_steps + 1)
            ratio = min(step_s / estimated_s, OUTLIER_MAX)
            self.speed += (ratio - self.speed) / self._speed_steps

    def took_many(self, steps_s: Sequence[float], estimated_s: Sequence[float]) -> None:
        """As `took` for several steps in order, but faster. All estimates must be above 0."""
        recent_s, recent_steps, total_s = self.recent_s, self._recent_steps, self.total_s
        speed, speed_steps = self.speed, self._speed_steps
        for step_s, as_estimated_s in zip(steps_s, estimated_s, strict=True):
            recent_steps += 1
            weight = 1 / recent_steps if recent_steps * SMOOTHING < 1.0 else SMOOTHING
            recent_s += weight * (step_s - recent_s)
            total_s += step_s
            if speed_steps < SPEED_STEPS:
                speed_steps = min(SPEED_STEPS, speed_steps + 1)
            ratio = step_s / as_estimated_s
            speed += ((ratio if ratio < OUTLIER_MAX else OUTLIER_MAX) - speed) / speed_steps
        self.recent_s, self._recent_steps, self.total_s = recent_s, recent_steps, total_s
        self.speed, self._speed_steps = speed, speed_steps
        self.steps += len(steps_s)

    def batch_is_empty(self) -> None:
        """Reset `recent_s`, and reduce the weight of `speed` to PRIOR_STEPS."""
        self.recent_s, self._recent_steps = 0.0, 0
        self._speed_steps = PRIOR_STEPS


def limit_s(predicted_s: float) -> float:
    """Duration after which a step of this predicted time is hung."""
    return max(HUNG_S_MIN, HUNG_RATIO * predicted_s)


class StepWatch:
    """Detects a hung step. The computing thread writes it, another thread checks it."""

    def __init__(self) -> None:
        self._step: tuple[float, float] | None = None  # running step: (start, predicted seconds)
        self._looked_s = self._watched_since_s = float("-inf")

    def began(self, now_s: float, predicted_s: float = 0.0) -> None:
        self._step = now_s, predicted_s

    def ended(self) -> None:
        self._step = None

    def is_busy(self, now_s: float, busy: bool, predicted_s: float = 0.0) -> None:
        """For an engine that reports no steps. While it is busy, the start time does not change."""
        step = self._step
        began_s = step[0] if step is not None else now_s
        self._step = (began_s, predicted_s) if busy else None

    def progressed(self, now_s: float) -> None:
        """For an engine that reports no steps: it has made progress, so its next step begins."""
        if (step := self._step) is not None:
            self._step = now_s, step[1]

    def age_s(self, now_s: float) -> float:
        """Seconds since the running step began; 0 without a running step."""
        step = self._step
        return max(0.0, now_s - step[0]) if step is not None else 0.0

    def is_hung(self, now_s: float) -> bool:
        """True if the running step is hung. One thread must call this about every second."""
        if now_s - self._looked_s > GAP_S_MAX:
            self._watched_since_s = now_s
        self._looked_s = now_s
        if (step := self._step) is None:
            return False
        began_s, predicted_s = step
        return now_s - max(began_s, self._watched_since_s) > limit_s(predicted_s)
