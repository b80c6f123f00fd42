"""Pipeline groups: which prefill workers are the stages of one pipeline.

Each stage of a group has a share of the model's layers. Requests are routed only to stage 0, which
has the queue and the reservations of the group. The other stages are tracked for two reasons. A
group takes no requests while one of its stages is missing, silent or draining. The estimate of the
group needs the coefficients of each stage.

Stage 0 reports the number of stages n. The group is complete if each stage from 0 to n - 1 is
registered once, and reports the n and the fingerprint (of model and KV layout) of stage 0.
Otherwise stage 0 takes no requests, and `WorkerState.broken` has the reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from conductor.config import ConductorConfig
from conductor.estimates.estimates import PrefillEstimate
from conductor.estimates.pipeline import PipelineEstimate
from conductor.load.worker import WorkerState
from mooncake_store.records.membership import WorkerInfo


def form_groups(workers: Iterable[WorkerState], config: ConductorConfig) -> None:
    """Set stages and estimate of each stage 0. `workers`: the newest incarnation of each name."""
    groups: dict[str, dict[int, list[WorkerState]]] = {}
    for worker in workers:
        worker.leave_group()
        if worker.info.pipeline_group:
            stages = groups.setdefault(worker.info.pipeline_group, {})
            stages.setdefault(worker.info.pipeline_stage, []).append(worker)
    for stages in groups.values():
        for first in stages.get(0, ()):
            members, broken = _members(first.info, stages)
            first.lead_group(members or (first,), broken, _estimate(members or (first,), config))


def _members(
    first: WorkerInfo, stages: dict[int, list[WorkerState]]
) -> tuple[tuple[WorkerState, ...], str]:
    """(all stages in order, ""), or ((), the reason why the group is incomplete)."""
    members: list[WorkerState] = []
    for number in range(first.pipeline_stages):
        found = stages.get(number, [])
        if len(found) != 1:
            how = "is missing" if not found else f"is registered by {len(found)} workers"
            return (), f"stage {number} of its pipeline group {how}"
        info = found[0].info
        if info.pipeline_stages != first.pipeline_stages:
            counts = f"{info.pipeline_stages} stages, but stage 0 reports {first.pipeline_stages}"
            return (), f"stage {number} of its pipeline group reports {counts}"
        if info.fingerprint != first.fingerprint:
            return (), f"stage {number} of its pipeline group has another fingerprint"
        members.append(found[0])
    return tuple(members), ""


def _estimate(members: tuple[WorkerState, ...], config: ConductorConfig) -> PipelineEstimate:
    hops_s = sum(member.info.pipeline_hop_s or config.transfer_latency_s for member in members[1:])
    stages = [PrefillEstimate.of(member.info.prefill_coefficients) for member in members]
    return PipelineEstimate.of(stages, members[0].info.chunk_tokens, hops_s)
