"""Role balance: the demand and the workers of both pools, as input of the role controller.

Collects the state of the cluster and the demand of this and the other frontends, and counts
proposals.

Not here: the demand model (demand.py), the decision (controller.py).
"""

from __future__ import annotations

from collections import Counter

from conductor.load.cluster import Cluster
from conductor.messages import RoleFlip
from conductor.notes import NoteBatch
from conductor.roles.controller import ROLES, RoleController, RolePool
from conductor.roles.demand import RoleDemand


class RoleBalance:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.demand = RoleDemand(cluster.config)
        self._controller = RoleController(cluster.config)
        self._proposed: Counter[str] = Counter()

    def on_batch(self, batch: NoteBatch, now_s: float) -> None:
        """Count the routed requests and finished answers of another frontend."""
        for note in batch.routed:
            decode = self._cluster.workers.get(note.decode)
            if decode is not None:
                tokens = note.new_tokens + note.cached_tokens
                self.demand.asked(note.prefill_s, tokens, decode, now_s)
        for ended in batch.ended:
            if ended.output_tokens >= 0:
                self.demand.ended(ended.output_tokens, now_s)

    def propose(self, is_our_turn: bool, now_s: float) -> RoleFlip | None:
        """A proposed flip, or None. All frontends accumulate the debt, also without their turn."""
        draining = [
            worker
            for worker in self._cluster.workers.values()
            if worker.info.can_flip and worker.is_draining
        ]
        pools = {role: self._pool(role, now_s) for role in ROLES}
        flip = self._controller.propose(pools, draining, self._cluster.decode_s, is_our_turn, now_s)
        if flip is not None:
            self._proposed[flip.role] += 1
        return flip

    def _pool(self, role: str, now_s: float) -> RolePool:
        warming = {worker.key for worker, _ in self._cluster.warming_up(role, now_s)}
        return RolePool(
            self._cluster.takers(role, now_s), self._wanted(role, now_s), frozenset(warming)
        )

    def _wanted(self, role: str, now_s: float) -> float:
        workers = [w for w in self._cluster.workers.values() if w.info.role == role]
        if role == "prefill":
            return self.demand.prefills_wanted(workers, now_s)
        return self.demand.decodes_wanted(workers, now_s)

    def workers_wanted(self, now_s: float) -> dict[str, float]:
        return {role: self._wanted(role, now_s) for role in ROLES}

    @property
    def flips_proposed(self) -> dict[str, int]:
        return {role: self._proposed[role] for role in ROLES}

    def check(self) -> None:
        self._controller.check()
        self.demand.check()
