"""Dynamo's round robin: prefill workers in turn by arrival, decode workers in turn by completion.

Not here: anything that looks at load or caches (conductor_scheduler.py).
"""

from __future__ import annotations

import itertools

from loadtest.simulator.dynamo.blocks import Watcher
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.replay import Replay


class RoundRobin:
    def watcher(self, prefill: int) -> Watcher | None:
        return None

    def attach(self, replay: Replay) -> None:
        self._prefills = itertools.cycle(range(len(replay.prefills)))
        self._decodes = itertools.cycle(range(len(replay.decodes)))

    def arrive(self, job: Job, now_s: float) -> bool:
        job.prefill = next(self._prefills)
        return True

    def prefilled(self, job: Job, now_s: float) -> None:
        job.decode = next(self._decodes)

    def finished(self, job: Job, now_s: float) -> None:
        pass
