"""Service levels of each request: numbers of seconds, or `auto` as the Mooncake paper states them.

The paper ("Overload-oriented scheduling") sets the service levels to 10x the TTFT and 5x the TBT of
a single request on an unloaded system. `auto` computes them for the length of each prompt:

    ttft_slo_s = max(TTFT_S_MIN, TTFT_FACTOR * prefill of the whole prompt)
    tbt_slo_s  = max(TBT_S_MIN,  TBT_FACTOR  * decode step of this request alone)

Both times are those of the fastest worker of the role. They come from the coefficients that the
worker measured before it took requests. A worker that proves faster than its coefficients shortens
them. A slower one does not lengthen them. Three properties follow:

- Load cannot loosen a limit. The speed ratio rises under load, and limits that followed it above 1
  would admit more when workers become slower.
- Coefficients that were measured beside other work are too long, for example when all workers of a
  machine start at once. Requests correct them.
- Cached tokens do not tighten the limit of a request.

A role without measured coefficients has no unloaded time. The limits are then UNMEASURED_TTFT_S and
UNMEASURED_TBT_S, so that a cold start rejects no request.

Some rules need one service level for all requests: the target of the queues, the number of workers
that a load needs, and the status pages. With `auto` these rules read `recent`, a moving average.

Not here: margin and priority (admission.py), the estimates (estimates/).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from conductor.config import AUTO, ConductorConfig
from conductor.estimates.estimates import DecodeEstimate, PrefillEstimate
from conductor.estimates.measured import SpeedRatio
from conductor.estimates.pipeline import PipelineEstimate
from conductor.load.cluster import Cluster
from conductor.load.worker import WorkerState
from conductor.messages import AppliedLimits

TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0  # of the unloaded times; the paper's service levels
TTFT_S_MIN, TBT_S_MIN = 1.0, 0.05  # people notice no difference below these values
# Share of an `auto` TBT up to which a step is predicted. A request's TBT is the mean of its longest
# intervals, so a batch whose steps take as long as the service level misses it.
STEP_SHARE = 0.8
TTFT_RULE = f"auto: {TTFT_FACTOR:g}x unloaded, at least {TTFT_S_MIN:g} s"
TBT_RULE = f"auto: {STEP_SHARE:.0%} of {TBT_FACTOR:g}x unloaded, at least {TBT_S_MIN:g} s"
UNMEASURED_TTFT_S, UNMEASURED_TBT_S = 30.0, 1.0
TYPICAL_TOKENS = 1_024  # the prompt for which workers are compared; `recent` before any request
RECENT_WEIGHT = 1 / 64  # of one request in `recent`
_Prefill: TypeAlias = tuple[PrefillEstimate | PipelineEstimate, SpeedRatio]  # of a worker
_Decode: TypeAlias = tuple[DecodeEstimate, SpeedRatio]


class ServiceLimits:
    """The configured service levels, and those of single requests."""

    def __init__(self, config: ConductorConfig, cluster: Cluster) -> None:
        self._pools = cluster.prefills, cluster.decodes
        self._versions = (-1, -1)  # of the pools, when the fastest workers were chosen
        self._fastest: tuple[_Prefill | None, _Decode | None] = (None, None)
        self._ttft_s = None if config.ttft_slo_s == AUTO else config.ttft_slo_s
        self._tbt_s = None if config.tbt_slo_s == AUTO else config.tbt_slo_s
        # Share of tbt_slo_s up to which admission fills batches.
        self.step_share = STEP_SHARE if config.tbt_slo_s == AUTO else 1.0
        self._is_auto = self._ttft_s is None or self._tbt_s is None
        self._recent: tuple[float, float] | None = None

    def of(self, prompt_tokens: float) -> tuple[float, float]:
        """The service levels (TTFT, TBT) of a prompt of this length, in seconds."""
        ttft_s, tbt_s = self._ttft_s, self._tbt_s
        if self._is_auto:
            prefill, decode = self._unloaded()
            if ttft_s is None:
                ttft_s = UNMEASURED_TTFT_S
                if prefill is not None:
                    estimate, speed = prefill
                    prefill_s = min(1.0, speed.latest) * estimate.seconds(prompt_tokens, 0)
                    ttft_s = max(TTFT_S_MIN, TTFT_FACTOR * prefill_s)
            if tbt_s is None:
                tbt_s = UNMEASURED_TBT_S
                if decode is not None:
                    step, speed = decode
                    step_s = min(1.0, speed.latest) * step.step_s(1, prompt_tokens)
                    tbt_s = max(TBT_S_MIN, TBT_FACTOR * step_s)
        assert ttft_s is not None and tbt_s is not None
        return ttft_s, tbt_s

    def step_s_max(self, context_tokens: float) -> float:
        """The longest step, in seconds, of a batch of requests with this context."""
        return self.step_share * self.of(context_tokens)[1]

    @property
    def recent(self) -> tuple[float, float]:
        """The configured service levels (TTFT, TBT) in seconds; with `auto`, the moving average
        over recent requests, or the levels of TYPICAL_TOKENS before the first one."""
        return self._recent or self.of(TYPICAL_TOKENS)

    def note(self, limits: AppliedLimits) -> None:
        """Count the limits of a decided request in `recent`."""
        if not self._is_auto:
            return
        ttft_s, tbt_s = self._recent or limits[:2]
        self._recent = (
            ttft_s + RECENT_WEIGHT * (limits.ttft_slo_s - ttft_s),
            tbt_s + RECENT_WEIGHT * (limits.tbt_slo_s - tbt_s),
        )

    def _unloaded(self) -> tuple[_Prefill | None, _Decode | None]:
        """The estimate and the speed ratio of the fastest measured workers; None for a role without
        one."""
        prefills, decodes = self._pools
        if (prefills.version, decodes.version) != self._versions:
            self._versions = (prefills.version, decodes.version)
            self._fastest = (_fastest_prefill(prefills.workers), _fastest_decode(decodes.workers))
            self._recent = None  # limits of other workers
        return self._fastest


def _fastest_prefill(workers: Iterable[WorkerState]) -> _Prefill | None:
    """Stage 0 of an incomplete pipeline group has no time: it computes a part of the layers."""
    measured: list[_Prefill] = [
        (worker.pipeline if len(worker.stages) > 1 else worker.pipeline.slowest, worker.speed)
        for worker in workers
        if not worker.broken and all(stage.info.prefill_coefficients for stage in worker.stages)
    ]
    return min(measured, key=lambda each: each[0].seconds(TYPICAL_TOKENS, 0), default=None)


def _fastest_decode(workers: Iterable[WorkerState]) -> _Decode | None:
    measured = [(w.decode_estimate, w.speed) for w in workers if w.info.decode_coefficients]
    return min(measured, key=lambda each: each[0].step_s(1, TYPICAL_TOKENS), default=None)
