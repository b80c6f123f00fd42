"""What stage 0 knows of its pipeline group: who the other stages are, and whether all are ready.

A group works in epochs. One begins when every other stage is registered: stage 0 says so, each
stage ends what it has of earlier epochs and says that it is there, again and again. It ends when
one of them falls silent, is another incarnation, or has lost its place; then nothing of it counts
any more. The group is whole from the moment that all are in the epoch. Pure: time is an argument,
and the worker's lock guards it.

Not here: what is said and sent (first_stage.py), what a stage does (later_stage.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.errors import ConfigError
from mooncake_store.records.membership import WorkerInfo

log = logging.getLogger(__name__)
SILENT_S = 5.0  # a stage speaks twice a second
BEGIN_AGAIN_S = 1.0  # between two times that a stage hears of an epoch


@dataclass(slots=True)
class GroupStage:
    """Another one than ours."""

    worker_id: str
    incarnation: str
    inbox: str
    epoch: str = ""  # that it said it is in
    heard_s: float = float("-inf")


class PipelineGroup:
    def __init__(self, own: WorkerInfo) -> None:
        self._own = own
        self._stages: dict[int, GroupStage] = {}
        self._epochs = 0
        self._asked_s = float("-inf")
        self.epoch = ""  # that has begun, or is to; "" while a stage is missing
        self.is_whole = False

    @property
    def stages(self) -> int:
        return self._own.pipeline_stages

    @property
    def others(self) -> dict[int, str]:
        """Stage -> its inbox."""
        return {number: self._stages[number].inbox for number in sorted(self._stages)}

    def missing(self) -> str:
        """Why it is not whole."""
        ready = {
            n for n, stage in self._stages.items() if stage.epoch and stage.epoch == self.epoch
        }
        numbers = ", ".join(str(n) for n in range(1, self.stages) if n not in ready)
        return (
            f"pipeline group {self._own.pipeline_group} is not whole: it waits for stage {numbers}"
        )

    def registered(self, workers: Sequence[WorkerInfo]) -> str:
        """Who is registered now. Returns why the epoch has ended with that; "": it has not."""
        found = {
            info.pipeline_stage: info
            for info in workers
            if is_of_group(info, self._own)
            and 0 < info.pipeline_stage < self.stages
            and not list(mistakes(self._own, info))
        }
        lost = ""
        for number in list(self._stages):
            info = found.get(number)
            if info is None or info.incarnation != self._stages[number].incarnation:
                del self._stages[number]
                lost = f"stage {number} has left"
        for number, info in found.items():
            if number not in self._stages:
                self._stages[number] = GroupStage(info.worker_id, info.incarnation, info.inbox)
        return self.end(lost) if lost else ""

    def heard(self, number: int, incarnation: str, epoch: str, now_s: float) -> str:
        """A stage says where it is. Returns why the epoch has ended with that; "": it has not."""
        stage = self._stages.get(number)
        if stage is None or stage.incarnation != incarnation:
            return ""
        stage.heard_s, stage.epoch = now_s, epoch
        if self.is_whole and epoch != self.epoch:
            return self.end(f"stage {number} has lost its place")
        if not self.is_whole and self.epoch and len(self._stages) == self.stages - 1:
            self.is_whole = all(
                each.epoch == self.epoch and now_s - each.heard_s <= SILENT_S
                for each in self._stages.values()
            )
        return ""

    def end(self, reason: str) -> str:
        """Nothing of this epoch counts any more."""
        self.is_whole, self.epoch, self._asked_s = False, "", float("-inf")
        for stage in self._stages.values():
            stage.epoch = ""
        return reason

    def silent(self, now_s: float) -> str:
        """Why the epoch has ended, if nobody has heard of a stage for too long."""
        for number, stage in self._stages.items():
            if self.is_whole and now_s - stage.heard_s > SILENT_S:
                return self.end(f"stage {number} has said nothing for {SILENT_S:g} s")
        return ""

    def to_begin(self, now_s: float) -> bool:
        """The other stages are to hear (again) that the epoch begins."""
        if self.is_whole or len(self._stages) < self.stages - 1:
            return False
        if not self.epoch:
            self._epochs += 1
            self.epoch = f"{self._own.incarnation}-{self._epochs}"
        elif now_s - self._asked_s < BEGIN_AGAIN_S:
            return False
        self._asked_s = now_s
        return True


def is_of_group(info: WorkerInfo, own: WorkerInfo) -> bool:
    return bool(own.pipeline_group) and info.pipeline_group == own.pipeline_group


def mistakes(own: WorkerInfo, other: WorkerInfo) -> Iterator[str]:
    """What two stages of one group must have in common, and have not; with the remedy.

    Their fingerprints are equal: the directory takes no others.
    """
    name = f"{other.worker_id} (stage {other.pipeline_stage} of {other.pipeline_group})"
    for field, label in (
        ("pipeline_stages", "pipeline_stages"),
        ("block_tokens", "block_tokens"),
        ("pages_max", "kv_pages"),
        ("context_tokens_max", "context_tokens_max"),
    ):
        ours, theirs = getattr(own, field), getattr(other, field)
        if ours != theirs:
            yield f"{label} is {ours}, that of {name} is {theirs}; use one value in all stages"
    if own.pipeline_stage == other.pipeline_stage and own.worker_id != other.worker_id:
        yield f"{name} has the same pipeline_stage; number the stages 0, 1, 2 ..."


def refuse_mistakes(own: WorkerInfo, workers: Sequence[WorkerInfo]) -> None:
    """ConfigError with all that this stage and the registered ones should have in common.

    While this very worker is served (its config.pbtxt reloads) only a warning: two stages that are
    to change together would refuse each other for good.
    """
    found = [
        problem
        for other in workers
        if is_of_group(other, own) and other.worker_id != own.worker_id
        for problem in mistakes(own, other)
    ]
    if not found:
        return
    lines = "\n".join(f"  - {line}" for line in found)
    said = f"{own.worker_id}/config.pbtxt has {len(found)} mistake(s):\n{lines}"
    if not any(info.worker_id == own.worker_id for info in workers):
        raise ConfigError(said)
    log.warning("%s", said)
