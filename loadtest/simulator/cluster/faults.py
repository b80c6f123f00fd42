"""What breaks in a simulated cluster, and when: a worker gets slow, is killed, or its host is lost.

    slow   every step takes `factor` times as long from then on; 1.0 makes it well again
    kill   the worker's process ends; its front notices and tries its requests elsewhere, the
           directory misses its reports after the TTL; blocks on its node stay
    host   the same, and what its storage node holds is gone

A try that was lost begins again from its prompt (the real front goes on behind the tokens that the
client has): its prefix is in the store unless the host went too. Not here: retries (fleet.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.simulator.cluster.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    worker_id: str
    kind: Literal["slow", "kill", "host"]
    factor: float = 1.0


def plan(fleet: Fleet, faults: Sequence[Fault]) -> None:
    """To be called before the run."""
    for fault in faults:
        assert fault.worker_id in fleet.prefills or fault.worker_id in fleet.decodes, fault
        assert fault.factor > 0, fault
        fleet.clock.at(fault.at_s, _strike, fleet, fault)


def _strike(fleet: Fleet, fault: Fault) -> None:
    worker = fleet.prefills.get(fault.worker_id) or fleet.decodes[fault.worker_id]
    if fault.kind == "slow":
        worker.slowness = fault.factor
        return
    if worker.is_dead:
        return
    jobs = worker.die()
    fleet.conductor.on_worker_failed(worker.worker_id, worker.incarnation, fleet.clock.now_s)
    if fault.kind == "host":
        fleet.site.store.lose_node(worker.node_id)
    fleet.lost(jobs, worker.worker_id)
