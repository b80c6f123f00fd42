"""Statistics of TensorRT-LLM's newest step, from `LLM.get_stats_async`.

The keys of its dicts differ between releases. A missing value is 0. Pure.

Not here: reading them (llm_thread.py), all other series (../../metrics/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Names of the classic Triton model: metric -> (label, {value of the label: path in the dict}).
SERIES: dict[str, tuple[str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": ("request_type", {
        "active": "numActiveRequests", "max": "maxNumActiveRequests",
        "scheduled": "inflightBatchingStats.numScheduledRequests", "waiting": "numQueuedRequests",
        "context": "inflightBatchingStats.numContextRequests",
    }),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", {
        "max": "kvCacheStats.maxNumBlocks", "free": "kvCacheStats.freeNumBlocks",
        "used": "kvCacheStats.usedNumBlocks", "tokens_per": "kvCacheStats.tokensPerBlock",
    }),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {
        "gpu": "gpuMemUsage", "cpu": "cpuMemUsage", "pinned": "pinnedMemUsage",
    }),
    "nv_trt_llm_inflight_batcher_metrics": ("inflight_batcher_specific_metric", {
        "total_context_tokens": "inflightBatchingStats.numCtxTokens",
        "generation_requests": "inflightBatchingStats.numGenRequests",
    }),
    "nv_trt_llm_general_metrics": ("general_type", {"iteration_counter": "iter"}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One step of the engine."""

    raw: Mapping[str, Any]  # {} before the first step

    @property
    def step_s(self) -> float:
        return _number(self.raw, "iterLatencyMS") / 1e3

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(metric, labels, value) of all that TensorRT-LLM's own Triton model exports."""
        for metric, (label, paths) in SERIES.items():
            for value, path in paths.items():
                yield metric, {label: value}, _number(self.raw, path)
        used = _number(self.raw, "kvCacheStats.usedNumBlocks")
        most = _number(self.raw, "kvCacheStats.maxNumBlocks")
        labels = {"kv_cache_block_type": "fraction"}
        yield "nv_trt_llm_kv_cache_block_metrics", labels, used / most if most else 0.0


def _number(raw: Mapping[str, Any], path: str) -> float:
    value: Any = raw
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0
