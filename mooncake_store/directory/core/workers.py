"""Registered workers: liveness, and compatibility of their KV caches.

Live workers have the same fingerprint, a hash of the model and its KV layout. A worker with another
fingerprint would find no block, because its block keys differ, or would read KV of another shape.
Registration rejects such a worker and names the fields that differ. Incarnations (processes) of one
worker may differ, because Triton loads the new version of a model before it unloads the old one.

Not here: the contents of a fingerprint (layout.py), the load of a worker (the conductor).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.errors import FingerprintMismatch, RequestInvalid, StoreFull
from mooncake_store.layout import describe_difference
from mooncake_store.records.events import Event, WorkerDown, WorkerReported, WorkerUp
from mooncake_store.records.membership import WorkerInfo, WorkerReport


@dataclass(slots=True)
class _Worker:
    info: WorkerInfo
    seen_s: float  # time of its last registration or report
    report: WorkerReport | None = None  # the latest; None: no report yet


class WorkerTable:
    """(worker_id, incarnation) -> worker. Methods return the events of each change."""

    def __init__(self, config: DirectoryConfig) -> None:
        self._config = config
        self._workers: dict[tuple[str, str], _Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def infos(self) -> list[WorkerInfo]:
        """The registered workers, in order of registration."""
        return [worker.info for worker in self._workers.values()]

    @property
    def reports(self) -> list[WorkerReport]:
        return [worker.report for worker in self._workers.values() if worker.report is not None]

    def register(self, info: WorkerInfo, now_s: float) -> list[Event]:
        """Returns [WorkerUp], or [] if the same worker registers again unchanged. Raises
        RequestInvalid, FingerprintMismatch or StoreFull."""
        name = (info.worker_id, info.incarnation)
        measured = {
            "prefill_coefficients": info.prefill_coefficients,
            "decode_coefficients": info.decode_coefficients,
            "transfer_bytes_per_s": info.transfer_bytes_per_s.values(),
            "transfer_latency_s": info.transfer_latency_s.values(),
            "pipeline_hop_s": (info.pipeline_hop_s,),
        }
        _refuse_non_finite(info.worker_id, measured)
        if not 0 <= info.load_beside_share < 1:
            raise RequestInvalid(
                f"worker {info.worker_id}: load_beside_share is {info.load_beside_share}; it must "
                "be at least 0 and less than 1"
            )
        self._refuse_misfit(info, now_s)
        known = self._workers.get(name)
        if known is None and len(self._workers) >= self._config.workers_max:
            raise StoreFull(
                f"{len(self._workers)} workers are registered and workers_max is "
                f"{self._config.workers_max}; raise it, or find the source of the registrations"
            )
        self._workers[name] = _Worker(info, now_s, known.report if known else None)
        return [] if known and known.info == info else [WorkerUp(info)]

    def report(self, report: WorkerReport, now_s: float) -> list[Event]:
        """Returns [WorkerReported], or [] for an unregistered worker. Raises RequestInvalid."""
        worker = self._workers.get((report.worker_id, report.incarnation))
        if worker is None:
            return []
        took_s = {"step_s": (report.step_s,), "oldest_step_s": (report.oldest_step_s,)}
        _refuse_non_finite(report.worker_id, took_s)
        worker.seen_s, worker.report = now_s, report
        return [WorkerReported(report)]

    def deregister(self, worker_id: str, incarnation: str) -> list[Event]:
        gone = self._workers.pop((worker_id, incarnation), None)
        return [] if gone is None else [WorkerDown(worker_id, incarnation)]

    def expire(self, now_s: float) -> list[Event]:
        silent = [name for name, worker in self._workers.items() if not self._lives(worker, now_s)]
        return [event for name in silent for event in self.deregister(*name)]

    def _lives(self, worker: _Worker, now_s: float) -> bool:
        return now_s - worker.seen_s <= self._config.worker_ttl_s

    def _refuse_misfit(self, info: WorkerInfo, now_s: float) -> None:
        for worker in self._workers.values():
            other = worker.info
            # Another incarnation of the same worker is about to end, so it may differ.
            if other.worker_id == info.worker_id or not self._lives(worker, now_s):
                continue
            if other.fingerprint != info.fingerprint:
                raise FingerprintMismatch(
                    f"worker {info.worker_id} does not fit worker {other.worker_id}: "
                    f"{describe_difference(info.description, other.description)}. Give both the "
                    "same checkpoint and KV settings, or stop the other one first."
                )

    def check(self) -> None:
        assert len(self._workers) <= self._config.workers_max
        for (worker_id, incarnation), worker in self._workers.items():
            assert (worker.info.worker_id, worker.info.incarnation) == (worker_id, incarnation)
            report = worker.report
            assert report is None or report.incarnation == incarnation


def _refuse_non_finite(worker_id: str, measured: Mapping[str, Collection[float]]) -> None:
    """Reject measurements that are not finite, because frontends compare workers by them."""
    for name, values in measured.items():
        if not all(map(math.isfinite, values)):
            raise RequestInvalid(
                f"worker {worker_id}: {name} has {list(values)}; they must be finite numbers"
            )
