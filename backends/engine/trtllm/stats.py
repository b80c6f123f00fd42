"""What TensorRT-LLM says of itself: statistics of its newest iteration, and whether it is alive.

`LLM.get_stats_async` yields dicts whose keys differ a little between releases; what is missing
is 0. Pure.

Its processes may die, or its executor fail, without telling anybody: that is `EngineHealth`. A
failure that is the request's own fault does not count; several others in a row, with nothing
that went well between them, mean that the engine is gone. Then the worker leaves the cluster and
its process ends: the launcher starts it again, with a fresh engine. Pure.

Not here: asking for them (llm_thread.py), the series (../../worker_metrics.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# nv_trt_llm_* as the classic Triton model names them: (metric, label, value of the label) -> where.
SERIES: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("nv_trt_llm_request_metrics", "request_type", "active"): ("numActiveRequests",),
    ("nv_trt_llm_request_metrics", "request_type", "max"): ("maxNumActiveRequests",),
    ("nv_trt_llm_request_metrics", "request_type", "scheduled"):
        ("inflightBatchingStats", "numScheduledRequests"),
    ("nv_trt_llm_request_metrics", "request_type", "context"):
        ("inflightBatchingStats", "numContextRequests"),
    ("nv_trt_llm_request_metrics", "request_type", "waiting"): ("numQueuedRequests",),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"):
        ("kvCacheStats", "maxNumBlocks"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "free"):
        ("kvCacheStats", "freeNumBlocks"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "used"):
        ("kvCacheStats", "usedNumBlocks"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"):
        ("kvCacheStats", "tokensPerBlock"),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", "gpu"): ("gpuMemUsage",),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", "cpu"): ("cpuMemUsage",),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", "pinned"): ("pinnedMemUsage",),
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric",
     "total_context_tokens"): ("inflightBatchingStats", "numCtxTokens"),
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric",
     "generation_requests"): ("inflightBatchingStats", "numGenRequests"),
    ("nv_trt_llm_general_metrics", "general_type", "iteration_counter"): ("iter",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration of the engine."""

    iterations: int
    step_s: float
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> IterationStats:
        return cls(int(_number(raw, ("iter",))), _number(raw, ("iterLatencyMS",)) / 1e3, raw)

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(metric, labels, value) of everything that TensorRT-LLM's own Triton model shows."""
        for (metric, label, value), path in SERIES.items():
            yield metric, {label: value}, _number(self.raw, path)
        used, most = (
            _number(self.raw, ("kvCacheStats", key)) for key in ("usedNumBlocks", "maxNumBlocks")
        )
        labels = {"kv_cache_block_type": "fraction"}
        yield "nv_trt_llm_kv_cache_block_metrics", labels, used / most if most else 0.0


NONE = IterationStats(0, 0.0, {})


def _number(raw: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = raw
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


log = logging.getLogger(__name__)
FAILURES_MAX = 3  # one may be an accident


class EngineHealth:
    def __init__(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called once, with the reason, in whatever thread noticed it."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._failures = 0
        self.is_lost = False

    def went_well(self) -> None:
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Of one generation, through no fault of its own."""
        with self._lock:
            self._failures += 1
            is_gone = self._failures >= FAILURES_MAX
        if is_gone:
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """Nothing will work any more."""
        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
        log.critical("the engine is lost: %s", reason)
        self._on_lost(reason)
