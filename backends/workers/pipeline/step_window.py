"""Stage 0's list of a pipeline group's steps in flight, and of prefixes being loaded. Pure.

A step is over when the last stage has computed it, and all stages except 0 have written their
layers. At most `stages + 1` steps are in computation: enough to keep all stages busy, but so few
that an urgent prompt waits for few steps. Actions that must follow a request's last step, such as
the release of its pages, are queued here. The worker's lock guards the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backends.engine.batching.batching import Chunk
from backends.workers.jobs import PrefillJob
from backends.workers.step_times import limit_s


@dataclass(slots=True, eq=False, kw_only=True)
class SentStep:
    number: int
    # (chunk, its job, blocks of the job that the step completes and the store lacks)
    parts: Sequence[tuple[Chunk, PrefillJob, range]]
    started_s: float  # start of the computation in stage 0 (monotonic)
    sent_s: float  # time at which stage 0 sent the step to stage 1 (monotonic)
    predicted_s: float  # predicted time of one stage
    is_computed: bool = False  # True: the last stage has computed the step
    unwritten: set[int] = field(default_factory=set)  # stages that have not written their layers

    @property
    def is_over(self) -> bool:
        return self.is_computed and not self.unwritten


@dataclass(slots=True, eq=False)
class PrefixLoad:
    number: int
    pages: frozenset[int]
    waiting: set[int]  # stages that have not answered
    blocks: int  # number of leading blocks that all stages with an answer have loaded
    late_s: float  # deadline of the answers (monotonic); after it the group's epoch ends
    is_lost: bool = False  # True: the epoch has ended before all answers

    @property
    def is_here(self) -> bool:
        return not self.waiting

    @property
    def is_over(self) -> bool:
        return self.is_here or self.is_lost


class StepWindow:
    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._steps: dict[int, SentStep] = {}  # step number -> step, in ascending order
        self._loads: dict[int, PrefixLoad] = {}  # load number -> load that still lacks answers
        self._loads_begun = 0
        self._behind: list[tuple[PrefillJob, Callable[[], None]]] = []  # see `behind`
        self.next_number = 0  # of the next step in this epoch

    @property
    def is_full(self) -> bool:
        return sum(not step.is_computed for step in self._steps.values()) > self._stages

    @property
    def is_empty(self) -> bool:
        return not self._steps and not self._behind

    def requests(self) -> set[str]:
        """Requests with chunks in flight."""
        return {job.request_id for step in self._steps.values() for _, job, _ in step.parts}

    def sent(self, step: SentStep) -> None:
        assert step.number == self.next_number, (step.number, self.next_number)
        step.unwritten = set(range(1, self._stages))
        self._steps[step.number] = step
        self.next_number += 1

    def computed(self, number: int) -> SentStep | None:
        """Record that the last stage has computed a step. None: no such step is in computation."""
        step = self._steps.get(number)
        if step is None or step.is_computed:
            return None
        step.is_computed = True
        return step

    def written(self, number: int, stage: int) -> SentStep | None:
        """Record that a stage has written a step. None: the stage has no such step to write."""
        step = self._steps.get(number)
        if step is None or stage not in step.unwritten:
            return None
        step.unwritten.discard(stage)
        return step

    def over(self, step: SentStep) -> None:
        del self._steps[step.number]
        self._run_behind()

    def wanted(self, pages: Sequence[int], late_s: float) -> PrefixLoad:
        self._loads_begun += 1
        waiting = set(range(1, self._stages))
        load = PrefixLoad(self._loads_begun, frozenset(pages), waiting, len(pages), late_s)
        self._loads[load.number] = load
        return load

    def loaded(self, number: int, stage: int, blocks: int) -> None:
        load = self._loads.get(number)
        if load is None:
            return
        load.waiting.discard(stage)
        load.blocks = min(load.blocks, blocks)
        if load.is_here:
            del self._loads[number]
            self._run_behind()

    def behind(self, job: PrefillJob, action: Callable[[], None]) -> None:
        """Run `action` when no step or load in flight uses the job's pages."""
        self._behind.append((job, action))
        self._run_behind()

    def _run_behind(self) -> None:
        waiting = []
        for job, action in self._behind:
            if self._is_at_work(job):
                waiting.append((job, action))
            else:
                action()
        self._behind = waiting

    def _is_at_work(self, job: PrefillJob) -> bool:
        loads = any(load.pages.intersection(job.put.pages) for load in self._loads.values())
        steps = self._steps.values()
        return loads or any(job is each for step in steps for _, each, _ in step.parts)

    def late(self, now_s: float) -> str:
        """An error text about a step or load past its time limit, because a stage hangs or a
        message is lost; "" if there is none."""
        for step in self._steps.values():
            if now_s - step.sent_s > limit_s(step.predicted_s * self._stages):
                return f"step {step.number} is not computed in time"
        for load in self._loads.values():
            if now_s > load.late_s:
                waiting = ", ".join(map(str, sorted(load.waiting)))
                return f"a cached prefix is not loaded in time by stage {waiting}"
        return ""

    def clear(self) -> None:
        """Forget all steps and loads when the epoch ends. Runs all queued actions."""
        self._steps.clear()
        for load in self._loads.values():
            load.is_lost = True
        self._loads.clear()
        self.next_number = 0
        self._run_behind()
