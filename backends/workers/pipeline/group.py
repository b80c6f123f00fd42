"""Membership of a pipeline group at stage 0: the other stages, and whether all are ready. Pure.

Stage 0 announces an epoch when every other stage is registered. Each stage ends its work of earlier
epochs, and then sends heartbeats ("beats") with the new epoch. The group is complete (`is_whole`)
when all stages do. The epoch ends when a stage sends no beats, has a new incarnation, or has missed
a step. All work of an ended epoch is void. The worker's lock guards the state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.errors import ConfigError
from mooncake_store.records.membership import WorkerInfo

log = logging.getLogger(__name__)
SILENT_S = 5.0  # largest gap between beats, which a stage sends twice a second
BEGIN_AGAIN_S = 1.0  # interval between two announcements of an epoch


@dataclass(slots=True)
class GroupStage:
    """A registered stage other than stage 0."""

    info: WorkerInfo
    epoch: str = ""  # epoch of the stage's latest beat; "": in no epoch
    beat_s: float = float("-inf")  # time of the stage's latest beat (monotonic)


class PipelineGroup:
    def __init__(self, own: WorkerInfo) -> None:
        self._own = own
        self.stages = own.pipeline_stages  # number of all stages, stage 0 included
        self._stages: dict[int, GroupStage] = {}  # stage number, 1 or more -> stage
        self._epochs = 0  # number of epochs begun
        self._asked_s = float("-inf")  # time of the latest announcement (monotonic)
        self.epoch = ""  # the announced epoch; "": none is announced
        self.is_whole = False  # True: all stages are in the epoch

    @property
    def others(self) -> dict[int, str]:
        """Number of each registered stage except 0 -> its inbox."""
        return {number: self._stages[number].info.inbox for number in sorted(self._stages)}

    def missing(self) -> str:
        """The error text for a group that is not complete, with the missing stages."""
        ready = {n for n, stage in self._stages.items() if stage.epoch == self.epoch != ""}
        numbers = ", ".join(str(n) for n in range(1, self.stages) if n not in ready)
        name = f"pipeline group {self._own.pipeline_group}"
        return f"{name} is not complete: it waits for stage {numbers}"

    def update_registered(self, workers: Sequence[WorkerInfo]) -> str:
        """Update the stages. Returns "", or the reason if the update ends the epoch."""
        found = {
            info.pipeline_stage: info
            for info in workers
            if is_of_group(info, self._own)
            and 0 < info.pipeline_stage < self.stages
            and not list(mistakes(self._own, info))
        }
        lost = ""
        for number, stage in list(self._stages.items()):
            info = found.get(number)
            if info is None or info.incarnation != stage.info.incarnation:
                del self._stages[number]
                lost = f"stage {number} has left or was restarted"
        for number, info in found.items():
            self._stages.setdefault(number, GroupStage(info))
        return self.end(lost) if lost else ""

    def beat(self, number: int, incarnation: str, epoch: str, now_s: float) -> str:
        """Record a stage's beat. Returns "", or the reason if the beat ends the epoch."""
        stage = self._stages.get(number)
        if stage is None or stage.info.incarnation != incarnation:
            return ""
        stage.beat_s, stage.epoch = now_s, epoch
        if self.is_whole and epoch != self.epoch:
            return self.end(f"stage {number} has left the epoch")
        if not self.is_whole and self.epoch and len(self._stages) == self.stages - 1:
            self.is_whole = all(
                each.epoch == self.epoch and now_s - each.beat_s <= SILENT_S
                for each in self._stages.values()
            )
        return ""

    def end(self, reason: str) -> str:
        """End the epoch. Returns `reason`."""
        self.is_whole, self.epoch, self._asked_s = False, "", float("-inf")
        for stage in self._stages.values():
            stage.epoch = ""
        return reason

    def silence(self, now_s: float) -> str:
        """End the epoch if a stage has sent no beat for SILENT_S. Returns "", or the reason."""
        for number, stage in self._stages.items():
            if self.is_whole and now_s - stage.beat_s > SILENT_S:
                return self.end(f"stage {number} has sent no beat for {SILENT_S:g} s")
        return ""

    def to_begin(self, now_s: float) -> bool:
        """True if the epoch must be announced now. Begins a new epoch if there is none."""
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
    """Conflicts between the settings of two stages, with the remedy. The directory compares
    fingerprints."""
    name = f"{other.worker_id} (stage {other.pipeline_stage} of {other.pipeline_group})"
    for field in ("pipeline_stages", "block_tokens", "pages_max", "context_tokens_max"):
        label = "pages of kv_bytes" if field == "pages_max" else field
        ours, theirs = getattr(own, field), getattr(other, field)
        if ours != theirs:
            yield f"{label} is {ours}, that of {name} is {theirs}; use one value in all stages"
    if own.pipeline_stage == other.pipeline_stage and own.worker_id != other.worker_id:
        yield f"{name} has the same pipeline_stage; number the stages 0, 1, 2 ..."


def refuse_mistakes(own: WorkerInfo, workers: Sequence[WorkerInfo]) -> None:
    """Raise ConfigError with all conflicts between this stage and the registered stages.

    If this worker is registered already, its config.pbtxt is being reloaded, and the conflicts are
    only logged. Otherwise two stages that change together would reject each other.
    """
    others = [
        info for info in workers if is_of_group(info, own) and info.worker_id != own.worker_id
    ]
    found = [problem for other in others for problem in mistakes(own, other)]
    if not found:
        return
    lines = "\n".join(f"  - {line}" for line in found)
    text = f"{own.worker_id}/config.pbtxt has {len(found)} mistake(s):\n{lines}"
    if not any(info.worker_id == own.worker_id for info in workers):
        raise ConfigError(text)
    log.warning("%s", text)
