"""The steps of an engine: how long they take, and whether one of them hangs. Pure.

How long: two windows, because two things are asked. `recent_s` follows the last few steps. `speed`
is measured / estimated over about as many steps as a short answer has: a limit on the time between
tokens is one on the mean step of an answer, and a request comes just when its own prefill has had
the machine busy, so the last few steps are the slowest that it will meet.

An empty batch ends what was: `recent_s`, the step of thirty requests, would make the worker look
ten times as slow as it is to the first one that comes after them, so it begins anew. So does
`speed`, with what it was for a beginning: it does not depend on the batch, and corrects what was
measured of the engine when it started.

Hung: a worker whose engine hangs goes on reporting, which is a sign of life and none of progress.
What it computes has a predicted time, so a step that takes many times as long, and half a minute
at least, will not end. Time in which nobody watched does not count: then the whole process stood
still, the step as well.

Not here: what becomes of a hung worker (worker.py).
"""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.2  # weight of the newest step in the recent mean, once there are five
SPEED_STEPS = 100.0  # that the speed looks back on
PRIOR_STEPS = 20.0  # what was known before the first step of a batch counts as so many
OUTLIER_MAX = 4.0  # one step, held up by whatever, counts as at most so many times its estimate
HUNG_S_MIN = 30.0  # a busy machine makes a step slow, not hung
HUNG_RATIO = 20.0  # times as long as predicted
GAP_S_MAX = 5.0  # between two looks of one who watches


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

    def took_many(self, steps_s: Sequence[float], estimated_s: Sequence[float]) -> None:
        """`took` for several steps with estimates above 0, in order: for a simulator, which looks
        at many at once."""
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
        """What is said of recent steps begins anew with the next one."""
        self.recent_s, self._recent_steps = 0.0, 0
        self._speed_steps = PRIOR_STEPS


def limit_s(predicted_s: float) -> float:
    """A step that takes longer is hung."""
    return max(HUNG_S_MIN, HUNG_RATIO * predicted_s)


class StepWatch:
    """Told of the steps by the thread that makes them, looked at by another."""

    def __init__(self) -> None:
        self._step: tuple[float, float] | None = None  # (when it began, its predicted seconds)
        self._looked_s = self._watched_since_s = float("-inf")

    def began(self, now_s: float, predicted_s: float = 0.0) -> None:
        self._step = now_s, predicted_s

    def ended(self) -> None:
        self._step = None

    def is_busy(self, now_s: float, busy: bool, predicted_s: float = 0.0) -> None:
        """Of an engine that shows no steps: it has something to do, or has not."""
        step = self._step
        if not busy:
            self._step = None
        else:
            self._step = step[0] if step is not None else now_s, predicted_s

    def progressed(self, now_s: float) -> None:
        """A sign of life from an engine that shows no steps: the next one begins."""
        if (step := self._step) is not None:
            self._step = now_s, step[1]

    def age_s(self, now_s: float) -> float:
        """Of the step that is under way; 0 when there is none."""
        step = self._step
        return max(0.0, now_s - step[0]) if step is not None else 0.0

    def is_hung(self, now_s: float) -> bool:
        """Asked every second or so, by one thread."""
        if now_s - self._looked_s > GAP_S_MAX:
            self._watched_since_s = now_s
        self._looked_s = now_s
        step = self._step
        if step is None:
            return False
        began_s, predicted_s = step
        return now_s - max(began_s, self._watched_since_s) > limit_s(predicted_s)
