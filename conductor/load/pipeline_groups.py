"""Which prefill workers compute a prompt together: the stages of a pipeline group.

Stage 0 stands for its group: it alone is called, has the queue and the reservations, and is a
candidate of a decision. The other stages are known so that a group is none while one of them is
missing, silent or draining, and so that its estimate knows how long each of them takes.

A group is whole when each of its stages is there once, all say that it has as many, and all have
one fingerprint. Anything else is said of its stage 0, and it gets no requests until that ends.

Not here: how long a group takes (estimates/pipeline.py), whether each stage is well (cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from conductor.config import ConductorConfig
from conductor.estimates.estimates import PrefillEstimate
from conductor.estimates.pipeline import PipelineEstimate
from conductor.load.worker import WorkerState
from mooncake_store.records.membership import WorkerInfo


def form_groups(workers: Iterable[WorkerState], config: ConductorConfig) -> None:
    """Tell each stage 0 of these workers (one incarnation of each name) who its stages are."""
    groups: dict[str, dict[int, list[WorkerState]]] = {}
    for worker in workers:
        worker.alone()
        if worker.info.pipeline_group:
            stages = groups.setdefault(worker.info.pipeline_group, {})
            stages.setdefault(worker.info.pipeline_stage, []).append(worker)
    for stages in groups.values():
        for first in stages.get(0, ()):
            members, broken = _members(first.info, stages)
            first.lead(members or (first,), broken, _estimate(members or (first,), config))


def _members(
    first: WorkerInfo, stages: dict[int, list[WorkerState]]
) -> tuple[tuple[WorkerState, ...], str]:
    """All stages in order, or why they are no group."""
    members: list[WorkerState] = []
    for number in range(first.pipeline_stages):
        found = stages.get(number, [])
        if len(found) != 1:
            how = "is missing" if not found else f"is said of {len(found)} workers"
            return (), f"stage {number} of its pipeline group {how}"
        info = found[0].info
        if info.pipeline_stages != first.pipeline_stages:
            return (), f"stage {number} of its pipeline group has {info.pipeline_stages} stages"
        if info.fingerprint != first.fingerprint:
            return (), f"stage {number} of its pipeline group has another fingerprint"
        members.append(found[0])
    return tuple(members), ""


def _estimate(members: tuple[WorkerState, ...], config: ConductorConfig) -> PipelineEstimate:
    hops_s = sum(member.info.pipeline_hop_s or config.transfer_latency_s for member in members[1:])
    stages = [PrefillEstimate.of(member.info.prefill_coefficients) for member in members]
    return PipelineEstimate.of(stages, members[0].info.chunk_tokens, hops_s)
