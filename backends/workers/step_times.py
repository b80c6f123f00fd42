"""Durations of an engine's steps, and detection of a hung step. Pure.

Durations: `recent_s` is an exponential mean of the last few steps. `speed` is measured / estimated
time over about as many steps as a short output has, because a limit on the time between tokens is a
limit on the mean step of an output. The last few steps before a decode request arrives may be too
slow for that, if the prefill of the request has kept the same machine busy.

An empty batch resets `recent_s`: the steps of a large batch would make the worker look much slower
than it is for the next request. `speed` keeps its value as a prior, because it does not depend on
the batch: it corrects the machine profile (machine_profile.py).

Hung steps: a worker with a hung engine still reports, but makes no progress. A step is hung if it
takes HUNG_RATIO times its predicted time, and HUNG_S_MIN at least. Time in which the watcher did
not run does not count, because then the whole process was stopped.

Not here: the end of a hung worker (worker.py).
"""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.2  # weight of the newest step in the recent mean, once there are five
SPEED_STEPS = 100.0  # steps over which `speed` is averaged
PRIOR_STEPS = 20.0  # weight, in steps, of the speed before the first step of a batch
OUTLIER_MAX = 4.0  # largest measured / estimated ratio that one step contributes
HUNG_S_MIN = 30.0  # a busy machine makes a step slow, not hung
HUNG_RATIO = 20.0  # measured / predicted
GAP_S_MAX = 5.0  # largest gap between two checks of a running watcher


class StepTimes:
    """The engine's thread writes it, any thread reads it."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.recent_s = 0.0  # 0: no step since the batch was empty
        self.speed = 1.0  # measured / estimated; 2: steps take twice as long
        self._recent_steps = 0
        self._speed_steps = PRIOR_STEPS

    def took(self, step_s: float, estimated_s: float = 0.0) -> None:
        """`estimated_s`: estimated time of the same step; 0: unknown."""
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
        """`took` for several steps in order, with estimates above 0; for a simulator."""
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
        """Reset the recent steps, and make the current speed the prior."""
        self.recent_s, self._recent_steps = 0.0, 0
        self._speed_steps = PRIOR_STEPS


def limit_s(predicted_s: float) -> float:
    """Time after which a step is hung."""
    return max(HUNG_S_MIN, HUNG_RATIO * predicted_s)


class StepWatch:
    """Detects a hung step. The computing thread writes it, another thread checks it."""

    def __init__(self) -> None:
        self._step: tuple[float, float] | None = None  # (start time, predicted seconds)
        self._looked_s = self._watched_since_s = float("-inf")

    def began(self, now_s: float, predicted_s: float = 0.0) -> None:
        self._step = now_s, predicted_s

    def ended(self) -> None:
        self._step = None

    def is_busy(self, now_s: float, busy: bool, predicted_s: float = 0.0) -> None:
        """Set whether an engine that reports no steps has work."""
        step = self._step
        if not busy:
            self._step = None
        else:
            self._step = step[0] if step is not None else now_s, predicted_s

    def progressed(self, now_s: float) -> None:
        """An engine that reports no steps has made progress: its next step begins."""
        if (step := self._step) is not None:
            self._step = now_s, step[1]

    def age_s(self, now_s: float) -> float:
        """Age of the running step; 0 without one."""
        step = self._step
        return max(0.0, now_s - step[0]) if step is not None else 0.0

    def is_hung(self, now_s: float) -> bool:
        """One thread calls this about every second."""
        if now_s - self._looked_s > GAP_S_MAX:
            self._watched_since_s = now_s
        self._looked_s = now_s
        step = self._step
        if step is None:
            return False
        began_s, predicted_s = step
        return now_s - max(began_s, self._watched_since_s) > limit_s(predicted_s)
